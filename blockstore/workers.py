"""Work spread over a few threads of its own, with the first failure raised and no thread left behind."""

import _thread
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


def spread(items: Iterable[T], work: Callable[[T], object], threads: int) -> None:
    """Call `work` on every item. After a failure no further item is begun; the first one is raised, all are awaited.

    The caller's thread works too, and alone where the process may have no other. `items` is advanced by one thread at a
    time. What interrupts the caller is raised when the others have finished the items that they are at.
    """
    shared = _Work(items, work)
    helpers = [Lock() for _ in range(threads - 1)]
    try:
        try:
            for helper in helpers:
                if not _started(shared, helper):
                    break
            shared.go_on()
        finally:
            _await_all(helpers, shared)
    except BaseException as error:
        _await_all(helpers, shared)  # that, too, may have been interrupted, before it began
        shared.failures.append(error)
    try:
        if shared.failures:
            raise next((error for error in shared.failures if not isinstance(error, Exception)), shared.failures[0])
    finally:
        shared.failures.clear()  # an error whose own traceback leads to it would outlive its handling


def _started(shared: "_Work[T]", helper: Lock) -> bool:
    """False where no thread is to be had: a limit of the process, or an interpreter that shuts down."""
    try:
        # Not threading.Thread: an exception of a signal handler in its start() or join() leaves broken locks.
        _thread.start_new_thread(shared.help, (helper,))
    except RuntimeError as error:
        if not str(error).startswith("can't "):  # a signal handler's own
            raise
        return False
    return True


class _Work(Generic[T]):
    def __init__(self, items: Iterable[T], work: Callable[[T], object]) -> None:
        self.failures: list[BaseException] = []
        self.over = False
        self._items = iter(items)
        self._work = work
        self._lock = Lock()

    def go_on(self) -> None:
        """Until there are no more items, or somebody failed."""
        while True:
            with self._lock:
                if self.over or self.failures:
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            self._work(item)

    def help(self, busy: Lock) -> None:
        """In a thread of its own: holds `busy` from before it looks for work until it has ended."""
        with busy:
            try:
                self.go_on()
            except BaseException as error:  # carried to the caller's thread, whatever it is
                self.failures.append(error)


def _await_all(helpers: Sequence[Lock], shared: _Work[T]) -> None:
    """Until nobody works; who has not begun yet will find that it is over. An interruption becomes a failure."""
    left = list(helpers)
    while left:
        try:
            with shared._lock:
                shared.over = True
            while left:
                with left[-1]:
                    pass
                left.pop()
        except BaseException as error:
            shared.failures.append(error)
