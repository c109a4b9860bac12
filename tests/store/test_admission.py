"""Saves that come at once where there is not room for all: one after the other, and nobody is evicted for nothing."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blockstore import Store, StoreBusy, StoreFull, admission
from store_kit import all_facts, assert_clean, assert_exact, disk_bytes
from token_caches import identity, plain, small_store

SMALL, LARGE = list(range(40)), list(range(1_000, 1_900))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store") as opened:
        yield opened


def save(store: Store, name: str, tokens: list[int] = SMALL, **options: Any) -> Any:
    return store.save([*tokens, *map(ord, name)], plain([*tokens, *map(ord, name)]), identity(name), **options)


def standing(store: Store) -> set[str]:
    return {entry.ns or "" for entry in store.entries()}


def size_of_one(store: Store, tokens: list[int]) -> int:
    """What an entry takes that shares nothing."""
    saved = save(store, "measured", [token + 10_000 for token in tokens])
    space = store.space(saved.entry_id)
    store.remove(saved.entry_id)
    store.gc()
    return space.removal_bytes


def test_two_at_once_of_which_each_fits_alone_both_succeed(store: Store) -> None:
    large = size_of_one(store, LARGE)
    for name in "abcd":
        save(store, name, [token + 100 * ord(name) for token in SMALL])
    store.set_limits(max_bytes=admission.used_bytes(store.rooms) + large + large // 2)
    caps = [[token + k * 5_000 for token in LARGE] for k in range(2)]
    prepared = [store.prepare(tokens, plain(tokens), identity(f"large{k}")) for k, tokens in enumerate(caps)]
    with ThreadPoolExecutor() as pool:
        saved = list(pool.map(store.commit, prepared))
    assert len({one.entry_id for one in saved}) == 2
    assert admission.used_bytes(store.rooms) <= store.limits.max_bytes
    store.gc()
    assert_exact(store)
    assert_clean(store)


def test_what_another_save_has_announced_counts_until_it_reserves(store: Store) -> None:
    before = admission.used_bytes(store.rooms)
    store.set_limits(max_bytes=before + (1 << 20))
    lease = store.rooms.leases.take()
    assert admission.announce(store.rooms, lease, 900 << 10)
    assert admission.used_bytes(store.rooms) >= before + (900 << 10)
    other = store.rooms.leases.take()
    assert not admission.announce(store.rooms, other, 900 << 10)
    lease.release()
    assert admission.announce(store.rooms, other, 900 << 10)
    other.release()


def test_what_a_dead_save_announced_does_not_count(store: Store) -> None:
    store.set_limits(max_bytes=1 << 30)
    lease = store.rooms.leases.take()
    assert admission.announce(store.rooms, lease, 1 << 29)
    lease.forget()  # as the kernel lets go of a dead owner's lock
    assert admission.used_bytes(store.rooms) < 1 << 29
    store.gc()
    assert_exact(store)


def test_a_save_waits_for_another_that_is_unfinished_instead_of_emptying_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one holds more than half of the cap, and is gone in a moment."""
    large = size_of_one(store, LARGE)
    save(store, "kept", pinned=True)
    other = [token + 50_000 for token in LARGE]
    prepared = store.prepare(other, plain(other), identity("other"))
    store.set_limits(max_bytes=admission.used_bytes(store.rooms) + large + large // 2)
    written, go_on = threading.Event(), threading.Event()
    real = store.rooms.blocks.__class__.publish

    def publish(blocks: Any, source: str, digest: bytes) -> None:
        if threading.current_thread() is not threading.main_thread() and not written.is_set():
            written.set()
            go_on.wait(30)
        real(blocks, source, digest)

    monkeypatch.setattr(store.rooms.blocks.__class__, "publish", publish)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(store.commit, prepared)
        assert written.wait(30)
        timer = threading.Timer(0.3, go_on.set)
        timer.start()
        began = time.monotonic()
        second = save(store, "second", LARGE)
        assert time.monotonic() - began > 0.2, "it waited"
        first.result(30)
        timer.join()
    assert "kept" in standing(store)
    assert second.entry_id in {entry.entry_id for entry in store.entries()}
    assert admission.used_bytes(store.rooms) <= store.limits.max_bytes


def test_beside_pinned_entries_that_leave_no_room_nothing_is_evicted(store: Store) -> None:
    large = size_of_one(store, LARGE)
    save(store, "pinned", [token + 9_000 for token in LARGE], pinned=True)
    save(store, "small")
    store.set_limits(max_bytes=admission.used_bytes(store.rooms) + large // 2)
    with pytest.raises(StoreFull):
        save(store, "large", [token + 70_000 for token in LARGE])
    assert standing(store) == {"pinned", "small"}
    assert all_facts(store.load(store.entries()[0].entry_id).caches)


def test_a_turn_that_never_comes_is_busy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    margins = admission.MARGINS.__class__(turn_s=0.1)
    monkeypatch.setattr(admission, "MARGINS", margins)
    with admission.turn(store.rooms), pytest.raises(StoreBusy, match="making room"), admission.turn(store.rooms):
        pass
    with admission.turn(store.rooms):
        pass


@pytest.mark.slow
def test_the_cap_holds_beside_a_stream_of_saves(store: Store) -> None:
    """Looked at all the time by another thread; what the index grows by in between is allowed for."""
    large = size_of_one(store, LARGE)
    store.set_limits(max_bytes=admission.used_bytes(store.rooms) + 6 * large)
    cap, most, done = store.limits.max_bytes, [0], threading.Event()

    def look() -> None:
        while not done.is_set():
            most[0] = max(most[0], disk_bytes_while_it_changes(store.root))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        lists = [[token + 2_000 * k for token in LARGE] for k in range(16)]
        prepared = [store.prepare(tokens, plain(tokens), identity(str(k))) for k, tokens in enumerate(lists)]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(store.commit, prepared))
    finally:
        done.set()
        watcher.join()
    assert most[0] <= cap + (1 << 20)
    assert disk_bytes(store.root) <= cap
    store.gc()
    assert_exact(store)


def disk_bytes_while_it_changes(root: str) -> int:
    try:
        return disk_bytes(root)
    except FileNotFoundError:
        return 0
