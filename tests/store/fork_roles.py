"""What forks: `python fork_roles.py PART ROOT`. Ends with the line "whole" where everything was as it must be.

The parent never computes with mlx, whose threads do not survive a fork: what it saves is described by hand over plain
memory. A child may use mlx.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from blockstore import Store, cut
from blockstore.fs import FileSystem
from blockstore.saving import Prepared
from kvcodecs.entry import HeaderEntry, slot
from token_caches import IDENTITY, identity, plain, rows_of, small_store

TOKENS = list(range(9))


class Gate(FileSystem):
    """Holds a header back until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def rename(self, source: str, target: str) -> None:
        if target.endswith(".mlxkv") and not self.opened.is_set():
            self.reached.set()
            assert self.opened.wait(30)
        super().rename(source, target)


def by_hand(tokens: Sequence[int], ns: str) -> Prepared:
    """What prepare() makes of plain(tokens)."""
    views = {(0, side): rows_of(tokens, 4, side).view(np.uint32) for side in (0, 1)}
    shape = (1, 1, len(tokens), 4)
    entry = HeaderEntry("kv", len(tokens), {}, (slot(shape, "float32"), slot(shape, "float32")))
    packed = np.array(tokens, "<u4").tobytes()
    plan = cut.segments([entry], 4, 1024)
    return Prepared(identity(ns), "mlx-cache-v5", packed, (entry,), (), None, None, plan, views)


def in_child(act: Callable[[], None]) -> int:
    """Fork, act in the child, and return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    raise TimeoutError("the child hangs")


def lease(root: str) -> None:
    """A child lives and dies while another thread of its parent is in the middle of a save."""
    gate = Gate()
    store = small_store(root, fs=gate)
    saver = threading.Thread(target=lambda: store.commit(by_hand(range(400), "parent")))
    saver.start()
    assert gate.reached.wait(30)
    [held] = store._rooms.leases.ids()

    def child() -> None:
        gate.opened.set()  # in the child's memory alone
        for used in (store, small_store(root)):
            assert used.find([*TOKENS, 1], IDENTITY) is not None
            used.gc(full=True)
            assert used._rooms.leases.ids() == [held]
        store.commit(by_hand(TOKENS, "child"))
        loaded = store.restore([*TOKENS, 1], IDENTITY)
        assert loaded is not None
        store.save(TOKENS, plain(loaded.tokens), identity("child with mlx"))
        store.close()

    assert in_child(child) == 0
    assert store._rooms.leases.has_live_owner(held)
    store.gc()
    gate.opened.set()
    saver.join()
    assert store.find([*range(400), 1], identity("parent")) is not None
    store.close()


def storm(root: str) -> None:
    """Children of a process whose other threads save and look all the time."""
    store, stop = small_store(root), threading.Event()

    def busy(number: int) -> None:
        at = 0
        while not stop.is_set():
            at += 1
            store.commit(by_hand([number, *range(at % 20), at], f"busy {number}"))
            store.find([*TOKENS, 1], IDENTITY)

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(50):
            assert in_child(partial(visit, store, number)) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    store.close()


def visit(store: Store, number: int) -> None:
    assert store.find([*TOKENS, 1], IDENTITY) is not None
    assert store.stats().entries > 0
    saved = store.commit(by_hand([*TOKENS, number], "visitor"))
    if number % 2:
        store.remove(saved.entry_id)
    store.gc(full=number % 10 == 9)


def orphan(root: str) -> None:
    """A child that outlives its parent, which dies in the middle of a save."""
    gate = Gate()
    store = small_store(root, fs=gate)
    saver = threading.Thread(target=lambda: store.commit(by_hand(range(400), "parent")))
    saver.start()
    assert gate.reached.wait(30)
    parent = os.getpid()
    if os.fork():
        os.kill(parent, signal.SIGKILL)
    gate.opened.set()  # in the child's memory alone
    live_on(store, f"{root}.stop")


def live_on(store: Store, end: str) -> None:
    """Use the store now and then, until the end; then say so."""
    deadline = time.monotonic() + 60
    while not os.path.exists(end):
        assert time.monotonic() < deadline
        assert store.find([*TOKENS, 1], IDENTITY) is not None
        print("alive", flush=True)
        time.sleep(0.02)
    store.commit(by_hand(TOKENS, "orphan"))
    store.close()


if __name__ == "__main__":
    {"lease": lease, "storm": storm, "orphan": orphan}[sys.argv[1]](sys.argv[2])
    print("whole")
