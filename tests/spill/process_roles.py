"""Processes with a queue: `python process_roles.py PART FOLDER`. Ends with the line "whole" where all was right."""

import os
import sys
import threading
import time
import weakref
from pathlib import Path

from blockstore import InvalidInput, Outcome, SpillQueue
from spill.kit import PATIENCE_S, Desk, Pinned
from store.fork_roles import in_child


def child(folder: Path) -> None:
    """A child beside a parent whose queue has one item in flight and another that waits."""
    desk, released = Desk(), []
    queue = SpillQueue(desk.work, max_bytes=5)
    items = [Pinned(name) for name in ("a", "b")]
    kept = [weakref.ref(item) for item in items]
    futures = [
        queue.enqueue(item, 3, droppable=False, release=lambda name=item.name: released.append(name)) for item in items
    ]
    del items
    assert desk.await_start() == "a"

    def live() -> None:
        assert queue.stats.pending_count == 0
        assert queue.cancel_where(lambda label: True) == 0
        assert queue.drain()
        desk.finish()
        assert queue.enqueue(Pinned("c"), 4).result(PATIENCE_S) == Outcome("C")
        assert (queue.stats.stored, queue.stats.stored_bytes, queue.stats.dropped) == (1, 4, 0)
        in_grandchild = in_child(lambda: queue.close(PATIENCE_S) or sys.exit("it is not closed"))
        assert in_grandchild == 0
        assert queue.close(PATIENCE_S)
        assert released == []
        assert kept[1]() is not None
        assert not any(future.done() for future in futures)

    assert in_child(live) == 0
    assert queue.stats.pending_count == 2
    desk.finish()
    desk.finish()
    assert [future.result(PATIENCE_S) for future in futures] == [Outcome("A"), Outcome("B")]
    assert queue.close(PATIENCE_S)
    assert released == ["a", "b"]
    assert in_child(lambda: refuse(queue)) == 0


def refuse(queue: SpillQueue[Pinned, str]) -> None:
    """The child of a parent that closed its queue."""
    try:
        queue.enqueue(Pinned("d"), 1)
    except InvalidInput:
        assert queue.close(0)
    else:
        raise AssertionError("it took an item")


def storm(folder: Path) -> None:
    """Children of a process whose other threads are in the middle of calls, and may have the queue's lock."""
    stop = threading.Event()
    queue = SpillQueue(str, max_bytes=3)

    def busy() -> None:
        while not stop.is_set():
            queue.enqueue("parent", 1)
            queue.cancel_where(lambda label: queue.stats.in_flight > 0)

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()

    def live() -> None:
        assert queue.enqueue("child", 1).result(PATIENCE_S) == Outcome("child")
        assert queue.close(PATIENCE_S)

    try:
        for _ in range(50):
            assert in_child(live) == 0
    finally:
        stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert queue.close(PATIENCE_S)


def work(folder: Path) -> None:
    """Work that forks: the child comes back from it, too, on the queue's thread, and does nothing of its parent's."""
    children: list[int] = []

    def note(what: str) -> None:
        with (folder / "notes").open("a") as file:
            file.write(f"{'parent' if os.getpid() == parent else 'child'} {what}\n")

    def fork(item: str) -> None:
        if item == "first":
            time.sleep(0.05)  # until the other one waits
            children.append(os.fork())
        note(f"worked on {item}")

    parent = os.getpid()
    with SpillQueue(fork, max_bytes=9) as queue:
        for item in ("first", "second"):
            queue.enqueue(item, 1, release=lambda item=item: note(f"released {item}"))
        assert queue.drain(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while os.waitpid(children[0], os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert sorted((folder / "notes").read_text().splitlines()) == [
        "child worked on first",
        "parent released first",
        "parent released second",
        "parent worked on first",
        "parent worked on second",
    ]


def leave(folder: Path) -> None:
    """End with an item in flight, whose work is in the middle of something, and with others that wait."""
    begun = threading.Event()

    def busy(item: str) -> None:
        begun.set()
        while True:
            (folder / "file").write_text(item)

    queue = SpillQueue(busy, max_bytes=9)
    for item in "abc":
        queue.enqueue(item, 1, release=lambda: print("released"))
    assert begun.wait(PATIENCE_S)


if __name__ == "__main__":
    {"child": child, "storm": storm, "work": work, "leave": leave}[sys.argv[1]](Path(sys.argv[2]))
    print("whole")
