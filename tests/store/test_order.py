"""The order in which a save and a removal touch the disk, and what looking and loading leave alone."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from blockstore import Store
from fs_doubles import CHANGES, Call, Watching
from store_kit import block_path, flip
from token_caches import IDENTITY, plain, small_store

TOKENS = list(range(12))
LONGER = [*range(10), 90, 91, 92, 93, 94]
SYNCS = ("sync_fd", "sync_file", "sync_dir")


@pytest.fixture
def fs() -> Watching:
    return Watching()


@pytest.fixture(params=["full", "none"])
def durability(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path, fs: Watching, durability: str) -> Iterator[Store]:
    """A store that holds TOKENS."""
    with small_store(tmp_path / "store", durability=durability, fs=fs) as opened:
        opened.save(TOKENS, plain(TOKENS), IDENTITY)
        fs.clear()
        yield opened


def save_longer(store: Store) -> str:
    return store.save(LONGER, plain(LONGER), IDENTITY).entry_id


def places(calls: Sequence[Call], wanted: Callable[[Call], bool]) -> list[int]:
    return [i for i, call in enumerate(calls) if wanted(call)]


def about(name: str, path: str) -> Callable[[Call], bool]:
    return lambda call: (call.name, call.path) == (name, path)


# ---- saving


def test_blocks_come_first_then_the_header_then_the_index(store: Store, fs: Watching) -> None:
    seen: list[str] = []

    def look(call: Call) -> None:
        if call.places_block or call.places_header:
            seen.append("block" if call.places_block else "header")
            assert len(store.entries()) == 1, "the entry is in the index before its header stands"

    fs.before = look
    save_longer(store)
    assert seen == ["block"] * (len(seen) - 1) + ["header"]
    assert len(seen) > 1
    assert len(store.entries()) == 2


def test_nothing_enters_blocks_before_it_is_reserved(store: Store, fs: Watching) -> None:
    reserved: list[bool] = []

    def look(call: Call) -> None:
        if call.places_block:
            with store._rooms.index.env.read() as txn:
                row = txn.get("blocks", bytes.fromhex(os.path.basename(call.target)))
                reserved.append(row is not None and txn.count("leases") == 1)

    fs.before = look
    save_longer(store)
    assert reserved
    assert all(reserved)


@pytest.mark.parametrize("durability", ["full"], indirect=True)
def test_a_durable_save_syncs_each_file_before_it_has_its_name_and_then_the_names(store: Store, fs: Watching) -> None:
    save_longer(store)
    calls = fs.calls
    [header] = places(calls, lambda call: call.places_header)
    blocks = places(calls, lambda call: call.places_block)
    synced_names = places(calls, lambda call: call.name == "sync_dir" and call.path.endswith("blocks"))
    for at in blocks:
        temporary = calls[at].path
        written, synced = (places(calls, about(name, temporary)) for name in ("write_new", "sync_file"))
        assert max(written) < min(synced)
        assert max(synced) < at < max(synced_names) < header
    header_written = places(calls, about("write_new", calls[header].path))
    assert any(calls[i].name == "sync_fd" for i in range(header_written[0], header))
    scope = os.path.dirname(calls[header].target)
    header_named = places(calls, about("sync_dir", scope))
    published = places(calls, lambda call: call.name == "unlock" and call.path.endswith("lock"))
    assert header < min(header_named) < max(published)


def test_a_new_scope_is_durable_before_its_first_header_is_named_there(tmp_path: Path, fs: Watching) -> None:
    with small_store(tmp_path / "other", durability="full", fs=fs) as store:
        fs.clear()
        save_longer(store)
    made = places(fs.calls, lambda call: call.name == "make_dir" and "entries" in call.path)
    synced = places(fs.calls, lambda call: call.name == "sync_dir" and call.path.endswith("entries"))
    assert made[-1] < synced[0] < places(fs.calls, lambda call: call.places_header)[0]


@pytest.mark.parametrize("durability", ["none"], indirect=True)
def test_a_store_without_durability_waits_for_no_disk(store: Store, fs: Watching) -> None:
    entry_id = save_longer(store)
    store.save(TOKENS, plain(TOKENS), IDENTITY)
    store.load(entry_id)
    store.remove(entry_id)
    store.gc(full=True)
    assert fs.named(*SYNCS) == []


def test_the_index_is_as_durable_as_the_store(store: Store, durability: str) -> None:
    assert store.entries()
    assert store._env._env is not None
    assert store._env._env.flags()["sync"] is (durability == "full")


def test_a_published_name_is_never_opened_for_writing(store: Store, fs: Watching) -> None:
    save_longer(store)
    store.save(LONGER, plain(LONGER), IDENTITY)
    assert {os.path.basename(os.path.dirname(os.path.dirname(call.path))) for call in fs.named("write_new")} == {
        "leases"
    }


# ---- removing


def test_a_removal_takes_the_entry_from_the_index_before_its_header_goes(store: Store, fs: Watching) -> None:
    [entry] = store.entries()
    known: list[int] = []

    def look(call: Call) -> None:
        if call.name == "unlink" and call.path.endswith(".mlxkv"):
            known.append(store._rooms.index.counts()["entries"])
            assert store._rooms.index.doomed() == [(entry.entry_id, entry.scope)]

    fs.before = look
    store.remove(entry.entry_id)
    assert known == [0]
    assert store._rooms.index.doomed() == []


def test_a_superseded_header_goes_after_the_new_entry_is_committed(store: Store, fs: Watching) -> None:
    [old] = store.entries()
    current: list[str] = []

    def look(call: Call) -> None:
        if call.name == "unlink" and call.path.endswith(old.entry_id + ".mlxkv"):
            current.extend(entry.entry_id for entry in store.entries())

    fs.before = look
    saved = store.save(TOKENS, plain(TOKENS), IDENTITY)
    assert current == [saved.entry_id]


def test_removing_leaves_the_blocks_to_the_collection(store: Store, fs: Watching) -> None:
    [entry] = store.entries()
    store.remove(entry.entry_id)
    assert [call for call in fs.named("unlink") if call.within("blocks")] == []
    assert store.gc().count("block") == len([call for call in fs.named("unlink") if call.within("blocks")]) > 0


# ---- what changes nothing


def changes(fs: Watching) -> list[Call]:
    """Without locks, which every look takes and lets go."""
    return [call for call in fs.named(*CHANGES) if call.name not in ("unlock", "open_lock")]


def test_looking_and_loading_change_nothing(store: Store, fs: Watching) -> None:
    [entry] = store.entries()
    fs.clear()
    assert store.find([*TOKENS, 1], IDENTITY) is not None
    assert [call for call in fs.calls if "entries" in call.path or "blocks" in call.path] == [], "find opens no header"
    store.load(entry.entry_id)
    store.stats()
    store.gc(dry_run=True, full=True)
    assert changes(fs) == []


def test_opening_deletes_nothing(store: Store, fs: Watching, tmp_path: Path, durability: str) -> None:
    [entry] = store.entries()
    flip(block_path(store, min(os.listdir(tmp_path / "store" / "blocks"))))
    store._rooms.index.doom(entry.entry_id)
    (tmp_path / "store" / "leases" / ("0" * 32)).mkdir()
    store.close()
    fs.clear()
    with small_store(tmp_path / "store", durability=durability, fs=fs) as again:
        assert again.entries() == []
    assert fs.named("unlink", "remove_dir", "rename") == []


def test_nothing_with_a_strange_name_is_touched(store: Store) -> None:
    root = Path(store.root)
    strangers = [
        root / "README", root / "blocks" / "note.txt", root / "blocks" / ("A" * 64), root / "leases" / "mine",
        root / "entries" / "old.mlxkv", root / "entries" / ("0" * 32) / "copy.mlxkv.bak", root / "quarantine" / "kept",
    ]  # fmt: skip
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"not ours")
    for entry in store.entries():
        store.remove(entry.entry_id)
    store.gc(full=True)
    assert [path for path in strangers if path.read_bytes() != b"not ours"] == []
