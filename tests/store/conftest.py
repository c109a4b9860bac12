"""Fixtures of the tests of locks and interruptions."""

from pathlib import Path

import pytest

from blockstore import locks
from token_caches import IDENTITY, plain, small_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store that holds the tokens 0 to 19."""
    tokens = list(range(20))
    with small_store(tmp_path / "store") as store:
        store.save(tokens, plain(tokens), IDENTITY)
    return tmp_path / "store"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "PATIENCE_S", 0.1)
