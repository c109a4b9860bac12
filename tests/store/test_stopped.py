"""Processes that are stopped, never pause, have equal ids, or whose clock jumps: the others go on, or are told.

(CASES 1, 11, 12; DESIGN 4, Index.)
"""

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blockstore import Store, StoreBusy, admission, collect, locks
from blockstore.fs import FileSystem
from store.kill_roles import KEPT, Child, Nursery
from store_kit import all_facts, assert_clean, assert_exact, lease_folders
from token_caches import IDENTITY, plain, small_store

TOKENS = list(range(20))
YEAR_S = 365 * 86_400


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store that holds TOKENS."""
    with small_store(tmp_path / "store") as store:
        store.save(TOKENS, plain(TOKENS), IDENTITY)
    return tmp_path / "store"


@pytest.fixture
def nursery(root: Path) -> Iterator[Nursery]:
    with Nursery(root) as opened:
        yield opened


def stopped_at(nursery: Nursery, role: str, step: str) -> Child:
    child = nursery.start(role, step=step, act="stop")
    nursery.wait(child, "stopped")
    return child


def go_on(nursery: Nursery, *children: Child) -> None:
    """Continue them, and let each do something after that."""
    for child in children:
        nursery.send(child, signal.SIGCONT)
    for child in children:
        if child.role == "write":
            nursery.await_word(child)
    nursery.end(children)


def use_everything(store: Store) -> None:
    """What others do beside somebody who is stopped."""
    for number in range(5):
        tokens = [*TOKENS, number]
        entry_id = store.save(tokens, plain(tokens), IDENTITY).entry_id
        assert all_facts(store.load(entry_id).caches) == all_facts(plain(tokens))
        store.remove(entry_id)
        store.gc(full=number == 4)
    assert store.find([*TOKENS, 1], IDENTITY) is not None


def assert_whole(root: Path, nursery: Nursery) -> None:
    with small_store(root) as store:
        store.gc()
        assert_exact(store)
        assert_clean(store)
        there = {(entry.ns, tuple(store.load(entry.entry_id).tokens)) for entry in store.entries()}
        assert {key for key in nursery.said("saved") if key[0] == KEPT} <= there


# ---- stopped


def test_writers_that_are_stopped_in_a_save_keep_what_they_hold_and_commit_later(root: Path, nursery: Nursery) -> None:
    steps = ["lease taken", "blocks staged", "reserved", "block 2 placed", "header placed"]
    stopped = [stopped_at(nursery, "write", step) for step in steps]
    with small_store(root) as store:
        held = set(lease_folders(store))
        assert len(held) == len(steps)
        use_everything(store)
        assert store.gc(full=True).count("lease") == 0
        assert set(lease_folders(store)) == held
    go_on(nursery, *stopped)
    written = {key[1] for key in nursery.said("saved") if len(set(key[1])) == 1 and key[1][0] >= 1000}
    assert len(written) == len(steps)
    assert_whole(root, nursery)


CALLS: dict[str, Callable[[Store], object]] = {
    "find": lambda store: store.find([*TOKENS, 1], IDENTITY),
    "load": lambda store: store.restore([*TOKENS, 1], IDENTITY),
    "save": lambda store: store.save(TOKENS[:9], plain(TOKENS[:9]), IDENTITY),
    "remove": lambda store: store.remove("0" * 32),
    "gc": lambda store: store.gc(),
    "stats": lambda store: store.stats(),
    "entries": lambda store: store.entries(),
}


@pytest.mark.parametrize("step", ["inside reserve", "inside publish"])
def test_who_waits_for_a_writer_stopped_in_a_transaction_is_told_so_in_time(
    step: str, root: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(root) as store:
        [before] = store.entries()
        stopped = stopped_at(nursery, "write", step)
        monkeypatch.setattr(locks, "PATIENCE_S", 0.1)
        for call in CALLS.values():
            began = time.monotonic()
            with pytest.raises(StoreBusy, match="held the index"):
                call(store)
            assert time.monotonic() - began < 5
        monkeypatch.undo()
        go_on(nursery, stopped)
        assert store.load(before.entry_id).tokens == TOKENS
        use_everything(store)
    assert_whole(root, nursery)


def test_many_threads_that_wait_for_a_stopped_writer_lose_patience_together(
    root: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(root) as store, ThreadPoolExecutor(12) as pool:
        store.entries()
        stopped = stopped_at(nursery, "write", "inside publish")
        monkeypatch.setattr(locks, "PATIENCE_S", 0.5)
        began = time.monotonic()
        waiting = [pool.submit(CALLS["find"], store) for _ in range(12)]
        assert {type(call.exception()) for call in waiting} == {StoreBusy}
        assert time.monotonic() - began < 4
        monkeypatch.undo()
        go_on(nursery, stopped)
        assert store.find([*TOKENS, 1], IDENTITY) is not None
    assert_whole(root, nursery)


def hold_threads(lock: locks.HostLock) -> None:
    with lock.threads():
        pass


def test_who_could_not_wait_for_the_threads_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fork beside a transaction that takes too long: it goes on, and must not free what it did not get."""
    lock = locks.HostLock(FileSystem(), str(tmp_path / "lock"))
    monkeypatch.setattr(locks, "PATIENCE_S", 0.05)
    with ThreadPoolExecutor(1) as pool, lock.exclusive():
        for _ in range(2):
            with pytest.raises(StoreBusy):
                pool.submit(hold_threads, lock).result()
    with lock.shared():
        pass
    lock.close()


