"""What a write-behind queue knows: the items that wait or are in flight, and what became of the others.

Everything that an item pins is let go of here, before its future is resolved.
"""

import logging
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")
R = TypeVar("R")
Reason = Literal["dropped", "cancelled", "failed"]

_log: Final = logging.getLogger(__name__)


class Outcome(msgspec.Struct, Generic[R], frozen=True):
    """What became of an item: what work returned; or the reason why it was not stored, and the error if work failed.

    The error is without its traceback (and so is what led to it), whose frames would pin the item: `traceback` is the
    text.
    """

    result: R | None = None
    reason: Reason | None = None
    error: BaseException | None = None
    traceback: str = ""

    @property
    def stored(self) -> bool:
        return self.reason is None


DROPPED: Final[Outcome[Any]] = Outcome(reason="dropped")
CANCELLED: Final[Outcome[Any]] = Outcome(reason="cancelled")


class SpillStats(msgspec.Struct, frozen=True):
    """Items: those that pend (they wait, or are in flight: none or one), and what became of the others."""

    pending_bytes: int
    pending_count: int
    in_flight: int
    stored_bytes: int
    stored: int
    dropped: int
    cancelled: int
    failed: int


class Entry(Generic[T, R]):
    """An item with what belongs to it. Emptied once it is done: who still has it, a traceback say, pins nothing."""

    __slots__ = ("droppable", "future", "held", "label", "nbytes", "number", "release")

    def __init__(
        self,
        item: T,
        nbytes: int,
        label: object,
        droppable: bool,
        release: Callable[[], object] | None,
        future: Future[Outcome[R]],
    ) -> None:
        self.held = [item]  # until work takes it
        self.nbytes = nbytes
        self.label = label
        self.droppable = droppable
        self.release = release
        self.future: Future[Outcome[R]] | None = future
        self.number = 0

    def attempt(self, work: Callable[[T], R]) -> Outcome[R]:
        try:
            return Outcome(work(self.held.pop()))
        except BaseException as error:
            text = _as_text(error)
            _drop_tracebacks(error)
            return Outcome(reason="failed", error=error, traceback=text)

    def finish(self, outcome: Outcome[R]) -> None:
        """Let go of the item, then tell of it. Where that was interrupted, a second call does what is left of it."""
        self.held.clear()
        self.label = None
        self._call_release()
        self._resolve(outcome)

    def _call_release(self) -> None:
        release = self.release
        self.release = None
        try:
            if release is not None:
                release()
        except Exception as error:
            report(error)

    def _resolve(self, outcome: Outcome[R]) -> None:
        try:
            if self.future is not None:
                self.future.set_result(outcome)
        except InvalidStateError:
            pass  # by the first call, or by somebody else
        except Exception as error:
            report(error)
        self.future = None


