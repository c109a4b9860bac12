"""The queue before a store: what the document shows, and what a server does."""

from pathlib import Path

import pytest

from blockstore import InvalidInput, SpillQueue, Store
from spill.kit import PATIENCE_S
from store_kit import all_facts
from test_docs import BLOCK, ROOT
from token_caches import IDENTITY, extend, identity, plain, small_store


def test_the_example_of_the_document_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = BLOCK.findall((ROOT / "docs" / "spill.md").read_text())
    tokens = list(range(300))
    exec(compile(block, "spill.md", "exec"), {"tokens": tokens, "caches": plain(tokens), "identity": IDENTITY})
    with Store("my-store") as store:
        [entry] = store.entries()
        assert capsys.readouterr().out == f"{entry.entry_id}\n"


def test_turns_are_committed_while_the_caches_go_on(tmp_path: Path) -> None:
    """Each snapshot is what the caches were when it was taken."""
    tokens = list(range(20))
    caches = plain(tokens)
    with small_store(tmp_path / "store") as store, SpillQueue(store.commit, max_bytes=1 << 30) as queue:
        futures = []
        for turn in range(8):
            prepared = store.prepare(tokens, caches, identity(f"turn {turn}"))
            futures.append(queue.enqueue(prepared, prepared.logical_bytes, label=turn))
            tokens = [*tokens, 50 + turn]
            for cache in caches:
                extend(cache, tokens)
        outcomes = [future.result(PATIENCE_S) for future in futures]
        assert [outcome.traceback for outcome in outcomes] == [""] * 8
        assert queue.stats.stored_bytes == sum(outcome.result.logical_bytes for outcome in outcomes)
        for turn, outcome in enumerate(outcomes):
            assert all_facts(store.load(outcome.result.entry_id).caches) == all_facts(plain(tokens[: 20 + turn]))


def test_what_the_store_refuses_has_failed(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        prepared = store.prepare(range(9), plain(range(9)), IDENTITY)
    with SpillQueue(store.commit, max_bytes=1) as queue:
        outcome = queue.enqueue(prepared, prepared.logical_bytes).result(PATIENCE_S)
    assert outcome.reason == "failed"
    assert isinstance(outcome.error, InvalidInput)
    assert "the store is closed" in outcome.traceback