def test_a_reader_stopped_while_it_looks_holds_up_writers_alone(
    root: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(root) as store:
        store.entries()  # a process maps the index alone, once
        stopped = stopped_at(nursery, "read", "inside find")
        monkeypatch.setattr(locks, "PATIENCE_S", 0.1)
        with pytest.raises(StoreBusy):
            CALLS["save"](store)
        assert store.find([*TOKENS, 1], IDENTITY) is not None
        assert store.restore([*TOKENS, 1], IDENTITY) is not None
        monkeypatch.undo()
        go_on(nursery, stopped)
        use_everything(store)
    assert_whole(root, nursery)


def test_the_death_of_a_stopped_writer_frees_what_it_held(root: Path, nursery: Nursery) -> None:
    held = stopped_at(nursery, "write", "inside publish")
    nursery.kill(held)
    with small_store(root) as store:
        assert store.gc().count("lease") == 1
        use_everything(store)
    assert_whole(root, nursery)


# ---- never pausing


@pytest.mark.slow
def test_readers_that_never_pause_do_not_starve_a_writer(
    root: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(root) as store:
        store.save([7] * 30, plain([7] * 30), IDENTITY)
        readers = [nursery.start("crowd") for _ in range(3)]
        for reader in readers:
            nursery.await_word(reader)
        monkeypatch.setattr(locks, "PATIENCE_S", 5.0)  # a save that waits this long for its turn fails
        for number in range(30):
            store.save([*TOKENS, number], plain([*TOKENS, number]), IDENTITY)
        monkeypatch.undo()
        nursery.end(readers)
    assert_whole(root, nursery)


# ---- clocks that jump


def jump(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the wall clock of this process forward or back."""
    now = [time.time() + seconds]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "time_ns", lambda: int(now[0] * 1e9))


@pytest.mark.parametrize("jumps", [(0, -1, 1, -1, 1), (1, -1, 0, 1, -1), (0, 0, -50, 0, 50)], ids=str)
def test_the_order_of_eviction_follows_the_uses_whatever_the_clock_says(
    jumps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []
    evict = collect.evict
    monkeypatch.setattr(collect, "evict", lambda rooms, entry_id: (gone.append(entry_id), evict(rooms, entry_id)))
    with small_store(tmp_path / "store") as store:
        ids = []
        for number, years in enumerate(jumps):
            with monkeypatch.context() as patch:
                jump(patch, years * YEAR_S)
                ids.append(save_filler(store, number))
                if number == 2:
                    store.load(ids[0])  # a use, which comes to light with the next save
        store.set_limits(max_bytes=admission.used_bytes(store.rooms))
        for number in range(10, 20):
            save_filler(store, number)
        assert gone[:5] == [ids[1], ids[2], ids[0], ids[3], ids[4]]


def save_filler(store: Store, number: int) -> str:
    return store.save([number] * 16, plain([number] * 16), IDENTITY).entry_id


@pytest.mark.parametrize("years", [-30, 30])
def test_a_live_lease_is_not_reaped_and_a_dead_one_is_whatever_the_clock_says(
    years: int, root: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(root) as store:
        alive = stopped_at(nursery, "write", "header placed")
        dead = stopped_at(nursery, "write", "reserved")
        nursery.kill(dead)
        for folder, _, names in os.walk(root / "leases"):
            for name in names:
                os.utime(Path(folder, name), (time.time() - years * YEAR_S,) * 2)
        jump(monkeypatch, years * YEAR_S)
        assert store.gc(full=True).count("lease") == 1
        assert len(lease_folders(store)) == 1
        use_everything(store)
        go_on(nursery, alive)
    monkeypatch.undo()
    assert_whole(root, nursery)


def test_a_clock_that_jumps_in_the_middle_of_a_save_changes_nothing(
    root: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(root) as store:
        real, asked = time.time_ns, itertools.count()

        def swinging() -> int:
            years = (-1) ** next(asked)
            return real() + years * YEAR_S * 1_000_000_000

        monkeypatch.setattr(time, "time_ns", swinging)
        use_everything(store)
        assert next(asked) > 0
    assert_whole(root, nursery)


# ---- equal process ids

APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def why_not_apart() -> str:
    """Why processes cannot have a namespace of ids of their own here; empty where they can."""
    if shutil.which(APART[0]) is None:
        return "there is no unshare here"
    done = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False)
    return f"unshare is not allowed here: {done.stderr.strip()}" if done.returncode else ""


def test_writers_in_containers_with_equal_process_ids_are_told_apart(root: Path) -> None:
    reason = why_not_apart()
    if reason:
        pytest.skip(reason)
    with Nursery(root, *APART) as left, Nursery(root, *APART) as right, small_store(root) as store:
        stopped = [(nursery, stopped_at(nursery, "write", "reserved")) for nursery in (left, right)]
        assert stopped[0][1].pid == stopped[1][1].pid
        assert store.gc().count("lease") == 0
        assert len(lease_folders(store)) == 2
        left.kill(stopped[0][1])
        assert store.gc(full=True).count("lease") == 1
        assert len(lease_folders(store)) == 1
        use_everything(store)
        go_on(*stopped[1])
        assert_whole(root, right)
