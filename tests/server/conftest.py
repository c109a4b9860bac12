"""Two models of one geometry, and a server that nothing happens to."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.servers import Server
from tools.bench.small_model import write_model


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_heard() -> None:
    """A shell that starts the tests in the background lets them ignore SIGINT, and so would their children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "one", seed=1)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "other", seed=2)


@pytest.fixture(scope="session")
def steady(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What it answers is what any server has to answer. Its store is its own."""
    with Server(tmp_path_factory.mktemp("steady") / "store", model) as server:
        yield server
