"""What all tests share: Hypothesis profiles, and no way out of the machine or into the user's own caches."""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"  # before any test imports a package that reads it

# No deadline: what one example takes depends on who else uses the machine. CI repeats the same examples each time, so
# that a red run says something about the commit; elsewhere every run tries new ones.
settings.register_profile("default", deadline=None, max_examples=50, derandomize="CI" in os.environ)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=5_000,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True, scope="session")
def user_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Point the user's cache directory elsewhere, for this process and those that it starts."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("user-caches"))
