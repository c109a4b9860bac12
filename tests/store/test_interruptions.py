"""Interruptions: the exception of a signal handler, KeyboardInterrupt or a timeout, at any place of a transaction.

CPython runs handlers where a function begins and where a call has returned, which is where a profiler is called, too:
so a profiler that raises interrupts at each of these places in turn.
"""

import _thread
import contextlib
import gc
import itertools
import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from blockstore import Store, StoreBusy, locks, probe
from blockstore.fs import FileSystem
from blockstore.locks import HostLock
from blockstore.workers import spread
from store_kit import assert_clean, assert_exact
from token_caches import IDENTITY, identity, plain, small_store

HERE = Path(__file__).parent
OURS = os.path.dirname(locks.__file__)
TOKENS = list(range(20))
PROMPT = [*TOKENS, 1]


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=surroundings)


# ---- interrupted at every place


class Interruption(BaseException):
    pass


@contextlib.contextmanager
def interrupted(at: int) -> Iterator[None]:
    """Raise at that place of what is done inside, counted from 0, if there are so many."""
    left = itertools.count(at, -1)

    def look(frame: FrameType, event: str, what: object) -> None:
        inside = frame.f_code.co_filename.startswith(OURS)
        if inside and event in ("call", "c_return") and next(left) == 0:
            raise Interruption

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def interruptions(act: Callable[[], object]) -> Iterator[Interruption]:
    """Interrupt `act` at each place in turn; the exception each time."""
    for at in itertools.count():
        try:
            with interrupted(at):
                act()
        except Interruption as error:
            yield error
        else:
            return


def is_free(path: str) -> bool:
    """Whether another process could lock the files now, to write."""
    fs = FileSystem()
    fds = [fs.open_lock(path), fs.open_lock(path + ".turn")]
    try:
        return sum(fs.try_lock(fd, exclusive=True) for fd in fds) == len(fds)
    finally:
        for fd in fds:
            fs.close(fd)


KINDS: dict[str, Callable[[HostLock], AbstractContextManager[None]]] = {
    "shared": HostLock.shared, "exclusive": HostLock.exclusive, "threads": HostLock.threads,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_was_interrupted_anywhere_is_free(kind: str, tmp_path: Path, impatient: None) -> None:
    path = str(tmp_path / "lock")
    lock = HostLock(FileSystem(), path)

    places = 0
    for error in interruptions(lambda: use_once(lock, kind)):
        places += 1
        error.__traceback__ = None
        assert is_free(path)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: [use_once(lock, one) for one in KINDS]).result()
    assert places > 15
    lock.close()


def use_once(lock: HostLock, kind: str) -> None:
    with KINDS[kind](lock):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_who_was_interrupted_uses_the_lock_again_though_the_exception_is_kept(
    kind: str, tmp_path: Path, impatient: None
) -> None:
    """As an interactive session keeps the last one, with all that its frames hold."""
    path = str(tmp_path / "lock")
    lock = HostLock(FileSystem(), path)
    kept = []
    for error in interruptions(lambda: use_once(lock, kind)):
        kept.append(error)
        for again in KINDS:
            use_once(lock, again)
        assert is_free(path)
    assert len(kept) > 15
    lock.close()


CALLS: dict[str, Callable[[Store], object]] = {
    "find": lambda store: store.find(PROMPT, IDENTITY),
    "write": lambda store: store.rooms.index.pin(store.rooms.index.entries()[0][0], pinned=True),
}


@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("call", CALLS)
def test_a_transaction_that_was_interrupted_anywhere_stops_nobody(
    call: str, keep: bool, root: Path, impatient: None
) -> None:
    path, kept = str(root / "index" / "lock"), list[Interruption]()
    with small_store(root) as store, mock.patch.object(probe, "survey", return_value={}) as survey:
        CALLS[call](store)
        for error in interruptions(lambda: CALLS[call](store)):
            kept.append(error)
            if not keep:
                kept.clear()
                error.__traceback__ = None
                assert is_free(path)
            store.rooms.index.pin(store.entries()[0].entry_id, pinned=False)
            assert is_free(path)
        assert survey.call_count < 5, "where it was not even possible to note what the index is like"
        assert keep == (len(kept) > 50)
        kept.clear()
        assert_exact(store)
        assert_clean(store)


