"""What a store may take beside its cap: the space left free, a quota a model, the age of what nobody uses."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from blockstore import Identity, InvalidInput, Limits, Store, StoreFull, admission, check, index
from blockstore.fs import FileSystem
from blockstore.layout import open_layout
from store_kit import assert_clean, assert_exact, lease_folders, report_of
from token_caches import plain, small_store

DAY_S = 86_400


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store") as opened:
        yield opened


def save(store: Store, first: int, model: str = "a", length: int = 12, **options: Any) -> str:
    tokens = list(range(first, first + length))
    return store.save(tokens, plain(tokens), Identity(model, "config", "tokenizer", ""), **options).entry_id


def standing(store: Store) -> set[str]:
    return {entry.entry_id for entry in store.entries()}


def held(store: Store, model: str) -> int:
    return next(found.held_bytes for found in store.stats().models if found.model_id == model) or 0


# ---- what is kept, and for whom


def test_limits_are_the_stores_and_outlive_a_rebuild_of_the_index(store: Store) -> None:
    wanted = Limits(max_bytes=1 << 30, min_free_bytes=5, max_age_s=7, quotas={"a": 9, "b": 10})
    store.set_limits(max_bytes=1 << 30, min_free_bytes=5, max_age_s=7, quotas={"a": 9, "b": 10, "c": 11})
    assert store.set_limits(quotas={"c": 0}) == wanted
    store.close()
    layout = open_layout(FileSystem(), store.root)
    assert layout is not None
    check.repair(layout, deep=False, progress=lambda done, total: None)
    with small_store(layout.root) as again:
        assert again.limits == wanted
        assert again.set_limits(max_bytes=0, min_free_bytes=0, max_age_s=0, quotas={"a": 0, "b": 0}) == Limits()


@pytest.mark.parametrize(
    "wrong", [{"max_bytes": -1}, {"min_free_bytes": 1.5}, {"max_age_s": "1"}, {"quotas": 7}, {"quotas": {"a": -1}},
              {"quotas": {1: 2}}, {"max_bytes": True}]
)  # fmt: skip
def test_a_limit_that_makes_no_sense_changes_nothing(store: Store, wrong: dict[str, Any]) -> None:
    before = store.limits
    with pytest.raises(InvalidInput):
        store.set_limits(**wrong)
    assert store.limits == before


# ---- a quota a model


def test_a_model_over_its_quota_loses_its_own_oldest_entries_and_nobody_elses(store: Store) -> None:
    other = save(store, 900, model="b")
    first = save(store, 0)
    store.set_limits(quotas={"a": 2 * held_by_one(store)})
    second, third = save(store, 100), save(store, 200)
    assert standing(store) == {other, second, third}
    assert first not in standing(store)
    assert held(store, "a") <= store.limits.quotas["a"]
    store.gc()
    assert_exact(store)
    assert_clean(store)


def held_by_one(store: Store) -> int:
    """What one entry of model a takes: set a quota so that it is counted."""
    store.set_limits(quotas={"a": 1 << 40})
    return held(store, "a")


def test_what_entries_of_a_model_share_counts_once(store: Store) -> None:
    save(store, 0)
    one = held_by_one(store)
    save(store, 0, length=16)
    grown = held(store, "a")
    assert one < grown < 2 * one


def test_a_quota_counts_what_was_there_before_it_was_set(store: Store) -> None:
    store.set_limits(quotas={"a": 1 << 40})
    save(store, 0)
    counted = held(store, "a")
    store.set_limits(quotas={"a": 0})
    store.set_limits(quotas={"a": 1 << 40})
    assert held(store, "a") == counted > 0
    assert_clean(store)


def test_pinned_entries_stay_and_count_against_the_quota(store: Store) -> None:
    pinned = save(store, 0, pinned=True)
    one = held_by_one(store)
    store.set_limits(quotas={"a": one + 4096})
    with pytest.raises(StoreFull, match="quota"):
        save(store, 100)
    assert standing(store) == {pinned}
    assert lease_folders(store) == []
    store.gc()
    assert_exact(store)


def test_an_entry_larger_than_its_quota_is_an_error_that_costs_nothing(store: Store) -> None:
    kept = save(store, 0)
    store.set_limits(quotas={"a": held_by_one(store)})
    with pytest.raises(StoreFull, match="quota"):
        save(store, 0, length=200)
    assert standing(store) == {kept}


def test_what_is_held_falls_with_removal_replacement_and_eviction(store: Store) -> None:
    store.set_limits(quotas={"a": 1 << 40})
    first, second = save(store, 0), save(store, 100)
    both = held(store, "a")
    store.remove(first)
    assert held(store, "a") == both // 2
    assert save(store, 100) != second
    assert held(store, "a") == both // 2
    store.gc()
    assert_clean(store)


def test_check_finds_a_quota_that_is_counted_wrongly_and_repair_mends_it(store: Store) -> None:
    store.set_limits(quotas={"a": 1 << 40})
    save(store, 0)
    right = held(store, "a")
    with store._rooms.index.write() as books:
        name = next(name for name, _ in books.txn.items("shares"))
        books.txn.delete("shares", name)
    assert [(found.severity, found.what, found.name) for found in report_of(store).problems] == [
        ("drift", "quota", "a")
    ]
    store.close()
    layout = open_layout(FileSystem(), store.root)
    assert layout is not None
    check.repair(layout, deep=False, progress=lambda done, total: None)
    with small_store(layout.root) as again:
        assert held(again, "a") == right
        assert_clean(again)


# ---- the space left free


class Disk(FileSystem):
    """A disk of which other programs take the most: what is free follows from what the store takes."""

    def __init__(self, free: int) -> None:
        self.room = free
        self.root = ""

    def free_bytes(self, path: str) -> tuple[int, int]:
        taken = self.tree_bytes(self.root) if self.root else 0
        return self.room - taken, 1 << 40


def test_saves_leave_the_space_free_and_evict_for_it(tmp_path: Path) -> None:
    disk = Disk(4 << 20)
    with small_store(tmp_path / "s", fs=disk) as store:
        disk.root = store.root
        first, second = save(store, 0), save(store, 100)
        store.set_limits(min_free_bytes=disk.free_bytes("")[0])
        third = save(store, 200)
        assert first not in standing(store)
        assert third in standing(store)
        assert disk.free_bytes("")[0] >= store.limits.min_free_bytes
        assert standing(store) <= {second, third}
        assert_exact(store)


def test_where_no_eviction_would_leave_the_space_free_nothing_is_evicted(tmp_path: Path) -> None:
    disk = Disk(4 << 20)
    with small_store(tmp_path / "s", fs=disk) as store:
        disk.root = store.root
        kept = {save(store, 0), save(store, 100)}
        store.set_limits(min_free_bytes=1 << 30)
        with pytest.raises(StoreFull, match="free"):
            save(store, 200)
        assert standing(store) == kept


def test_without_a_floor_a_full_disk_evicts_nobody(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", fs=Disk(0)) as store:
        kept = {save(store, 0), save(store, 100)}
        assert standing(store) == kept


# ---- age


def later(seconds: float) -> Any:
    return mock.patch.object(index, "time", SimpleNamespace(time_ns=lambda: time.time_ns() + round(seconds * 1e9)))


def test_gc_removes_what_nobody_used_for_too_long(store: Store) -> None:
    pinned, idle, used = save(store, 0, pinned=True), save(store, 100), save(store, 200)
    store.set_limits(max_age_s=2 * DAY_S)
    with later(1.5 * DAY_S):
        store.load(used)
        assert store.gc().items == ()
    with later(3 * DAY_S):
        planned = store.gc(dry_run=True)
        assert [item.name for item in planned.items if item.what == "entry"] == [idle]
        assert planned.bytes == store.space(idle).removal_bytes
        done = store.gc()
        assert done.bytes == planned.bytes
    assert standing(store) == {pinned, used}
    assert_exact(store)


def test_a_clock_that_was_set_back_makes_nothing_old(store: Store) -> None:
    kept = save(store, 0)
    store.set_limits(max_age_s=1)
    with later(-400 * DAY_S):
        store.gc()
    assert standing(store) == {kept}


def test_without_an_age_limit_nothing_is_ever_too_old(store: Store) -> None:
    kept = save(store, 0)
    with later(10_000 * DAY_S):
        store.gc()
    assert standing(store) == {kept}


# ---- the cap counts what is on its way


def test_temporaries_of_a_save_that_has_not_reserved_count(store: Store) -> None:
    before = admission.used_bytes(store.rooms)
    lease = store.rooms.leases.take()
    store.rooms.fs.write_new(lease.temporary("0" * 64), [b"x" * 10_000])
    assert admission.used_bytes(store.rooms) >= before + 10_000
    lease.release()
    assert admission.used_bytes(store.rooms) == before


def test_the_folder_of_an_identity_goes_with_its_last_entry(store: Store) -> None:
    entries = Path(store.root, "entries")
    first, second = save(store, 0), save(store, 100)
    store.remove(first)
    assert len(list(entries.iterdir())) == 1
    store.remove(second)
    assert list(entries.iterdir()) == []
    save(store, 0)
    assert_clean(store)
