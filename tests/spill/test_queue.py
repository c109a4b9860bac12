"""The write-behind queue: what becomes of items, what it keeps of them, and what calls may come from where."""

import gc
import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from blockstore import BlockstoreError, InvalidInput, Outcome, SpillQueue, SpillStats
from spill.kit import PATIENCE_S, Desk, Pinned, becomes, is_dead

ERRORS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit]
NOTHING = SpillStats(
    pending_bytes=0, pending_count=0, in_flight=0, stored_bytes=0, stored=0, dropped=0, cancelled=0, failed=0
)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def queue(desk: Desk) -> Iterator[SpillQueue[Pinned, str]]:
    """One with room for ten bytes, whose item in flight, if any is left, is finished in the end."""
    with SpillQueue(desk.work, max_bytes=10) as made:
        yield made
        made.cancel_where(lambda label: True)
        desk.finish()


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "blockstore-spill"]


def reason(future: "Future[Outcome[Any]]") -> str | None:
    return future.result(PATIENCE_S).reason


# ---- outcomes


def test_what_work_returns_is_in_the_outcome(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    assert queue.stats == NOTHING
    future = queue.enqueue(Pinned("a"), 3)
    desk.finish()
    assert future.result(PATIENCE_S) == Outcome("A")
    assert future.result().stored
    assert (queue.stats.stored, queue.stats.stored_bytes, queue.stats.pending_bytes) == (1, 3, 0)


def test_the_thread_starts_with_the_first_item_and_ends_with_the_queue() -> None:
    before = ours()
    with SpillQueue(str, max_bytes=1) as queue:
        assert ours() == before
        queue.enqueue(1, 1).result(PATIENCE_S)
        queue.enqueue(2, 1).result(PATIENCE_S)
        [thread] = set(ours()) - set(before)
        assert thread.daemon
    assert ours() == before


@pytest.mark.parametrize("kind", ERRORS)
def test_whatever_work_raises_fails_its_item_alone(
    queue: SpillQueue[Pinned, str], desk: Desk, kind: type[BaseException]
) -> None:
    error = kind("no")
    first, second = queue.enqueue(Pinned("a"), 3), queue.enqueue(Pinned("b"), 4)
    desk.finish(error)
    desk.finish()
    outcome = first.result(PATIENCE_S)
    assert (outcome.stored, outcome.result, outcome.reason) == (False, None, "failed")
    assert outcome.error is error
    assert second.result(PATIENCE_S) == Outcome("B")
    assert (queue.stats.failed, queue.stats.stored, queue.stats.stored_bytes) == (1, 1, 4)


def test_an_outcome_says_where_its_error_was_raised_and_why(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    future = queue.enqueue(Pinned("a"), 3)
    desk.finish(ValueError("no"))
    outcome = future.result(PATIENCE_S)
    assert "in work\n" in outcome.traceback
    assert outcome.traceback.endswith("\nValueError: no\n")
    assert outcome.error is not None
    assert outcome.error.__traceback__ is None


def test_an_error_that_cannot_be_printed_nor_changed_is_one_like_others(
    queue: SpillQueue[Pinned, str], desk: Desk
) -> None:
    class Unprintable(Exception):
        @property
        def __notes__(self) -> list[str]:
            raise OSError

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    first, second = queue.enqueue(Pinned("a"), 1), queue.enqueue(Pinned("b"), 1)
    desk.finish(Unprintable())
    desk.finish()
    assert first.result(PATIENCE_S).traceback == "Unprintable"
    assert second.result(PATIENCE_S).stored


def test_the_cap_drops_the_oldest_that_may_go(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    in_flight = queue.enqueue(Pinned("in flight"), 4)
    assert desk.await_start() == "in flight"
    kept = queue.enqueue(Pinned("kept"), 3, droppable=False)
    older, newer = queue.enqueue(Pinned("older"), 2), queue.enqueue(Pinned("newer"), 1)
    assert queue.stats.dropped == 0
    last = queue.enqueue(Pinned("last"), 1)
    assert [future.done() for future in (in_flight, kept, older, newer, last)] == [False, False, True, False, False]
    assert older.result() == Outcome(reason="dropped")
    big = queue.enqueue(Pinned("big"), 20, droppable=False)
    assert [reason(future) for future in (newer, last)] == ["dropped", "dropped"]
    assert (queue.stats.pending_bytes, queue.stats.pending_count) == (27, 3)
    for _ in range(3):
        desk.finish()
    assert [future.result(PATIENCE_S).stored for future in (in_flight, kept, big)] == [True, True, True]


def test_a_cap_of_nothing_keeps_what_is_newest(desk: Desk) -> None:
    with SpillQueue(desk.work, max_bytes=0) as queue:
        futures = [queue.enqueue(Pinned(name), 1) for name in "a"]
        desk.await_start()
        futures += [queue.enqueue(Pinned(name), 1) for name in "bcd"]
        desk.finish()
        desk.finish()
        assert [reason(future) for future in futures] == [None, "dropped", "dropped", None]


def test_cancelling_leaves_what_is_in_flight(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    futures = [queue.enqueue(Pinned("a"), 1, label="x")]
    desk.await_start()
    futures += [queue.enqueue(Pinned(name), 1, label=label) for name, label in (("b", "x"), ("c", "y"), ("d", None))]
    assert queue.cancel_where(lambda label: label != "y") == 2
    desk.finish()
    desk.finish()
    assert [reason(future) for future in futures] == [None, "cancelled", None, "cancelled"]


def test_many_may_be_cancelled_at_once(desk: Desk) -> None:
    with SpillQueue(desk.work, max_bytes=0) as queue:
        queue.enqueue(Pinned("a"), 0)
        desk.await_start()
        futures = [queue.enqueue(Pinned("b"), 0) for _ in range(3000)]
        assert queue.cancel_where(lambda label: True) == 3000
        assert {reason(future) for future in futures} == {"cancelled"}
        assert queue._pending._wake.qsize() <= 1
        desk.finish()


@pytest.mark.parametrize("found", [-1, 1.5, True, None, "1"])
def test_sizes_are_numbers_of_bytes(queue: SpillQueue[Pinned, str], found: Any) -> None:
    with pytest.raises(InvalidInput, match="number of bytes") as caught:
        queue.enqueue(Pinned("a"), found)
    assert (caught.value.field, caught.value.found) == ("nbytes", found)
    with pytest.raises(InvalidInput, match="number of bytes"):
        SpillQueue(str, max_bytes=found)
    assert queue.stats == NOTHING


def test_a_future_is_not_for_others_to_resolve(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    first, second = queue.enqueue(Pinned("a"), 1), queue.enqueue(Pinned("b"), 1)
    assert not first.cancel()
    second.set_result(Outcome("mine"))
    desk.finish()
    desk.finish()
    assert queue.drain(PATIENCE_S)
    assert [first.result(), second.result()] == [Outcome("A"), Outcome("mine")]
    assert queue.stats.stored == 2


# ---- what is pinned


def raise_with_the_item(item: Pinned) -> None:
    """Every frame of four tracebacks knows the item: of the error, of what it groups, its cause, and its context."""

    def raised(kind: type[Exception]) -> Exception:
        try:
            raise kind(item.name)
        except Exception as error:
            return error

    try:
        raise raised(KeyError)
    except KeyError:
        raise ExceptionGroup("several", [raised(ValueError)]) from raised(TypeError)


def return_nothing(item: Pinned) -> None:
    pass


@pytest.mark.parametrize("work", [raise_with_the_item, return_nothing])
def test_nothing_of_an_item_is_left_when_its_future_is_resolved(work: Callable[[Pinned], None]) -> None:
    """Without a next item, without a garbage collection, and while its outcome is kept."""
    gc.disable()
    try:
        with SpillQueue(work, max_bytes=1) as queue:
            item, label, arena = Pinned("item"), Pinned("label"), Pinned("arena")
            pinned = [weakref.ref(one) for one in (item, label, arena)]
            future = queue.enqueue(item, 1, label=label, release=lambda kept=arena: None)
            del item, label, arena
            outcome = future.result(PATIENCE_S)
            assert all(map(is_dead, pinned))
            unresolved = weakref.ref(future)
            del future
            assert becomes(lambda: is_dead(unresolved))
            assert outcome.reason == ("failed" if work is raise_with_the_item else None)
    finally:
        gc.enable()


def test_a_result_is_for_those_alone_who_hold_its_future() -> None:
    kept: list[weakref.ref[Pinned]] = []

    def work(item: str) -> Pinned:
        result = Pinned(item)
        kept.append(weakref.ref(result))
        return result

    with SpillQueue(work, max_bytes=1) as queue:
        queue.enqueue("a", 1)
        assert queue.drain(PATIENCE_S)
        assert becomes(lambda: is_dead(kept[0]))


def test_work_may_let_go_of_its_item_before_it_ends() -> None:
    def work(item: Pinned) -> bool:
        reference = weakref.ref(item)
        del item
        return is_dead(reference)

    with SpillQueue(work, max_bytes=1) as queue:
        future = queue.enqueue(Pinned("item"), 1)
        assert future.result(PATIENCE_S) == Outcome(True)


def test_an_interruption_dies_when_it_was_handled(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    class Interruption(BaseException):
        pass

    def release() -> None:
        raise Interruption

    queue.enqueue(Pinned("a"), 1)
    desk.await_start()
    queue.enqueue(Pinned("b"), 1, release=release)
    gc.disable()
    try:
        try:
            queue.cancel_where(lambda label: True)
        except Interruption as error:
            kept = weakref.ref(error)
        assert is_dead(kept)
    finally:
        gc.enable()
        desk.finish()


def fail_too(future: object) -> None:
    raise ValueError("a done-callback")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", ["dropped", "cancelled", "closed"])
def test_what_never_came_to_work_is_let_go_of_at_once(desk: Desk, how: str, fails: bool) -> None:
    """Even if its callbacks raise, and the log keeps their tracebacks: neither of it nor of whatever displaced it."""
    with SpillQueue(desk.work, max_bytes=1) as queue:
        queue.enqueue(Pinned("first"), 1)
        desk.await_start()
        item, released = Pinned("item"), []

        def release(arena: Pinned) -> None:
            released.append(arena.name)
            assert not fails

        arena, label = Pinned("arena"), Pinned("label")
        pinned = [weakref.ref(item), weakref.ref(arena), weakref.ref(label)]
        future = queue.enqueue(item, 0, label=label, release=lambda kept=arena: release(kept))
        if fails:
            future.add_done_callback(fail_too)
        del item, arena, label
        act: dict[str, Callable[[], object]] = {
            "dropped": lambda: pinned.append(last(queue)),
            "cancelled": lambda: queue.cancel_where(lambda label: True),
            "closed": lambda: queue.close(0, drain=False),
        }
        act[how]()
        assert released == ["arena"]
        assert future.result(0).reason == ("dropped" if how == "dropped" else "cancelled")
        assert all(map(is_dead, pinned[:3]))
        desk.finish()
        desk.finish()
        assert queue.drain(PATIENCE_S)
        assert all(map(is_dead, pinned))


def last(queue: SpillQueue[Pinned, str]) -> "weakref.ref[Pinned]":
    """Enqueue one more, of which no frame here keeps anything."""
    box = [Pinned("last")]
    reference = weakref.ref(box[0])
    queue.enqueue(box.pop(), 1)
    return reference


# ---- callbacks that raise


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", ["release", "done-callback"])
def test_a_callback_that_raises_stops_nothing(
    queue: SpillQueue[Pinned, str], desk: Desk, caplog: pytest.LogCaptureFixture, kind: type[BaseException], place: str
) -> None:
    def callback(future: object = None) -> None:
        raise kind("no")

    first = queue.enqueue(Pinned("a"), 3, release=callback if place == "release" else None)
    if place == "done-callback":
        first.add_done_callback(callback)
    second = queue.enqueue(Pinned("b"), 4)
    desk.finish()
    desk.finish()
    assert [first.result(PATIENCE_S), second.result(PATIENCE_S)] == [Outcome("A"), Outcome("B")]
    assert queue.drain(PATIENCE_S)
    assert (queue.stats.stored, queue.stats.pending_bytes) == (2, 0)
    assert len(caplog.records) == 1
    assert caplog.text.count("in callback\n") == 1
    assert caplog.text.strip().endswith(f"{kind.__name__}: no")


def test_a_log_that_fails_stops_nothing(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise OSError("the log is full")

    broken, loggers = Broken(), [logging.getLogger(name) for name in ("blockstore.pending", "concurrent.futures")]
    for logger in loggers:
        logger.addFilter(broken)
    try:
        futures = [queue.enqueue(Pinned("a"), 1, release=lambda: 1 // 0)]
        desk.await_start()
        futures += [queue.enqueue(Pinned(name), 1, label=name, release=lambda: 1 // 0) for name in "bc"]
        for future in futures:
            future.add_done_callback(fail_too)
        assert queue.cancel_where(lambda label: label == "b") == 1
        desk.finish()
        desk.finish()
        assert [future.result(PATIENCE_S).result for future in futures] == ["A", None, "C"]
    finally:
        for logger in loggers:
            logger.removeFilter(broken)


def test_an_interruption_reaches_the_caller_when_all_is_let_go_of(
    queue: SpillQueue[Pinned, str], desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    released = []

    def release(number: int) -> None:
        released.append(number)
        raise (KeyboardInterrupt, ValueError, SystemExit)[number]

    queue.enqueue(Pinned("a"), 1)
    desk.await_start()
    futures = [queue.enqueue(Pinned("b"), 3, release=lambda number=number: release(number)) for number in range(3)]
    with pytest.raises(KeyboardInterrupt) as caught:
        queue.enqueue(Pinned("c"), 10)
    assert released == [0, 1, 2]
    assert [reason(future) for future in futures] == ["dropped"] * 3
    kept = [weakref.ref(future) for future in futures]
    del futures
    assert all(map(is_dead, kept)), caught.traceback
    assert (queue.stats.pending_bytes, queue.stats.pending_count) == (11, 2)
    assert len(caplog.records) == 1
    desk.finish()
    desk.finish()
    assert queue.drain(PATIENCE_S)
    assert queue.stats.stored == 2


def test_a_predicate_that_raises_cancels_nothing(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    queue.enqueue(Pinned("a"), 1)
    desk.await_start()
    for label in (2, 0):
        queue.enqueue(Pinned("b"), 1, label=label)
    with pytest.raises(ZeroDivisionError):
        queue.cancel_where(lambda label: 1 // label == 0)
    assert (queue.stats.cancelled, queue.stats.pending_count) == (0, 3)
    desk.finish()
    desk.finish()


# ---- calls from within


def test_callbacks_and_work_may_use_the_queue() -> None:
    seen: list[SpillStats] = []
    later: list[Future[Outcome[object]]] = []

    def work(item: str) -> None:
        later.append(queue.enqueue("from work", 1, label="x") if item == "a" else future)
        seen.append(queue.stats)

    def use(future: object = None) -> None:
        later.append(queue.enqueue("from a callback", 1, label="y"))
        queue.cancel_where(lambda label: label == "y")
        seen.append(queue.stats)

    with SpillQueue(work, max_bytes=5) as queue:
        future = queue.enqueue("a", 5, release=use)
        future.add_done_callback(use)
        assert becomes(lambda: len(later) == 4)
        assert queue.drain(PATIENCE_S)
        assert [reason(one) for one in (future, *later[:3])].count("cancelled") == 2
        assert len(seen) == 4
        assert queue.stats.pending_count == 0


def test_a_predicate_may_use_the_queue_whose_worker_goes_on(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    futures = [queue.enqueue(Pinned("a"), 1)]
    desk.await_start()
    futures += [queue.enqueue(Pinned(name), 1) for name in "bc"]

    def all_but_what_begins_meanwhile(label: object) -> bool:
        if not futures[0].done():
            desk.finish()
            assert desk.await_start() == "b"
        assert queue.stats.pending_count == 2
        return True

    assert queue.cancel_where(all_but_what_begins_meanwhile) == 1
    desk.finish()
    assert [reason(future) for future in futures] == [None, None, "cancelled"]


def test_a_callback_of_the_caller_does_not_wait_for_itself(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    """Nor if it had other callbacks called before."""
    answers: list[object] = []

    def release() -> None:
        answers.append(queue.drain())
        answers.append(queue.cancel_where(lambda label: True))
        began = time.monotonic()
        answers.append(queue.drain(PATIENCE_S))
        answers.append(queue.close(PATIENCE_S))
        answers.append(time.monotonic() - began < PATIENCE_S / 2)

    queue.enqueue(Pinned("a"), 1)
    desk.await_start()
    queue.enqueue(Pinned("b"), 1, label="b", release=release)
    queue.enqueue(Pinned("c"), 1)
    queue.cancel_where(lambda label: label == "b")
    assert answers == [False, 1, False, False, True]
    assert not queue.drain(0)
    desk.finish()
    assert queue.drain()
    assert queue.close()


def test_work_does_not_wait_for_itself() -> None:
    answers: list[bool] = []

    def work(item: str) -> None:
        answers.extend([queue.drain(), queue.close(), queue.close(drain=False)])

    queue = SpillQueue(work, max_bytes=1)
    future = queue.enqueue("a", 1)
    future.add_done_callback(lambda future: answers.append(queue.close()))
    assert future.result(PATIENCE_S).error is None
    assert queue.close(PATIENCE_S)
    assert answers == [False] * 4


def test_a_finalizer_on_the_queues_thread_does_not_wait_for_itself() -> None:
    answers: list[bool] = []

    class Result:
        def __del__(self) -> None:
            answers.append(queue.close())

    queue = SpillQueue(lambda item: Result(), max_bytes=1)
    queue.enqueue("a", 1)
    assert becomes(lambda: answers == [False])
    assert queue.close(PATIENCE_S)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers")
def test_a_signal_handler_may_use_the_queue_in_the_middle_of_a_call() -> None:
    calls = 0

    def handle(number: int, frame: object) -> None:
        nonlocal calls
        calls += 1
        queue.enqueue("handler", 1)
        queue.cancel_where(lambda label: False)

    enqueued = 0
    with SpillQueue(str, max_bytes=20) as queue:
        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                queue.enqueue("loop", 1)
                enqueued += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert queue.drain(PATIENCE_S)
        stats = queue.stats
    assert calls > 0
    assert stats.stored + stats.dropped == enqueued + calls
    assert (stats.pending_bytes, stats.stored_bytes) == (0, stats.stored)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers")
def test_what_signal_handlers_raise_leaves_the_numbers_true_and_the_worker_awake() -> None:
    class Interruption(BaseException):
        pass

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is SpillQueue.enqueue.__code__:
                raise Interruption
            frame = frame.f_back

    interruptions = 0
    queue = SpillQueue(str, max_bytes=20)
    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            try:
                queue.enqueue("loop", 1)
            except Interruption:
                interruptions += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interruptions > 0
    assert queue.enqueue("after", 1).result(PATIENCE_S) == Outcome("after")
    stats = queue.stats
    assert (stats.pending_bytes, stats.pending_count, stats.stored_bytes) == (0, 0, stats.stored)
    queue.close(0)
    worker = queue._pending.worker
    assert worker is not None
    assert becomes(lambda: not worker.is_alive())


def test_an_interruption_between_two_items_loses_neither(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    queue.enqueue(Pinned("a"), 1)
    desk.await_start()
    futures = [queue.enqueue(Pinned("b"), 1) for _ in range(3)]
    told = [None, KeyboardInterrupt, KeyboardInterrupt, None, None]
    with mock.patch.object(queue._pending._resolved, "notify_all", side_effect=told), pytest.raises(KeyboardInterrupt):
        queue.cancel_where(lambda label: True)
    assert [reason(future) for future in futures] == ["cancelled"] * 3
    desk.finish()
    assert queue.drain(PATIENCE_S)


# ---- drain


def test_drain_waits_for_what_came_before_and_for_nothing_else(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    assert queue.drain(0)
    futures = [queue.enqueue(Pinned("a"), 1)]
    desk.await_start()
    futures.append(queue.enqueue(Pinned("b"), 1, label="b"))
    assert not queue.drain(0)
    assert not queue.drain(-1)
    began = time.monotonic()
    assert not queue.drain(0.05)
    assert time.monotonic() - began >= 0.05
    answers: list[bool] = []
    drains = [
        threading.Thread(target=lambda timeout=timeout: answers.append(queue.drain(timeout)), daemon=True)
        for timeout in (None, float("inf"), PATIENCE_S)
    ]
    for drain in drains:
        drain.start()
    assert becomes(lambda: len(queue._pending._resolved._waiters) == 3)  # type: ignore[attr-defined]  # of a Condition
    queue.enqueue(Pinned("later"), 1)
    queue.cancel_where(lambda label: label == "b")
    assert answers == []
    desk.finish()
    for drain in drains:
        drain.join(PATIENCE_S)
    assert answers == [True] * 3
    assert desk.await_start() == "later"
    assert not queue.drain(0)
    desk.finish()


# ---- close


def test_a_queue_that_was_never_used_closes_at_once() -> None:
    queue = SpillQueue(str, max_bytes=1)
    assert queue.close(0)
    assert queue.close()
    with pytest.raises(BlockstoreError, match="the queue is closed"):
        queue.enqueue("a", 1)
    assert queue.stats == NOTHING


def test_close_finishes_what_waits(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    futures = [queue.enqueue(Pinned(name), 1) for name in "ab"]
    desk.await_start()
    assert not queue.close(0)
    assert not queue.close(0.01)
    with pytest.raises(InvalidInput, match="closed"):
        queue.enqueue(Pinned("c"), 1, release=lambda: pytest.fail("it was not taken"))
    desk.finish()
    desk.finish()
    assert queue.close(float("inf"))
    assert queue.close()
    assert [reason(future) for future in futures] == [None, None]


def test_close_may_cancel_what_waits_at_once_or_after_all(queue: SpillQueue[Pinned, str], desk: Desk) -> None:
    futures = [queue.enqueue(Pinned(name), 1, droppable=False) for name in "abc"]
    desk.await_start()
    assert not queue.close(0)
    assert not queue.close(0, drain=False)
    assert [future.done() for future in futures] == [False, True, True]
    desk.finish()
    assert queue.close(PATIENCE_S, drain=False)
    assert [reason(future) for future in futures] == [None, "cancelled", "cancelled"]


# ---- threads


def test_an_item_is_not_taken_where_no_thread_can_be_started() -> None:
    with SpillQueue(str, max_bytes=1) as queue:
        with (
            mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")),
            pytest.raises(RuntimeError, match="start"),
        ):
            queue.enqueue("a", 1, release=lambda: pytest.fail("it was not taken"))
        assert queue.stats == NOTHING
        assert queue.enqueue("b", 1).result(PATIENCE_S) == Outcome("b")


def test_a_thread_whose_start_was_interrupted_works_on_nothing(desk: Desk) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        real(thread)
        raise KeyboardInterrupt

    before = ours()
    with SpillQueue(desk.work, max_bytes=9) as queue:
        with mock.patch.object(threading.Thread, "start", start), pytest.raises(KeyboardInterrupt):
            queue.enqueue(Pinned("a"), 1)
        assert becomes(lambda: ours() == before)
        futures = [queue.enqueue(Pinned(name), 1) for name in "bc"]
        assert desk.await_start() == "b"
        assert desk.is_idle()
        desk.finish()
        desk.finish()
        assert [reason(future) for future in futures] == [None, None]


def test_many_threads_may_use_one_queue() -> None:
    """Each item is let go of once and counted once, and those of one thread are worked on in their order."""
    order: list[tuple[int, int]] = []
    released: list[tuple[int, int]] = []
    futures: list[tuple[int, Future[Outcome[None]]]] = []
    at_once: list[int] = []

    def work(item: tuple[int, int]) -> None:
        at_once.append(1)
        assert len(at_once) == 1
        order.append(item)
        time.sleep(0)
        at_once.pop()

    def produce(thread: int) -> None:
        for number in range(300):
            item = (thread, number)
            future = queue.enqueue(
                item,
                number % 7,
                label=number % 3,
                droppable=number % 5 > 0,
                release=lambda item=item: released.append(item),
            )
            futures.append((number % 7, future))
            if number % 50 == 49:
                queue.cancel_where(lambda label: label == 1)
            if number % 100 == 99:
                assert queue.drain(PATIENCE_S)

    with SpillQueue(work, max_bytes=30) as queue:
        threads = [threading.Thread(target=produce, args=(thread,), daemon=True) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert queue.drain(PATIENCE_S)
        stats = queue.stats
    assert sorted(released) == [(thread, number) for thread in range(4) for number in range(300)]
    for thread in range(4):
        own = [number for other, number in order if other == thread]
        assert own == sorted(own)
    reasons = [reason(future) for _, future in futures]
    assert len(reasons) == 1200
    counted = [reasons.count(one) for one in (None, "dropped", "cancelled", "failed")]
    assert [stats.stored, stats.dropped, stats.cancelled, stats.failed] == [*counted[:3], 0] == counted
    assert stats.stored_bytes == sum(nbytes for nbytes, future in futures if future.result().stored)
    assert (stats.pending_bytes, stats.pending_count, stats.in_flight) == (0, 0, 0)