def test_work_that_was_interrupted_anywhere_ends_before_its_caller_goes_on() -> None:
    begun, ended = list[int](), list[int]()

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.0005)
        ended.append(item)

    before, places = _thread._count(), 0
    for error in interruptions(lambda: spread(range(6), work, 3)):
        places += 1
        error.__traceback__ = None
        assert sorted(begun) == sorted(ended), f"a helper is at work after place {places}"
    count = len(begun)
    assert places > 20
    await_true(lambda: _thread._count() == before)
    assert len(begun) == count


def test_an_error_that_spread_raises_is_gone_when_it_was_handled() -> None:
    def fail(item: int) -> None:
        raise Interruption

    gc.disable()
    try:
        with pytest.raises(Interruption) as caught:
            spread(range(3), fail, 2)
        gone = weakref.ref(caught.value)
        del caught
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("granted", [0, 1])
@pytest.mark.parametrize("says", ["can't start new thread", "can't create new thread at interpreter shutdown"])
def test_where_no_thread_is_to_be_had_the_caller_does_the_work(root: Path, granted: int, says: str) -> None:
    left, real = [granted], _thread.start_new_thread

    def start_new_thread(*given: Any) -> int:
        if not left[0]:
            raise RuntimeError(says)
        left[0] -= 1
        return real(*given)

    done: list[int] = []
    with mock.patch.object(_thread, "start_new_thread", start_new_thread):
        spread(range(9), done.append, 4)
        with small_store(root) as store:
            store.save(PROMPT, plain(PROMPT), IDENTITY)
            assert store.restore([*PROMPT, 2], IDENTITY) is not None
    assert sorted(done) == list(range(9))


def test_an_error_of_a_handler_while_a_thread_is_started_is_raised() -> None:
    late = mock.patch.object(_thread, "start_new_thread", side_effect=RuntimeError("too late"))
    with late, pytest.raises(RuntimeError, match="too late"):
        spread(range(3), lambda item: None, 2)


def await_true(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("seconds", [2.5, pytest.param(60, marks=pytest.mark.soak)], ids=["a moment", "for long"])
def test_a_process_that_is_interrupted_all_the_time_works_on_and_keeps_nobody_waiting(
    seconds: float, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "PATIENCE_S", 5.0)
    process = start("interrupt_roles.py", root, seconds, 1)
    assert process.stdin is not None
    assert process.stdout is not None
    with process, small_store(root) as store:
        saves = 0
        while not select.select([process.stdout], [], [], 0.02)[0]:
            store.save([7, saves % 5], plain([7, saves % 5]), identity("other"))
            saves += 1
        found = json.loads(process.stdout.readline())
        assert found["interrupted"] > 100 * seconds
        assert found["threads"] == 0
        assert saves > 10
        monkeypatch.setattr(locks, "PATIENCE_S", 0.5)
        store.save([8], plain([8]), identity("other"))
        assert process.communicate("go on\n", timeout=60)[0] == "whole\n"
        assert process.returncode == 0
        store.gc()
        assert_exact(store)
        assert_clean(store)


def test_who_uses_the_store_inside_its_own_transaction_is_refused_at_once(root: Path) -> None:
    """As a signal handler does: what it interrupted must not lose its lock."""
    with small_store(root) as store:
        [entry] = store.entries()
        began = time.monotonic()
        for inside in (store.rooms.index.write, store.rooms.index.env.read):
            with inside():
                for call in CALLS.values():
                    with pytest.raises(StoreBusy, match="already"):
                        call(store)
                assert not is_free(str(root / "index" / "lock"))
        with store.rooms.index.write() as books:
            with pytest.raises(StoreBusy, match="already"):
                store.entries()
            books.doom(entry.entry_id)
        assert store.entries() == []
        assert time.monotonic() - began < 5
