"""gc(full=True) believes the headers: what it adopts, what it drops, and what it leaves alone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockstore import Store
from store_kit import (
    all_facts,
    assert_clean,
    assert_exact,
    block_names,
    block_path,
    flip,
    header_of,
    header_paths,
    named_blocks,
)
from token_caches import IDENTITY, plain, small_store

TOKENS = list(range(12))
OTHERS = [*range(10), 90, 91, 92]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store") as opened:
        yield opened


def save(store: Store, tokens: list[int]) -> str:
    return store.save(tokens, plain(tokens), IDENTITY).entry_id


def keep_header(store: Store, entry_id: str, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of a header, and where it stood."""
    path = header_paths(store)[entry_id]
    return Path(shutil.copy(path, tmp_path / "kept")), path


def test_a_header_that_no_row_knows_is_adopted_where_it_is_whole_and_alone(store: Store, tmp_path: Path) -> None:
    entry_id = save(store, TOKENS)
    kept, path = keep_header(store, entry_id, tmp_path)
    store.remove(entry_id)
    path.parent.mkdir(exist_ok=True)  # it went with the last header in it
    shutil.copy(kept, path)
    plan = store.gc(dry_run=True, full=True)
    assert ("entry", entry_id) in {(item.what, item.name) for item in plan.items}
    store.gc(full=True)
    assert all_facts(store.load(entry_id).caches) == all_facts(plain(TOKENS))
    found = store.find([*TOKENS, 1], IDENTITY)
    assert found is not None
    assert found.entry_id == entry_id
    assert_exact(store)
    assert_clean(store)


def test_a_header_that_was_superseded_is_removed(store: Store, tmp_path: Path) -> None:
    old = save(store, TOKENS)
    kept, path = keep_header(store, old, tmp_path)
    new = save(store, TOKENS)
    path.parent.mkdir(exist_ok=True)  # it went with the last header in it
    shutil.copy(kept, path)
    store.gc(full=True)
    assert set(header_paths(store)) == {new}
    assert all_facts(store.load(new).caches) == all_facts(plain(TOKENS))
    assert_exact(store)


def test_a_header_whose_blocks_are_gone_is_removed(store: Store, tmp_path: Path) -> None:
    entry_id, other = save(store, TOKENS), save(store, OTHERS)
    kept, path = keep_header(store, entry_id, tmp_path)
    store.remove(entry_id)
    store.gc()
    path.parent.mkdir(exist_ok=True)  # it went with the last header in it
    shutil.copy(kept, path)
    store.gc(full=True)
    assert set(header_paths(store)) == {other}
    assert_exact(store)


def test_an_entry_without_its_header_is_dropped_with_what_only_it_needs(store: Store) -> None:
    entry_id, other = save(store, TOKENS), save(store, OTHERS)
    header_paths(store)[entry_id].unlink()
    store.gc(full=True)
    assert [entry.entry_id for entry in store.entries()] == [other]
    assert block_names(store) == named_blocks(header_of(store, other))
    assert_exact(store)


def test_files_that_no_row_knows_are_deleted_unless_a_header_cannot_be_read(store: Store, tmp_path: Path) -> None:
    entry_id, other = save(store, TOKENS), save(store, OTHERS)
    kept, path = keep_header(store, entry_id, tmp_path)
    store.remove(entry_id)
    orphan = block_path(store, "0" * 64)
    orphan.write_bytes(b"left by a lost index")
    path.parent.mkdir(exist_ok=True)  # it went with the last header in it
    shutil.copy(kept, path)
    flip(path)
    [left_out] = [item for item in store.gc(full=True).items if item.what == "sweep"]
    assert "cannot be read" in left_out.why
    assert orphan.exists()
    assert path.exists()
    path.unlink()
    store.gc()
    assert orphan.exists(), "a collection that is not full knows nothing of it"
    store.gc(full=True)
    assert not orphan.exists()
    assert [entry.entry_id for entry in store.entries()] == [other]
    assert_exact(store)


def test_an_unreadable_header_of_a_known_entry_stops_nothing(store: Store) -> None:
    entry_id = save(store, TOKENS)
    flip(header_paths(store)[entry_id])
    orphan = block_path(store, "0" * 64)
    orphan.write_bytes(b"left by a lost index")
    store.gc(full=True)
    assert not orphan.exists()
    assert [entry.entry_id for entry in store.entries()] == [entry_id]
