"""A lock that is shared or exclusive between the threads of a process and between processes.

Between processes it is an flock, which dies with its owner. Two things flock does not give are added: threads of one
process share a descriptor, so they are counted here; and readers that never pause would starve a writer, so everybody
passes a second file first (the turnstile), which a waiting writer holds. A thread passes it, too, where others of its
process read already: otherwise their overlapping looks would keep the lock for ever.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
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
        self._entering = False  # a thread waits for the files, to read
        self._writer: int | None = None  # the thread that keeps the others out
        self._writers_waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        self._enter(time.monotonic() + PATIENCE_S)
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
        deadline = time.monotonic() + PATIENCE_S
        self.hold_threads()
        try:
            self._lock_files(exclusive=True, deadline=deadline)
            try:
                yield
            finally:
                self._fs.unlock(self._descriptors()[0])
        finally:
            self.release_threads()

    def hold_threads(self) -> None:
        """Keep every other thread of this process out, without touching the lock that other processes see."""
        deadline = time.monotonic() + PATIENCE_S
        with self._condition:
            self._writers_waiting += 1
            try:
                self._await(lambda: self._writer is None and not self._entering and not self._readers, deadline)
            finally:
                self._writers_waiting -= 1
                self._condition.notify_all()  # whoever stood back for a writer that gave up
            self._writer = get_ident()

    def release_threads(self) -> None:
        """Let the other threads in; nothing where the caller does not hold them (a fork that could not wait)."""
        with self._condition:
            if self._writer == get_ident():
                self._writer = None
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

    def _enter(self, deadline: float) -> None:
        """Become a reader: beside those of this process that read already, or by locking the files."""
        with self._condition:
            while True:
                self._await(lambda: self._writer is None and not self._entering and not self._writers_waiting, deadline)
                if self._joins():
                    self._readers += 1
                    return
                if not self._readers:
                    break
                if time.monotonic() > deadline:
                    raise self._busy()
                self._condition.wait_for(lambda: not self._readers, _LONGEST_PAUSE_S)
            self._entering = True
        # Not under the condition: the other threads must be able to lose their own patience meanwhile.
        entered = 0
        try:
            self._lock_files(exclusive=False, deadline=deadline)
            entered = 1
        finally:
            with self._condition:
                self._entering = False
                self._readers += entered
                self._condition.notify_all()

    def _joins(self) -> bool:
        """Read at once, if nobody who writes or waits stands before the files; alone, or with those who read already.

        False while a writer of another process waits: then the readers of this one have to come to an end.
        """
        fd, turn = self._descriptors()
        if not self._fs.try_lock(turn, exclusive=False):
            return False
        try:
            return self._readers > 0 or self._fs.try_lock(fd, exclusive=False)
        finally:
            self._fs.unlock(turn)

    def _await(self, ready: Callable[[], bool], deadline: float) -> None:
        if not self._condition.wait_for(ready, deadline - time.monotonic()):
            raise self._busy()

    def _descriptors(self) -> tuple[int, int]:
        if self._fd is None:
            self._fd = self._fs.open_lock(self._path)
        if self._turn_fd is None:
            self._turn_fd = self._fs.open_lock(self._path + ".turn")
        return self._fd, self._turn_fd

    def _lock_files(self, *, exclusive: bool, deadline: float) -> None:
        fd, turn = self._descriptors()
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