class Pending(Generic[T, R]):
    """The state of one queue in one process. Its lock is held for short, and while it is held nobody is called.

    Signal handlers and finalizers run in the middle of a caller's thread. They may use the queue themselves, and what
    they raise leaves the numbers true and the worker awake.
    """

    def __init__(self, *, closed: bool = False, inherited: object = None) -> None:
        self.lock = threading.RLock()
        self._wake: SimpleQueue[None] = SimpleQueue()  # a Condition forgets whom it woke if that is interrupted
        self._resolved = threading.Condition(self.lock)
        self._inherited = inherited
        self.worker: threading.Thread | None = None
        self.closed = closed
        self.last = 0  # the last entry's number; the first is 1
        self._waiting: OrderedDict[int, Entry[T, R]] = OrderedDict()
        self._open: dict[int, None] = {}  # the entries that are not resolved, the oldest first
        self._inside: set[int] = set()  # callers' threads that run callbacks
        self._in_flight = 0
        self._bytes = 0
        self._stored_bytes = 0
        self._counts = {"stored": 0, "dropped": 0, "cancelled": 0, "failed": 0}

    # ---- for callers that hold the lock

    def add(self, entry: Entry[T, R]) -> None:
        self._wake_worker()
        # No calls from here on: no handler comes between these.
        self.last = entry.number = self.last + 1
        self._open[entry.number] = None
        self._waiting[entry.number] = entry
        self._bytes += entry.nbytes

    def over(self, max_bytes: int, newest: Entry[T, R]) -> Sequence[int]:
        """The entries that have to go, the oldest first."""
        numbers: list[int] = []
        excess = self._bytes - max_bytes
        for entry in list(self._waiting.values()) if excess > 0 else []:
            if entry.droppable and entry is not newest and excess > 0:
                numbers.append(entry.number)
                excess -= entry.nbytes
        return numbers

    def take(self, numbers: Iterable[int], reason: Reason, taken: deque[Entry[T, R]]) -> None:
        """Take out those that still wait, and count them. They are to be settled, without the lock."""
        for number in numbers:
            if number in self._waiting:  # no calls in here either
                entry = self._waiting[number]
                del self._waiting[number]
                self._bytes -= entry.nbytes
                self._counts[reason] += 1
                taken += (entry,)

    def close(self) -> None:
        self._wake_worker()
        self.closed = True

    def _wake_worker(self) -> None:
        if self._wake.empty():
            self._wake.put(None)

    # ---- for everybody

    def labels(self) -> list[tuple[int, object]]:
        """Number and label of each entry that waits, the oldest first."""
        with self.lock:
            return [(entry.number, entry.label) for entry in list(self._waiting.values())]

    def stats(self) -> SpillStats:
        with self.lock:
            return SpillStats(
                pending_bytes=self._bytes,
                pending_count=len(self._waiting) + self._in_flight,
                in_flight=self._in_flight,
                stored_bytes=self._stored_bytes,
                **self._counts,
            )

    def wait(self, last: int, timeout: float | None) -> bool:
        """Wait until entry `last` and all before it are resolved. Not in a callback, which would wait for itself."""
        if threading.get_ident() in self._inside or threading.current_thread() is self.worker:
            timeout = 0.0
        with self.lock:
            return self._resolved.wait_for(lambda: next(iter(self._open), last + 1) > last, bounded(timeout))

    def settle(self, entries: deque[Entry[T, R]], outcome: Outcome[R]) -> None:
        """Finish entries that were taken out and counted: all of them, then raise what interrupted that."""
        interruption: BaseException | None = None
        while entries:
            try:
                self._finish_all(entries, outcome)
            except BaseException as error:
                interruption = error if interruption is None else interruption
        try:
            if interruption is not None:
                raise interruption
        finally:
            del interruption  # an error whose own traceback leads to it would outlive its handling

    def _finish_all(self, entries: deque[Entry[T, R]], outcome: Outcome[R]) -> None:
        """From the first entry on, until one is interrupted."""
        this = threading.get_ident()
        outermost = this not in self._inside
        try:
            self._inside.add(this)
            while entries:
                self._finish(entries[0], outcome)
                del entries[0]
        finally:
            if outermost:
                self._inside.discard(this)

    def _finish(self, entry: Entry[T, R], outcome: Outcome[R]) -> None:
        entry.finish(outcome)
        with self.lock:
            self._open.pop(entry.number, None)
            self._resolved.notify_all()

    # ---- for the worker

    def next_entry(self) -> Entry[T, R] | None:
        """Wait for the oldest entry, and put it in flight; None if the thread is to end."""
        while True:
            with self.lock:
                if self.worker is not threading.current_thread():
                    return None
                if self._waiting:
                    self._in_flight = 1
                    return self._waiting.popitem(last=False)[1]
                if self.closed:
                    return None
            self._wake.get()

    def land(self, entry: Entry[T, R], outcome: Outcome[R]) -> None:
        """Count the entry that was in flight. It is to be settled."""
        with self.lock:
            self._in_flight = 0
            self._bytes -= entry.nbytes
            self._counts[outcome.reason or "stored"] += 1
            if outcome.stored:
                self._stored_bytes += entry.nbytes


def bounded(timeout: float | None) -> float | None:
    """None for more than a thread can wait."""
    return timeout if timeout is None or timeout < threading.TIMEOUT_MAX else None


def report(error: BaseException) -> None:
    """Log that a callback failed: as text, since who keeps a record with a traceback keeps what its frames know."""
    with suppress(Exception):  # what handles the record must not end the thread
        _log.error("a callback of the queue failed\n%s", _as_text(error))


def _as_text(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # an error that cannot be printed must not end the thread either
        return type(error).__name__


def _drop_tracebacks(error: BaseException) -> None:
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        BaseException.with_traceback(one, None)  # an error class may forbid to set its attributes
        left += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
