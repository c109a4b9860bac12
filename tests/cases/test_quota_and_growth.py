"""Cases 15 to 20: what a store takes, what it says that it takes, and what gives it back."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from blockstore import CorruptEntry, Identity, Store, StoreFull
from blockstore.admission import used_bytes
from blockstore.fs import FileSystem
from cases.kit import (
    BAD,
    BIG,
    TOKENS,
    assert_loads,
    assert_served,
    assert_sound,
    command,
    ended,
    files_below,
    save,
    start,
)
from fs_doubles import Watching
from store_kit import assert_exact, block_names, block_path, damage, header_of, named_blocks
from token_caches import IDENTITY, plain, small_store

GIB = 1 << 30
# A store without a byte in it: directories, locks, the index.
EMPTY_BYTES = 1 << 20
# The index takes space ahead of its needs, in steps, when a save is past the point where it asks for room.
INDEX_STEP_BYTES = 256 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store", max_bytes=1 << 40) as opened:
        yield opened


# ---- 15

OTHER_BYTES: dict[str, Callable[[int], Identity]] = {
    "other models": lambda n: Identity(f"model-{n}", "config", "tokenizer", ""),
    "other configurations": lambda n: Identity("model", f"config-{n}", "tokenizer", ""),
    "other tokenizers": lambda n: Identity("model", "config", f"tokenizer-{n}", ""),
    "other namespaces": lambda n: Identity("model", "config", "tokenizer", f"ns-{n}"),
}


@pytest.mark.parametrize("identity_of", OTHER_BYTES.values(), ids=OTHER_BYTES)
def test_case_15_the_cap_covers_what_everybody_stores(identity_of: Callable[[int], Identity], tmp_path: Path) -> None:
    with small_store(tmp_path / "store", max_bytes=EMPTY_BYTES + (1 << 20)) as store:
        assert_cap_holds(store, [identity_of(n) for n in range(12)])
        assert 1 < len(store.entries()) < 12
        assert_sound(store)


@pytest.mark.parametrize("place", ["quarantine/moved", f"leases/{'a' * 32}/{'b' * 64}"], ids=["quarantine", "staging"])
def test_case_15_the_cap_covers_what_is_no_block_of_any_entry(place: str, tmp_path: Path) -> None:
    with small_store(tmp_path / "store", max_bytes=EMPTY_BYTES + (1 << 20)) as store:
        stray(place, size=3 << 18)(store)
        assert_cap_holds(store, [IDENTITY] * 12)


def assert_cap_holds(store: Store, identities: list[Identity]) -> None:
    """Entries that are larger together than the cap; it is the disk that is asked what they take."""
    for n, identity in enumerate(identities):
        tokens = [n, *BIG]
        store.save(tokens, plain(tokens), identity)
        assert store.stats().physical_bytes <= store.limits.max_bytes + INDEX_STEP_BYTES
    assert store.stats().physical_bytes <= store.limits.max_bytes


# ---- 16

DISKS = [
    # total, free, the cap: a tenth of the disk, or what leaves 10 GiB free, whichever is less; 1 GiB at least
    (1000, 900, 100), (1000, 105, 95), (1000, 50, 40), (100, 90, 10), (100, 10, 1), (100, 2, 1), (8, 8, 1),
]  # fmt: skip


@pytest.mark.parametrize(("total", "free", "cap"), DISKS)
def test_case_16_a_cap_that_nobody_chose_leaves_space_free_and_is_said(
    total: int, free: int, cap: int, tmp_path: Path
) -> None:
    class Disk(FileSystem):
        def free_bytes(self, path: str) -> tuple[int, int]:
            return free * GIB, total * GIB

    with small_store(tmp_path / "store", fs=Disk()) as store:
        assert store.stats().max_bytes == store.limits.max_bytes == cap * GIB


def test_case_16_the_command_and_the_store_say_which_cap_there_is(store: Store) -> None:
    said = command(store.root, "stats")[1]
    kept = json.loads(Path(store.root, "store.json").read_text())
    assert said["max_bytes"] == kept["limits"]["maxBytes"] == store.limits.max_bytes


@pytest.mark.parametrize("evictable", [True, False], ids=["by evicting", "or not at all"])
def test_case_16_a_save_leaves_the_space_free_that_it_is_told_to(evictable: bool, tmp_path: Path) -> None:
    """A disk of which others have left so much that only removing something makes room."""

    class Disk(FileSystem):
        left = 1 << 40

        def free_bytes(self, path: str) -> tuple[int, int]:
            return self.left - self.tree_bytes(str(tmp_path)), 1 << 42

    disk = Disk()
    with small_store(tmp_path / "store", fs=disk, max_bytes=1 << 40) as store:
        save(store, BIG, "older", pinned=not evictable)
        store.set_limits(min_free_bytes=GIB)
        disk.left = GIB + disk.tree_bytes(str(tmp_path)) + (64 << 10)
        if evictable:
            assert_loads(store, save(store, [7, *BIG]).entry_id, [7, *BIG])
            assert [entry.ns for entry in store.entries()] == [""]
        else:
            with pytest.raises(StoreFull, match="free"):
                save(store, [7, *BIG])
            assert [entry.ns for entry in store.entries()] == ["older"]


# ---- 17


def du(root: str) -> int:
    """What the command of that name says, in bytes on the disk."""
    done = subprocess.run(["du", "-s", "-k", root], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0]) * 1024


def stray(*places: str, size: int = 300_000) -> Callable[[Store], None]:
    def add(store: Store) -> None:
        for place in places:
            path = Path(store.root, place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * size)

    return add


def remove_first(store: Store) -> None:
    store.remove(store.entries()[0].entry_id)


def leave_a_lease(store: Store) -> None:
    """As a writer that was killed leaves it: temporaries, without a row."""
    stray(f"leases/{'a' * 32}/lock", f"leases/{'a' * 32}/{'b' * 64}")(store)


def make_a_hole(store: Store) -> None:
    with Path(store.root, "blocks", "c" * 64).open("wb") as file:
        file.truncate(10 << 30)


def make_links(store: Store) -> None:
    Path(store.root, "outside").symlink_to("/")
    Path(store.root, "blocks", "d" * 64).symlink_to(Path(store.root, "store.json"))


def supersede(store: Store) -> None:
    save(store)


STATES: dict[str, Callable[[Store], object]] = {
    "as it was": lambda store: None, "an entry was removed": remove_first, "an entry was replaced": supersede,
    "collected": lambda store: (remove_first(store), store.gc()), "a dead writer's temporaries": leave_a_lease,
    "quarantine": stray("quarantine/one", "quarantine/folder/two"), "orphan blocks": stray("blocks/" + "e" * 64),
    "strangers": stray("notes", "deep/er/still", "blocks/own/x", "entries/own/x", "index/old"),
    "a hole": make_a_hole, "links": make_links, "a removal that died": lambda store: store.rooms.index.doom(
        store.entries()[0].entry_id
    ),
}  # fmt: skip


@pytest.mark.parametrize("act", STATES.values(), ids=STATES)
def test_case_17_stats_says_what_du_says(act: Callable[[Store], object], store: Store) -> None:
    save(store)
    save(store, BIG, "other")
    act(store)
    assert store.stats().physical_bytes == du(store.root)


@pytest.mark.parametrize("point", ["block", "header"])
def test_case_17_stats_says_what_du_says_in_the_middle_of_a_save(point: str, tmp_path: Path) -> None:
    fs, seen = Watching(), []
    with small_store(tmp_path / "store", fs=fs) as store:

        def look() -> None:
            seen.append((store.stats().unfinished_saves, store.stats().physical_bytes == du(store.root)))

        fs.once(lambda call: call.places_block if point == "block" else call.places_header, look)
        save(store, BIG)
    assert seen == [(1, True)]


def test_case_17_the_command_says_it_too(store: Store) -> None:
    save(store)
    leave_a_lease(store)
    code, said = command(store.root, "stats")
    assert (code, said["physical_bytes"]) == (0, du(store.root))


# ---- 18

LEFT = {
    **{name: act for name, act in STATES.items() if name not in ("a hole", "links")},
    "a bad block": lambda store: damage(block_path(store, min(block_names(store))), "flip"),
    "a bad header": lambda store: damage(Path(save(store, ns="bad").path), "truncate"),
}
LOOKS = ["stats", "ls", "check", "gc --dry-run", "gc --dry-run --full"]


@pytest.mark.parametrize("act", LEFT.values(), ids=LEFT)
def test_case_18_opening_and_closing_deletes_nothing(act: Callable[[Store], object], tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        save(store)
        save(store, BIG, "other")
        act(store)
    before = files_below(tmp_path / "store")
    for _ in range(2):
        with small_store(tmp_path / "store") as store:
            store.entries()
    assert files_below(tmp_path / "store") == before


def test_case_18_a_command_that_looks_deletes_nothing(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        ids = [save(store, ns=name).entry_id for name in "abc"]
        leave_a_lease(store)
        stray("blocks/" + "e" * 64, "quarantine/one", "notes")(store)
        store.remove(ids[0])
        store.rooms.index.doom(ids[1])
    before = files_below(tmp_path / "store")
    for look in LOOKS:
        command(tmp_path / "store", *look.split())
        assert files_below(tmp_path / "store") == before, look


def test_case_18_a_smaller_cap_deletes_nothing_until_something_is_saved(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        for n in range(5):
            save(store, [n, *TOKENS])
        blocks = block_names(store)
    with small_store(tmp_path / "store", max_bytes=1 << 19) as store:
        assert (len(store.entries()), block_names(store)) == (5, blocks)


# ---- 19


def remove_them(store: Store) -> None:
    for entry in store.entries():
        if entry.ns != "kept":
            store.remove(entry.entry_id)


def replace_them(store: Store) -> None:
    """The same tokens with other bytes, as another sampling of the same prompt would give, and then removed."""
    for entry in store.entries():
        if entry.ns != "kept":
            header = header_of(store, entry.entry_id)
            identity = Identity("model", "config", "tokenizer", entry.ns)
            shorter = plain(header.tokens)
            shorter[0].keys = shorter[0].keys + 1
            store.remove(store.save(header.tokens, shorter, identity).entry_id)


def spoil_them(store: Store) -> None:
    for entry in store.entries():
        if entry.ns != "kept":
            Path(store.root, "entries", entry.scope, f"{entry.entry_id}.mlxkv").unlink()
            with pytest.raises(CorruptEntry):
                store.load(entry.entry_id)


def evict_them(store: Store) -> None:
    store.load(next(entry.entry_id for entry in store.entries() if entry.ns == "kept"))
    store.set_limits(max_bytes=used_bytes(store.rooms) - 400_000)
    save(store, [3, 3, 3], "kept too")


KILLED = """
import os, sys
from blockstore import saving
from cases.kit import BIG, save
from token_caches import small_store
saving._Saver._write_header = lambda *given: os.kill(os.getpid(), 9)
with small_store(sys.argv[1]) as store:
    save(store, [5, *BIG], "dying")
