"""A lock that is shared or exclusive between the threads of a process and between processes.

Between processes it is an flock, which dies with its owner. Two things flock does not give are added: threads of one
process share a descriptor, so they are listed here; and readers that never pause would starve a writer, so everybody
passes a second file first (the turnstile), which a waiting writer holds. A thread passes it, too, where others of its
process read already: otherwise their overlapping looks would keep the lock for ever.

The exception of a signal handler (KeyboardInterrupt, a timeout) may come between any two steps. So a thread is listed
before it locks the files, what it has can be let go of any number of times, the files are unlocked whenever nobody is
listed, and nobody waits on a condition variable, which such an exception can leave locked.
"""

import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from types import FrameType, TracebackType
from typing import Final, Generic, Self, TypeVar

from .errors import StoreBroken, StoreBusy
from .fs import FileSystem

# A transaction takes milliseconds. Whoever waits this long waits for a process that was stopped in the middle of one.
PATIENCE_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.00005
_LONGEST_PAUSE_S: Final = 0.002

T = TypeVar("T")


class Hold(weakref.ref[object]):
    """What one thread has, or waits for, of a lock; let go of together with `owner` and before `frame` is left.

    It refers to its owner weakly: unlike a __del__ of that, it runs, and is interrupted, only where all else failed.
    """

    __slots__ = ("ended", "frame", "lock", "thread")

    def __new__(cls, owner: object, lock: "HostLock", frame: FrameType) -> Self:
        return super().__new__(cls, owner, _drop)

    def __init__(self, owner: object, lock: "HostLock", frame: FrameType) -> None:
        self.lock = lock
        self.frame = frame
        self.thread = get_ident()
        self.ended = False

    def is_live(self) -> bool:
        """Whether the calling thread, to which it belongs, is still inside."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


def _drop(hold: Hold) -> None:
    """The owner is no more: called where something remembers the hold, the lock if it was not let go of."""
    if not hold.ended:
        hold.lock.leave(hold)


class Scope(ABC, Generic[T]):
    """A context for one hold, which an interruption ends as well: at the latest when its exception is dropped."""

    def __init__(self, lock: "HostLock") -> None:
        self._lock = lock
        self._hold: Hold | None = None

    @abstractmethod
    def _begin(self, hold: Hold) -> T:
        """Take the lock, and whatever else."""

    def _end(self, hold: Hold) -> None:
        """What comes before letting go of the lock; once more after an interruption, and wherever _begin() failed."""

    def __enter__(self) -> T:
        self._hold = hold = Hold(self, self._lock, sys._getframe(1))
        try:
            return self._begin(hold)
        except BaseException:
            self._finish()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        hold = self._hold
        if hold is None:
            return
        try:
            self._end(hold)
            self._lock.leave(hold)
        except BaseException:  # it may have been interrupted; what fails by itself fails again
            try:
                self._end(hold)
            finally:
                self._lock.leave(hold)
            raise
        finally:
            self._hold = None
            hold.ended = True


class HostLock:
    """Shared for readers, exclusive for writers. Not reentrant. Raises StoreBusy after PATIENCE_S of waiting."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._fd: int | None = None
        self._turn_fd: int | None = None
        self._reset()

    def _reset(self) -> None:
        # Reentrant, since an abandoned hold may be let go of in the middle of any step.
        self._mutex = threading.RLock()
        self._readers: dict[int, Hold] = {}  # by thread
        self._alone: Hold | None = None  # keeps the other threads out: writes, or waits for the files
        self._waiting: dict[int, Hold] = {}  # by thread; for the others of this process, to be alone
        self._locked = self._turning = False  # the file, the turnstile: perhaps locked by this process

    def shared(self) -> AbstractContextManager[None]:
        return _Locked(self, self.share)

    def exclusive(self) -> AbstractContextManager[None]:
        return _Locked(self, self.exclude)

    def threads(self) -> AbstractContextManager[None]:
        """Keep every other thread of this process out, without touching the lock that other processes see."""
        return _Locked(self, self.exclude_threads)

    # ---- by steps: who calls one of these calls leave() in the end, whatever becomes of it

    def share(self, hold: Hold) -> None:
        """Become a reader: beside those of this process that read already, or by locking the files."""
        self._drop_leaked(hold.thread)
        patience = None
        while not self._try_share(hold):
            patience = patience or _Patience(self._path)
            patience.pause()
        if self._alone is hold:
            # Not under the mutex: the other threads must be able to lose their own patience meanwhile.
            self._lock_files(patience, exclusive=False)
            with self._mutex:
                self._readers[hold.thread] = hold
                self._alone = None

    def exclude(self, hold: Hold) -> None:
        self._lock_files(self.exclude_threads(hold), exclusive=True)

    def exclude_threads(self, hold: Hold) -> "_Patience":
        self._drop_leaked(hold.thread)
        patience = _Patience(self._path)
        while not self._try_alone(hold):
            patience.pause()
        return patience

    def leave(self, hold: Hold) -> None:
        """Let go of what the hold has, if anything; of the files with the last one."""
        with self._mutex:
            if self._readers.get(hold.thread) is hold:
                del self._readers[hold.thread]
            if self._alone is hold:
                self._alone = None
            if self._waiting.get(hold.thread) is hold:
                del self._waiting[hold.thread]
            if self._alone is None:
                self._unlock_files()

    def excludes(self, hold: Hold) -> bool:
        return self._alone is hold

    def stands(self) -> bool:
        """False where the file that is locked was deleted or replaced: others lock another one."""
        return self._fd is not None and self._fs.same_file(self._fd, self._path)

    def forget(self) -> None:
        """In a forked child: let go of the parent's descriptors. Never unlocks: the lock is the parent's."""
        self.close()
        self._reset()

    def close(self) -> None:
        self._locked = self._turning = False
        for fd in (self._fd, self._turn_fd):
            if fd is not None:
                self._fs.close(fd)
        self._fd = self._turn_fd = None

    # ---- among threads

    def _drop_leaked(self, thread: int) -> None:
        """Let go of what an interruption left to this thread. Raises StoreBusy where it is in a transaction now."""
        if thread not in self._readers and self._alone is None and not self._waiting:
            return
        with self._mutex:
            for old in (self._readers.get(thread), self._alone, self._waiting.get(thread)):
                if old is None or old.thread != thread:
                    continue
                if old.is_live():  # a signal handler that uses the store, say: what it waits for waits for it
                    raise StoreBusy("this thread is using the index already", path=self._path)
                self.leave(old)

    def _try_share(self, hold: Hold) -> bool:
        """Read at once, or become the one that waits for the files to read. False where others come first."""
        with self._mutex:
            if self._alone is not None or self._waiting:
                return False
            beside = bool(self._readers)
            self._readers[hold.thread] = hold
            if self._passes(beside=beside):
                return True
            del self._readers[hold.thread]
            # Those who read have to come to an end: a writer of another process waits, or the files were deleted.
            if not self._readers:
                self._alone = hold
            return not self._readers

    def _try_alone(self, hold: Hold) -> bool:
        with self._mutex:
            if self._alone is not None or self._readers:
                self._waiting[hold.thread] = hold
                return False
            self._alone = hold
            self._waiting.pop(hold.thread, None)
            return True

    # ---- among processes

    def _passes(self, *, beside: bool) -> bool:
        """Pass the turnstile, if nobody waits there, and lock the file, unless that is done; never waits."""
        fd, turn = self._descriptors()
        self._turning = True
        if not self._fs.try_lock(turn, exclusive=False):
            self._turning = False
            return False
        try:
            if not beside:
                self._locked = True
                if not self._fs.try_lock(fd, exclusive=False):
                    return False
            return self._fs.same_file(fd, self._path)
        finally:
            self._fs.unlock(turn)
            self._turning = False

    def _lock_files(self, patience: "_Patience | None", *, exclusive: bool) -> None:
        """Wait for the files that stand there now, alone in this process."""
        patience = patience or _Patience(self._path)
        while True:
            fd, turn = self._descriptors()
            self._turning = self._locked = True
            for one in (turn, fd):
                while not self._fs.try_lock(one, exclusive=exclusive):
                    patience.pause()
            if self._fs.same_file(turn, self._path + ".turn") and self.stands():
                break
            self.close()  # somebody deleted them, and who comes next makes new ones
        self._fs.unlock(turn)
        self._turning = False

    def _unlock_files(self) -> None:
        if self._turning and self._turn_fd is not None:
            self._fs.unlock(self._turn_fd)
            self._turning = False
        if self._locked and not self._readers and self._fd is not None:
            self._fs.unlock(self._fd)
            self._locked = False

    def _descriptors(self) -> tuple[int, int]:
        if self._fd is None:
            self._fd = self._open(self._path)
        if self._turn_fd is None:
            self._turn_fd = self._open(self._path + ".turn")
        return self._fd, self._turn_fd

    def _open(self, path: str) -> int:
        if self._fs.exists(path) and self._fs.size_of(path) is None:
            raise StoreBroken("something that is no file stands in a lock's place", path=path)
        return self._fs.open_lock(path)


class _Locked(Scope[None]):
    def __init__(self, lock: HostLock, take: Callable[[Hold], object]) -> None:
        super().__init__(lock)
        self._take = take

    def _begin(self, hold: Hold) -> None:
        self._take(hold)


class _Patience:
    """Waits longer and longer, until PATIENCE_S are over: then pause() raises StoreBusy."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._end = time.monotonic() + PATIENCE_S
        self._pause_s = _FIRST_PAUSE_S

    def pause(self) -> None:
        if time.monotonic() > self._end:
            raise StoreBusy(
                f"another process or thread has held the index for more than {PATIENCE_S:.0f} s",
                path=self._path,
                hint="A stopped or hung process holds it: continue or end that process.",
            )
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
