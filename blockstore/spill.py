"""The write-behind queue: items are worked on one after the other, on a thread that is not the caller's.

with Store(root) as store, SpillQueue(store.commit, max_bytes=4 << 30) as queue:
    prepared = store.prepare(tokens, caches, identity)
    future = queue.enqueue(prepared, prepared.logical_bytes)
    del prepared  # the queue alone has the snapshot now, until it is committed
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from .errors import InvalidInput
from .pending import CANCELLED, DROPPED, Entry, Outcome, Pending, SpillStats, bounded, report

T = TypeVar("T")
R = TypeVar("R")


class SpillQueue(Generic[T, R]):
    """Does `work` on items in the order in which they come, one at a time, on a daemon thread; the first one starts it.

    An item pins memory: the queue keeps nothing of it, or of its callbacks, once its future is resolved.

    max_bytes: soft cap over what pends, see enqueue().

    Methods may be called from any thread. `work` and callbacks are called without a lock and may use the queue, too,
    but there drain() and close() do not wait. Whatever `work` raises makes its item failed, and the next one follows;
    nothing is tried again. An Exception that a callback raises is logged. So is another BaseException on the queue's
    thread; a caller's thread raises it, when all that the call had to do is done.

    Close the queue before the store. What is pending when the process ends is lost. A forked child finds the queue
    empty, and starts a thread of its own: what was pending is the parent's, and the child neither works on it, nor
    releases it, nor resolves its futures.
    """

    def __init__(self, work: Callable[[T], R], *, max_bytes: int) -> None:
        self.max_bytes: Final = _checked_bytes("max_bytes", max_bytes)
        self._work = work
        self._pending: Pending[T, R] = Pending()
        _QUEUES.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enqueue(
        self,
        item: T,
        nbytes: int,
        *,
        label: object = None,
        droppable: bool = True,
        release: Callable[[], object] | None = None,
    ) -> Future[Outcome[R]]:
        """Take an item that pins `nbytes` bytes, without waiting for work. The future gets an Outcome, always.

        While more than max_bytes pend, the oldest item is dropped that waits, is droppable, and is not this one; where
        there is none, more than max_bytes stay.

        label: what cancel_where() goes by. release: called once when the queue has let go of the item, whatever became
        of it: on the queue's thread, or by the call that dropped or cancelled it. The future counts as running from the
        beginning, so that its cancel() does nothing.

        Raises InvalidInput (for a closed queue, too), and RuntimeError where no thread can be started; an item that was
        not taken is not released.
        """
        future: Future[Outcome[R]] = Future()
        future.set_running_or_notify_cancel()
        entry = Entry(item, _checked_bytes("nbytes", nbytes), label, droppable, release, future)
        del item, label, release  # the traceback of a callback may keep this frame
        pending = self._pending
        dropped: deque[Entry[T, R]] = deque()
        try:
            with pending.lock:
                if pending.closed:
                    raise InvalidInput("the queue is closed", hint="Make a new one.")
                if pending.worker is None:
                    self._start_worker(pending)
                pending.add(entry)
                pending.take(pending.over(self.max_bytes, entry), "dropped", dropped)
        finally:
            pending.settle(dropped, DROPPED)
        return future

    def cancel_where(self, predicate: Callable[[Any], bool]) -> int:
        """Cancel the items that wait and for whose label (None if they have none) it is true; how many they were.

        Not the one in flight, and none that is enqueued meanwhile.
        """
        pending = self._pending
        chosen = [number for number, label in pending.labels() if predicate(label)]
        cancelled: deque[Entry[T, R]] = deque()
        try:
            with pending.lock:
                pending.take(chosen, "cancelled", cancelled)
            count = len(cancelled)
        finally:
            pending.settle(cancelled, CANCELLED)
        return count

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all that was enqueued before is resolved; False where that takes more than `timeout` seconds.

        Done-callbacks of the futures may still be running.
        """
        return self._pending.wait(self._pending.last, timeout)

    def close(self, timeout: float | None = None, *, drain: bool = True) -> bool:
        """Take nothing more, finish what waits (or cancel it: drain=False), and end the thread.

        False where that takes more than `timeout` seconds: it goes on then. May be called again, to wait or to cancel.
        """
        began = time.monotonic()
        pending = self._pending
        cancelled: deque[Entry[T, R]] = deque()
        try:
            with pending.lock:
                pending.close()
                worker = pending.worker
                if not drain:
                    pending.take([number for number, _ in pending.labels()], "cancelled", cancelled)
        finally:
            pending.settle(cancelled, CANCELLED)
        if not pending.wait(pending.last, timeout):
            return False
        if worker is None or worker is threading.current_thread():
            return worker is None
        worker.join(bounded(None if timeout is None else timeout - (time.monotonic() - began)))
        return not worker.is_alive()

    @property
    def stats(self) -> SpillStats:
        """The numbers of one moment, since the queue was made, or since the fork."""
        return self._pending.stats()

    # ---- inside

    def _start_worker(self, pending: Pending[T, R]) -> None:
        pending.worker = threading.Thread(target=self._serve, args=(pending,), name="blockstore-spill", daemon=True)
        try:
            pending.worker.start()
        except BaseException:
            pending.worker = None  # if it was only the waiting for it that failed, it sees that, and ends
            raise

    def _serve(self, pending: Pending[T, R]) -> None:
        while (entry := pending.next_entry()) is not None:
            outcome = entry.attempt(self._work)
            if pending is not self._pending:
                return  # in a child that work forked: the item is the parent's
            pending.land(entry, outcome)
            try:
                pending.settle(deque([entry]), outcome)
            except BaseException as error:
                report(error)
            del entry, outcome  # or they would stay until the next one comes

    def _start_over(self) -> None:
        """In a forked child. The parent's state is kept as it is: to free it may need locks that nobody opens here."""
        self._pending = Pending(closed=self._pending.closed, inherited=self._pending)


def _checked_bytes(field: str, value: int) -> int:
    if type(value) is not int or value < 0:
        raise InvalidInput(f"{field} must be a number of bytes", field=field, found=value)
    return value


_QUEUES: "weakref.WeakSet[SpillQueue[Any, Any]]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for queue in list(_QUEUES):
        queue._start_over()


os.register_at_fork(after_in_child=_after_fork_in_child)
