"""A lock that is shared or exclusive between the threads of a process and between processes.

Between processes it is an flock, which dies with its owner. Two things flock does not give are added: threads of one
process share a descriptor, so they are counted here; and readers that never pause would starve a writer, so everybody
passes a second file first (the turnstile), which a waiting writer holds.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from .errors import StoreBusy
from .fs import FileSystem

# A transaction takes milliseconds. Whoever waits this long waits for a process that was stopped in the middle of one.
PATIENCE_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.00005
_LONGEST_PAUSE_S: Final = 0.002


class HostLock:
    """Shared for readers, exclusive for writers. Not reentrant. Raises StoreBusy after PATIENCE_S of waiting."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._fd: int | None = None
        self._turn_fd: int | None = None
        self._reset()

    def _reset(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writer = False
        self._writers_waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._await(lambda: not self._writer and not self._writers_waiting)
            if self._readers == 0:
                self._lock_files(exclusive=False)
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                if self._readers == 0:
                    self._fs.unlock(self._descriptors()[0])
                    self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self.hold_threads()
        try:
            self._lock_files(exclusive=True)
            try:
                yield
            finally:
                self._fs.unlock(self._descriptors()[0])
        finally:
            self.release_threads()

    def hold_threads(self) -> None:
        """Keep every other thread of this process out, without touching the lock that other processes see."""
        with self._condition:
            self._writers_waiting += 1
            try:
                self._await(lambda: not self._writer and self._readers == 0)
            finally:
                self._writers_waiting -= 1
            self._writer = True

    def release_threads(self) -> None:
        with self._condition:
            self._writer = False
            self._condition.notify_all()

    def forget(self) -> None:
        """In a forked child: let go of the parent's descriptors. Never unlocks: the lock is the parent's."""
        self.close()
        self._reset()

    def close(self) -> None:
        for fd in (self._fd, self._turn_fd):
            if fd is not None:
                self._fs.close(fd)
        self._fd = self._turn_fd = None

    def _await(self, ready: Callable[[], bool]) -> None:
        if not self._condition.wait_for(ready, PATIENCE_S):
            raise self._busy()

    def _descriptors(self) -> tuple[int, int]:
        if self._fd is None:
            self._fd = self._fs.open_lock(self._path)
        if self._turn_fd is None:
            self._turn_fd = self._fs.open_lock(self._path + ".turn")
        return self._fd, self._turn_fd

    def _lock_files(self, *, exclusive: bool) -> None:
        fd, turn = self._descriptors()
        deadline = time.monotonic() + PATIENCE_S
        self._lock_one(turn, exclusive, deadline)
        try:
            self._lock_one(fd, exclusive, deadline)
        finally:
            self._fs.unlock(turn)

    def _lock_one(self, fd: int, exclusive: bool, deadline: float) -> None:
        pause = _FIRST_PAUSE_S
        while not self._fs.try_lock(fd, exclusive=exclusive):
            if time.monotonic() > deadline:
                raise self._busy()
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    def _busy(self) -> StoreBusy:
        return StoreBusy(
            f"another process or thread has held the index for more than {PATIENCE_S:.0f} s",
            path=self._path,
            hint="A stopped or hung process holds it: continue or end that process.",
        )
