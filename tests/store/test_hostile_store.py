"""A store that somebody else's hands were in: links, pipes, giants, names that are not ours.

Whatever stands there, nothing outside of the store's directory is written or deleted, nothing hangs, nothing reads a
giant, and what is not concerned goes on.
"""

import contextlib
import json
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from blockstore import BlockstoreError, CorruptEntry, InvalidInput, StoreBroken, layout
from blockstore.fs import FileSystem
from format.headers import pack
from fs_doubles import Recording
from store.damage_kit import THINGS, TOKENS, VICTIM, World, loads, put_instead, repaired, snapshot, world
from store_kit import assert_clean, assert_exact, report_of
from token_caches import IDENTITY, identity, plain, small_store

LATE = tuple(range(70, 82))
PATIENCE_S = 30
GIANT_BYTES = 10 << 30
MEMORY_BYTES = 128 << 20  # four times what the longest header may have
REFUSALS = (BlockstoreError, OSError)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A call that waits for somebody to open the other end of a pipe is interrupted, and fails its test."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "store") as built:
        yield built


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder beside the store with something of every kind in it, which must stay as it is."""
    folder = tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    (folder / "precious").write_bytes(b"not ours")
    (folder / "sub" / "lock").write_bytes(b"not ours either")
    (folder / "sub" / ("a" * 32 + ".mlxkv")).write_bytes(b"nor this")
    (folder / "sub" / ("b" * 64)).write_bytes(b"nor that")
    return folder


each_thing = pytest.mark.parametrize("thing", THINGS)


# ---- in the place of a block or a header


def put(made: World, outside: Path, what: str, thing: str) -> dict[str, tuple[object, ...]]:
    """Put a thing in the place of the victim's last block or of its header; what is outside then."""
    put_instead(made.blocks("victim")[2] if what == "block" else made.header("victim"), outside, thing)
    return snapshot(outside)


@each_thing
@pytest.mark.parametrize("what", ["block", "header"])
def test_what_is_no_file_is_a_miss_and_the_next_save_takes_its_place(
    made: World, outside: Path, what: str, thing: str
) -> None:
    before = put(made, outside, what, thing)
    assert {problem.severity for problem in report_of(made.store).problems} >= {"damage"}
    with pytest.raises(CorruptEntry):
        made.store.load(made.ids["victim"])
    assert made.loading() == {"sharing", "apart"}
    made.save("victim")
    assert made.loading() == set(TOKENS)
    made.store.gc(full=True)
    assert_exact(made.store)
    assert_clean(made.store)
    assert snapshot(outside) == before


@each_thing
@pytest.mark.parametrize("what", ["block", "header"])
def test_repair_sets_what_is_no_file_aside_as_it_is(made: World, outside: Path, what: str, thing: str) -> None:
    before = put(made, outside, what, thing)
    made.repair()
    assert made.restored() == sorted(TOKENS[name] for name in ("sharing", "apart"))
    assert_exact(made.store)
    assert_clean(made.store)
    assert snapshot(outside) == before


# ---- in the place of the store's own files


OWN_FILES = ["store.json", "store.lock", "index/lock", "index/lock.turn", "index/data.mdb", "index.stamp"]


def attempt(act: Callable[[], object]) -> None:
    with contextlib.suppress(*REFUSALS):
        act()


def use(root: Path) -> None:
    """Everything that a store can be asked for; each may be refused."""
    with contextlib.suppress(*REFUSALS), small_store(root) as store:
        for act in (store.entries, store.stats, store.gc, lambda: store.gc(full=True), lambda: report_of(store)):
            attempt(act)
        attempt(lambda: store.restore([*VICTIM, 1], IDENTITY))
        attempt(lambda: store.save(LATE, plain(LATE), IDENTITY))


def remove(place: Path) -> None:
    """What the owner of the store does about it."""
    if place.is_dir() and not place.is_symlink():
        place.rmdir()
    else:
        place.unlink(missing_ok=True)


@each_thing
@pytest.mark.parametrize("name", OWN_FILES)
def test_nothing_is_followed_in_the_place_of_the_stores_own_files(
    made: World, outside: Path, name: str, thing: str
) -> None:
    made.store.close()
    place = Path(made.store.root, name)
    place.touch()
    kept = place.read_bytes() if name == "store.json" else None
    put_instead(place, outside, thing)
    before = snapshot(outside)
    use(Path(made.store.root))
    attempt(lambda: repaired(made.store))
    assert snapshot(outside) == before
    remove(place)
    if kept is not None:
        place.write_bytes(kept)
    repaired(made.store)
    with small_store(made.store.root) as made.store:
        assert made.loading() == set(TOKENS)