"""


def lose_a_saver(store: Store) -> None:
    remove_them(store)
    assert ended(start(KILLED, store.root))[0] == -9


WAYS = [remove_them, replace_them, spoil_them, evict_them, lose_a_saver]


@pytest.mark.parametrize("lose", WAYS, ids=lambda lose: lose.__name__)
def test_case_19_what_no_entry_needs_is_collectable_at_once(lose: Callable[[Store], None], store: Store) -> None:
    kept = save(store, TOKENS, "kept").entry_id
    for n in range(12):
        save(store, [*TOKENS, n, *BIG[: 50 + n]], f"lost-{n}")
    lose(store)
    live = {name for entry in store.entries() for name in named_blocks(header_of(store, entry.entry_id))}
    listed = {item.name for item in store.gc(dry_run=True).items if item.what == "block"}
    store.gc()
    assert live | listed >= block_names(store) == live
    assert_loads(store, kept)
    assert_exact(store)


def test_case_19_a_collection_goes_in_small_steps_and_others_serve_in_between(tmp_path: Path) -> None:
    fs = Watching()
    with small_store(tmp_path / "store", fs=fs) as store:
        kept = save(store, TOKENS, "kept").entry_id
        for n in range(8):
            store.remove(save(store, [n, *BIG]).entry_id)
        dead, served = store.stats().dead_blocks, 0

        def serve(done: int, total: int) -> None:
            nonlocal served
            assert_loads(store, kept)
            save(store, [done, 3], "meanwhile")
            served += 1

        fs.clear()
        assert store.gc(progress=serve).count("block") >= dead > 100
        assert served >= dead // 16
        assert most_unlinked_in_one_step(fs) <= 16
        assert_sound(store)


def test_case_19_a_collection_ends_though_others_make_more_to_collect_all_the_time(store: Store) -> None:
    for n in range(2):
        store.remove(save(store, [n, *BIG]).entry_id)
    dead, steps = store.stats().dead_blocks, 0

    def remove_more(done: int, total: int) -> None:
        nonlocal steps
        steps += 1
        assert steps <= dead, "it goes on for as long as others remove something"
        store.remove(save(store, [done, 3]).entry_id)

    store.gc(progress=remove_more)


def most_unlinked_in_one_step(fs: Watching) -> int:
    """Blocks that went while the index was held: between two releases of its lock."""
    counts = [0]
    for call in fs.calls:
        if call.name == "unlock":
            counts.append(0)
        counts[-1] += call.name == "unlink" and call.within("blocks")
    return max(counts)


# ---- 20


@contextmanager
def full(store: Store) -> Iterator[None]:
    """No room for more than there is now, and a little for the index."""
    store.set_limits(max_bytes=used_bytes(store.rooms) + (64 << 10))
    yield
    store.set_limits(max_bytes=1 << 40)


@pytest.mark.parametrize("at_the_cap", [False, True])
@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_case_20_a_corrupt_file_goes_with_its_row_and_costs_no_live_entry(
    spoil: Callable[[Store, str], Any], at_the_cap: bool, store: Store
) -> None:
    lists = [[n, *BIG] for n in range(4)]
    ids = [save(store, tokens).entry_id for tokens in lists]
    limited: AbstractContextManager[None] = full(store) if at_the_cap else nullcontext()
    with limited:
        spoil(store, ids[2])
        with pytest.raises(CorruptEntry):
            store.load(ids[2])
        store.gc()
        assert_exact(store)
        save(store, lists[2])
        for tokens in lists:
            assert_served(store, tokens)
        assert_sound(store)
