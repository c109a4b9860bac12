"""Cases 21 to 26: what a lookup and an idle collection cost, and limits that refuse loudly and count honestly."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockstore import Identity, Store, StoreFull, save_kv_cache
from blockstore.fs import FileSystem
from cases.kit import (
    BIG,
    PATIENCE_S,
    TOKENS,
    Listing,
    assert_loads,
    assert_served,
    assert_sound,
    command,
    save,
    surroundings,
)
from store_kit import block_names, block_path, header_paths, lease_folders
from token_caches import IDENTITY, identity, plain, small_store

SOURCES = Path(__file__).resolve().parents[2]


@pytest.fixture
def fs() -> Listing:
    return Listing()


@pytest.fixture
def store(tmp_path: Path, fs: Listing) -> Iterator[Store]:
    with small_store(tmp_path / "store", fs=fs, max_bytes=1 << 40) as opened:
        yield opened


def save_many(store: Store, count: int) -> list[str]:
    return [save(store, [1000 + n, *TOKENS], f"ns-{n}").entry_id for n in range(count)]


# ---- 21

# How often threads that look at once take the index's lock, or share it, is up to the moment.
LOCKS = ("open_lock", "try_lock", "unlock")
LOOKUPS: dict[str, Callable[[Store], object]] = {
    "find": lambda store: store.find([*TOKENS, 1], IDENTITY),
    "find nothing": lambda store: store.find([4, 5, 6], IDENTITY),
    "restore": lambda store: store.restore([*TOKENS, 1], IDENTITY),
    "load": lambda store: store.load(store.entries()[0].entry_id),
    "entry": lambda store: store.entry(store.entries()[0].entry_id),
    "save again": save,
    "save what is new": lambda store: save(store, BIG),
    "remove": lambda store: store.remove(store.entries()[0].entry_id),
    "gc": lambda store: (store.remove(store.entries()[0].entry_id), store.gc()),
}


@pytest.mark.parametrize("act", LOOKUPS.values(), ids=LOOKUPS)
def test_case_21_nothing_that_goes_by_name_lists_the_blocks_whatever_their_number(
    act: Callable[[Store], object], tmp_path: Path
) -> None:
    counts = []
    for number in (2, 12):
        fs = Listing()
        with small_store(tmp_path / f"store-{number}", fs=fs, max_bytes=1 << 40) as store:
            save_many(store, number)
            save(store)
            store.find([1], IDENTITY)
            fs.clear()
            act(store)
            assert "blocks" not in fs.listed()
            counts.append(len([call for call in fs.calls if call.name not in LOCKS]))
    assert counts[0] == counts[1]


def test_case_21_the_figures_of_a_large_flat_directory_can_be_measured_again(tmp_path: Path) -> None:
    script = SOURCES / "tools" / "bench" / "flat_directory" / "run.py"
    line = [sys.executable, str(script), "--files", "300", "--sample", "3", "--root", str(tmp_path), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=surroundings())
    rounds = json.loads(done.stdout)["rounds"]
    assert {(row["layout"], row["files"]) for row in rounds} == {
        (layout, files) for files in (3, 30, 300) for layout in ("flat", "fanned")
    }
    assert all(row[name] > 0 for row in rounds for name in row if name.endswith("_us"))
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"


# ---- 22


@pytest.mark.parametrize("place", ["store", "not/yet/there", "link/not/yet", "./a/../b"])
def test_case_22_space_is_asked_of_the_nearest_parent_that_exists(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    asked, total = FileSystem().free_bytes(place), FileSystem().free_bytes(str(tmp_path))[1]
    assert asked[1] == total > 0
    with small_store(place) as store:
        assert store.stats().free_bytes > 0
        assert store.limits.max_bytes >= 1 << 30
        assert_loads(store, save(store).entry_id)


# ---- 23


def test_case_23_an_entry_larger_than_the_cap_is_an_error_and_costs_nobody_anything(store: Store) -> None:
    kept = save_many(store, 3)
    store.set_limits(max_bytes=store.stats().physical_bytes)
    huge = range(5_000)
    with pytest.raises(StoreFull):
        save(store, huge)
    assert {entry.entry_id for entry in store.entries()} == set(kept)
    assert (lease_folders(store), store.find([*huge, 1], IDENTITY)) == ([], None)


def test_case_23_an_import_larger_than_the_cap_is_an_error_and_an_exit_code(store: Store, tmp_path: Path) -> None:
    save_kv_cache(tmp_path / "a.mlxkv", range(5_000), plain(range(5_000)))
    store.set_limits(max_bytes=store.stats().physical_bytes)
    with pytest.raises(StoreFull):
        store.import_file(tmp_path / "a.mlxkv")
    assert command(store.root, "import", str(tmp_path / "a.mlxkv"))[0] == 6
    assert store.entries() == []


BUDGETS = {"block_bytes": 1 << 10, "span": 1}


@pytest.mark.parametrize("layers", [1, 40])
@pytest.mark.parametrize("layout", ["segments", "rows"])
def test_case_23_an_entry_larger_than_any_block_is_admitted(layout: str, layers: int, tmp_path: Path) -> None:
    with small_store(tmp_path / "store", **BUDGETS) as store:
        saved = store.save(BIG, plain(BIG, layers), IDENTITY, layout=layout)
        assert saved.logical_bytes > BUDGETS["block_bytes"]
        assert store.load(saved.entry_id).token_count == len(BIG)


def test_case_23_an_entry_that_fits_once_others_have_gone_is_admitted(store: Store) -> None:
    save_many(store, 30)
    store.set_limits(max_bytes=store.stats().physical_bytes)
    assert_loads(store, save(store, BIG).entry_id, BIG)
    assert len(store.entries()) < 31


def test_case_23_an_entry_whose_blocks_are_there_already_is_admitted_under_any_cap(store: Store) -> None:
    """What counts is what it adds, not what it is."""
    save(store, BIG, pinned=True)
    store.set_limits(max_bytes=store.stats().physical_bytes + (16 << 10))
    assert save(store, BIG, "other").blocks_written == 0
    assert {entry.ns for entry in store.entries()} == {"", "other"}


# ---- 24


def batch(store: Store, model: str, count: int = 10) -> None:
    for n in range(count):
        tokens = [n, *BIG]
        store.save(tokens, plain(tokens), Identity(model, "config", "tokenizer", ""))


def test_case_24_a_batch_evicts_no_pinned_conversation(store: Store) -> None:
    save(store, pinned=True)
    pinned_later = save(store, [7, *TOKENS], "later").entry_id
    store.pin(pinned_later)
    store.set_limits(max_bytes=store.stats().physical_bytes + (1 << 20))
    batch(store, "batch")
    assert_served(store)
    assert_served(store, [7, *TOKENS], "later")
    assert len(store.entries()) < 2 + 10


def test_case_24_a_conversation_that_goes_on_keeps_its_place_by_being_used(store: Store) -> None:
    save(store)
    store.set_limits(max_bytes=store.stats().physical_bytes + (1 << 20))
    for _ in range(10):
        batch(store, "batch", 2)
        assert_served(store)


@pytest.mark.parametrize("quota", [1 << 18, 1 << 20])
def test_case_24_a_model_with_a_quota_makes_room_among_its_own(quota: int, store: Store) -> None:
    lived = save_many(store, 5)
    store.set_limits(quotas={"batch": quota})
    batch(store, "batch")
    standing = {entry.entry_id for entry in store.entries()}
    assert set(lived) < standing
    own = [entry for entry in store.entries() if entry.model_id == "batch"]
    names = {digest.hex() for entry in own for digest in store.rooms.index.digests(entry.entry_id)}
    paths = [*(block_path(store, name) for name in names), *(header_paths(store)[entry.entry_id] for entry in own)]
    assert 0 < sum(path.stat().st_blocks * 512 for path in paths) <= quota
    assert_sound(store)


def test_case_24_what_a_quota_could_never_hold_is_an_error(store: Store) -> None:
    lived = save_many(store, 2)
    store.set_limits(quotas={"batch": 64 << 10})
    with pytest.raises(StoreFull):
        batch(store, "batch", 1)
    assert {entry.entry_id for entry in store.entries()} == set(lived)


# ---- 25


def test_case_25_a_collection_with_nothing_to_do_costs_the_same_whatever_lives(tmp_path: Path) -> None:
    counts = []
    for number in (2, 20):
        fs = Listing()
        with small_store(tmp_path / f"store-{number}", fs=fs) as store:
            save_many(store, number)
            store.gc()
            fs.clear()
            assert store.gc().items == ()
            assert fs.listed() <= {"leases"}
            counts.append(len(fs.calls))
    assert counts[0] == counts[1]


def test_case_25_what_a_collection_costs_follows_what_is_dead(tmp_path: Path) -> None:
    """The same dead in a small and in a large store."""
    counts = []
    for number in (2, 20):
        fs = Listing()
        with small_store(tmp_path / f"store-{number}", fs=fs) as store:
            save_many(store, number)
            store.remove(save(store, BIG).entry_id)
            fs.clear()
            assert store.gc().count("block") == len([c for c in fs.named("unlink") if c.within("blocks")]) > 0
            counts.append([call.name for call in fs.calls if call.within("blocks") or call.within("entries")])
    assert counts[0] == counts[1]


# ---- 26


def delete_blocks(store: Store) -> None:
    for name in block_names(store):
        block_path(store, name).unlink()


def delete_some_blocks(store: Store) -> None:
    for name in sorted(block_names(store))[::2]:
        block_path(store, name).unlink()


def cut_blocks(store: Store) -> None:
    for name in block_names(store):
        os.truncate(block_path(store, name), 10)


def delete_headers(store: Store) -> None:
    for path in header_paths(store).values():
        path.unlink()


def delete_scopes(store: Store) -> None:
    for path in header_paths(store).values():
        shutil.rmtree(path.parent, ignore_errors=True)


OUTSIDE: list[Callable[[Store], None]] = [delete_blocks, delete_some_blocks, cut_blocks, delete_headers, delete_scopes]


@pytest.mark.parametrize("delete", OUTSIDE, ids=lambda delete: delete.__name__)
def test_case_26_after_a_deletion_from_outside_saves_go_on_and_the_usage_is_right_again(
    delete: Callable[[Store], None], store: Store
) -> None:
    for n in range(6):
        save(store, [n, *BIG], "before")
    store.set_limits(max_bytes=store.stats().physical_bytes + (64 << 10))
    delete(store)
    for n in range(8):
        tokens = [100 + n, *BIG]
        save(store, tokens, "after")
        assert_served(store, tokens, "after")
    for entry in store.entries():
        if entry.ns == "before":
            store.restore(prompt_of(store, entry.entry_id), identity("before"))
    assert_sound(store)


def prompt_of(store: Store, entry_id: str) -> list[int]:
    with store.rooms.index.env.read() as txn:
        packed: Any = txn.get("tokens", bytes.fromhex(entry_id)) or b""
    return [*memoryview(packed).cast("I"), 1]