# ---- in the place of the store's folders


FOLDERS = ["blocks", "entries", "index", "leases", "quarantine"]


@pytest.mark.parametrize("whole", [True, False], ids=["moved out and linked", "linked to another folder"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_store_whose_folder_is_a_link_is_refused_at_opening(
    made: World, outside: Path, name: str, whole: bool
) -> None:
    made.store.close()
    place = Path(made.store.root, name)
    target = outside / ("moved" if whole else "sub")
    place.rename(outside / "moved")
    place.symlink_to(target)
    before = snapshot(outside)
    with pytest.raises((InvalidInput, StoreBroken)):
        small_store(made.store.root)
    with pytest.raises((InvalidInput, StoreBroken)):
        layout.open_layout(FileSystem(), made.store.root)  # where the command begins to repair
    assert snapshot(outside) == before
    place.unlink()
    (outside / "moved").rename(place)
    with small_store(made.store.root) as made.store:
        assert made.loading() == set(TOKENS)


@pytest.mark.parametrize("thing", ["link to a folder", "link to another file", "link to nothing", "pipe", "socket"])
def test_a_scope_that_is_no_folder_costs_its_entries_alone(made: World, outside: Path, thing: str) -> None:
    """Nobody's headers are taken from, put into, or swept from a folder elsewhere."""
    other = made.store.save(LATE, plain(LATE), identity("other")).entry_id
    scope = made.header("victim").parent
    scope.rename(outside / "scope")
    scope.symlink_to(outside / "scope") if thing == "link to a folder" else THINGS[thing](scope, outside)
    before = snapshot(outside)
    use(Path(made.store.root))
    assert loads(made.store, other, LATE)
    assert snapshot(outside) == before
    made.repair()
    assert snapshot(outside) == before
    assert made.restored() == [LATE, LATE], "one of another identity, and one that was saved since"
    assert_clean(made.store)


@pytest.mark.parametrize("thing", ["link to a folder", "link to another file", "link to nothing", "pipe", "socket"])
@pytest.mark.parametrize("place", ["a" * 32, "a" * 32 + "/lock", "a" * 32 + "/header"])
def test_nothing_is_followed_in_the_place_of_a_lease(made: World, outside: Path, place: str, thing: str) -> None:
    path = Path(made.store.root, "leases", place)
    path.parent.mkdir(exist_ok=True)
    THINGS[thing](path, outside)
    before = snapshot(outside)
    assert report_of(made.store).is_clean
    made.store.gc(dry_run=True, full=True)
    made.store.gc(full=True)
    assert made.store.save(LATE, plain(LATE), IDENTITY)
    assert made.loading() == set(TOKENS)
    assert snapshot(outside) == before
    made.repair()
    assert_clean(made.store)
    assert snapshot(outside) == before


# ---- names that are not ours


FOREIGN = [
    "notes.txt", ".hidden", "a b\nc", "ü", "A" * 64, "a" * 63, "a" * 65, "a" * 64 + ".tmp", "a" * 64 + " ",
    "A" * 32, "a" * 31, "a" * 33, "a" * 32 + ".mlxkv.bak", "A" * 32 + ".mlxkv", ".mlxkv", "data.mdb.bak",
]  # fmt: skip


def test_names_that_are_not_ours_are_never_touched(made: World) -> None:
    root = Path(made.store.root)
    scope = made.header("victim").parent.relative_to(root)
    (lease := root / "leases" / ("c" * 32)).mkdir()
    folders = [".", "blocks", "entries", "index", "leases", "quarantine", str(scope)]
    strangers = {Path(folder, name): name.encode() for folder in folders for name in FOREIGN}
    strangers |= {Path(folder, "folder", name): name.encode() for folder in folders for name in ("a" * 64, "lock")}
    for path, data in strangers.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(data)
    listed = sorted(entry.entry_id for entry in made.store.entries())
    assert listed == sorted(made.ids.values())
    assert {problem.what for problem in report_of(made.store).problems} == {"lease"}
    made.store.gc()
    assert not lease.exists()
    made.store.gc(full=True)
    made.save("victim")
    made.store.stats()
    made.store.remove(made.ids["sharing"])
    made.store.gc(full=True)
    assert made.repair().problems == ()
    assert_clean(made.store)
    assert {path: (root / path).read_bytes() for path in strangers} == strangers
    assert made.restored() == sorted([VICTIM, TOKENS["apart"]])


# ---- giants


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


def test_a_giant_block_is_judged_by_its_size(made: World) -> None:
    made.store.close()
    fs = Recording()
    made.store = small_store(made.store.root, fs=fs)
    block = made.blocks("victim")[2]
    os.truncate(block, GIANT_BYTES)
    fs.clear()
    with little_memory():
        [problem] = report_of(made.store, deep=True).problems
        with pytest.raises(CorruptEntry):
            made.store.load(made.ids["victim"])
        made.save("victim")
        assert [call for call in fs.named("read_into") if call.path == str(block)] == []
        assert block.stat().st_size < GIANT_BYTES
        os.truncate(block, GIANT_BYTES)
        made.repair()
    assert problem.name == block.name
    assert made.restored() == sorted(TOKENS[name] for name in ("sharing", "apart"))
    assert_clean(made.store)


@pytest.mark.parametrize("empty", [True, False], ids=["of zeros", "behind a sound header"])
def test_of_a_giant_header_no_more_is_read_than_a_header_may_have(made: World, empty: bool) -> None:
    header = made.header("victim")
    if empty:
        os.truncate(header, 0)
    os.truncate(header, GIANT_BYTES)
    with little_memory():
        assert not report_of(made.store, deep=True).is_clean
        assert made.loading() == (set(TOKENS) - {"victim"} if empty else set(TOKENS))
        made.save("victim")
        assert made.loading() == set(TOKENS)
        os.truncate(made.header("apart"), GIANT_BYTES)
        made.repair()
    assert made.restored() == sorted(TOKENS.values())
    assert_clean(made.store)


@pytest.mark.parametrize("empty", [True, False], ids=["of zeros", "behind a sound text"])
def test_a_giant_store_json_is_refused_unread(made: World, empty: bool) -> None:
    made.store.close()
    config = Path(made.store.root, "store.json")
    if empty:
        os.truncate(config, 0)
    os.truncate(config, 1 << 30)
    with little_memory(), pytest.raises(StoreBroken, match=r"store\.json"):
        small_store(made.store.root)


# ---- hard links: other names of the same files


def test_a_file_elsewhere_that_is_the_same_as_a_block_or_header_is_never_changed(made: World, outside: Path) -> None:
    for number, path in enumerate([*made.blocks("victim"), made.header("victim"), Path(made.store.root, "store.json")]):
        os.link(path, outside / f"link {number}")
    before = snapshot(outside)
    assert_clean(made.store)
    assert made.loading() == set(TOKENS)
    made.save("victim")
    made.store.close()
    made.store = small_store(made.store.root, max_bytes=1 << 31)
    for entry_id in list(made.ids.values()):
        made.store.remove(entry_id)
    made.store.gc(full=True)
    made.repair()
    assert snapshot(outside) == before
    assert_exact(made.store)


# ---- names inside of headers and of the index


@pytest.mark.parametrize(
    "name",
    ["F" * 64, "../" * 21 + "a", "../outside/precious".rjust(64, "/"), "\0" * 64, "a" * 63 + "\0", "a" * 63 + "/"],
    ids=ascii,
)
def test_a_header_that_names_a_block_by_no_digest_is_a_miss(made: World, outside: Path, name: str) -> None:
    path = made.header("victim")
    value = json.loads(path.read_bytes()[26:])
    group = value["segments"][0]
    group["hashes"] = name + group["hashes"][64:]
    path.write_bytes(pack(value))
    before = snapshot(outside)
    assert {problem.severity for problem in report_of(made.store).problems} == {"damage"}
    made.store.gc(full=True)
    assert not loads(made.store, made.ids["victim"], VICTIM)
    assert made.loading() == {"sharing", "apart"}
    made.save("victim")
    made.store.gc(full=True)
    assert_exact(made.store)
    assert_clean(made.store)
    assert snapshot(outside) == before


@pytest.mark.parametrize("header", ["../../outside/precious", "../outside/precious", "/etc/hostname", "store.json"])
def test_a_lease_that_names_no_header_deletes_nothing(made: World, outside: Path, header: str) -> None:
    before = snapshot(outside)
    with made.store.rooms.index.write() as books:
        books.add_lease("d" * 32, header, [])
    attempt(made.store.gc)
    assert snapshot(outside) == before
    assert Path(made.store.root, "store.json").exists()
    assert made.loading() == set(TOKENS)


@pytest.mark.parametrize("folder", ["sub", "empty"])
def test_a_removal_of_a_header_elsewhere_deletes_nothing(made: World, outside: Path, folder: str) -> None:
    (outside / "empty").mkdir()
    before = snapshot(outside)
    scope = f"../../outside/{folder}".ljust(32, "/")
    assert Path(made.store.root, "entries", scope).exists()
    with made.store.rooms.index.write() as books:
        books.doom_stray("a" * 32, scope, 100)
    attempt(made.store.gc)
    assert snapshot(outside) == before
    assert made.loading() == set(TOKENS)
