"""The queue lives through anything, beside a list that says what must become of each item.

Work waits until the machine says how it ends, so that what is in flight is never a matter of time.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blockstore import InvalidInput, Outcome, SpillQueue, SpillStats
from spill.kit import PATIENCE_S, Desk, Pinned, becomes, is_dead

CAP = 10
ERRORS: dict[str, Callable[[], BaseException]] = {
    "fails": lambda: ValueError("no"),
    "is interrupted": KeyboardInterrupt,
    "leaves": SystemExit,
}
LABELS = st.sampled_from(["a", "b", None])


@dataclass
class Known:
    """An item as the model knows it. `state`: waiting, in flight, stored, dropped, cancelled or failed."""

    name: str
    nbytes: int
    label: str | None
    droppable: bool
    state: str = "waiting"
    releases: list[int] = field(default_factory=list)
    future: "Future[Outcome[str]]" = field(default_factory=Future)
    item: "weakref.ref[Pinned] | None" = None

    @property
    def pends(self) -> bool:
        return self.state in ("waiting", "in flight")


@dataclass
class Drain:
    thread: threading.Thread
    of: list[Known]
    answers: list[bool]


class Model:
    """What the queue promises, in the plainest way."""

    def __init__(self) -> None:
        self.items: list[Known] = []

    def those(self, *states: str) -> list[Known]:
        return [known for known in self.items if known.state in states]

    @property
    def pending(self) -> list[Known]:
        return self.those("waiting", "in flight")

    def enqueue(self, new: Known) -> None:
        self.items.append(new)
        while sum(known.nbytes for known in self.pending) > CAP:
            victims = [known for known in self.those("waiting") if known.droppable and known is not new]
            if not victims:
                break
            victims[0].state = "dropped"

    def begin(self) -> Known | None:
        """The item whose work begins now, if any."""
        if self.those("in flight") or not self.those("waiting"):
            return None
        first = self.those("waiting")[0]
        first.state = "in flight"
        return first

    def stats(self) -> SpillStats:
        return SpillStats(
            pending_bytes=sum(known.nbytes for known in self.pending),
            pending_count=len(self.pending),
            in_flight=len(self.those("in flight")),
            stored_bytes=sum(known.nbytes for known in self.those("stored")),
            stored=len(self.those("stored")),
            dropped=len(self.those("dropped")),
            cancelled=len(self.those("cancelled")),
            failed=len(self.those("failed")),
        )


class SpillMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.queue = SpillQueue(self.desk.work, max_bytes=CAP)
        self.model = Model()
        self.drains: list[Drain] = []
        self.closed = False

    def go_on(self) -> None:
        """The worker begins the item whose turn it is, and no other."""
        begun = self.model.begin()
        if begun is not None:
            assert self.desk.await_start() == begun.name

    # ---- what callers do

    @precondition(lambda self: not self.closed)
    @rule(nbytes=st.integers(0, 6), label=LABELS, droppable=st.booleans(), releases=st.booleans(), throws=st.booleans())
    def enqueue(self, nbytes: int, label: str | None, droppable: bool, releases: bool, throws: bool) -> None:
        known = Known(f"item {len(self.model.items)}", nbytes, label, droppable)

        def release() -> None:
            known.releases.append(threading.get_ident())
            assert not throws

        item = Pinned(known.name)
        known.item = weakref.ref(item)
        known.future = self.queue.enqueue(
            item, nbytes, label=label, droppable=droppable, release=release if releases else None
        )
        if not releases:
            known.future.add_done_callback(lambda future: release())
        del item
        self.model.enqueue(known)
        self.go_on()

    @rule(labels=st.sets(LABELS, min_size=1))
    def cancel(self, labels: set[str | None]) -> None:
        chosen = [known for known in self.model.those("waiting") if known.label in labels]
        assert self.queue.cancel_where(labels.__contains__) == len(chosen)
        for known in chosen:
            known.state = "cancelled"

    @rule()
    def cancel_through_the_futures(self) -> None:
        assert not any(known.future.cancel() for known in self.model.items)

    @precondition(lambda self: self.model.those("in flight"))
    @rule(how=st.sampled_from(["succeeds", *ERRORS]))
    def finish(self, how: str) -> None:
        [known] = self.model.those("in flight")
        error = ERRORS[how]() if how in ERRORS else None
        self.desk.finish(error)
        known.state = "failed" if error else "stored"
        outcome = known.future.result(PATIENCE_S)
        assert outcome.error is error
        assert outcome.result == (None if error else known.name.upper())
        self.go_on()

    @rule()
    def drain(self) -> None:
        assert self.queue.drain(0 if self.model.pending else PATIENCE_S) == (not self.model.pending)

    @precondition(lambda self: len(self.drains) < 3)
    @rule()
    def begin_to_drain(self) -> None:
        answers: list[bool] = []
        waits = threading.Event()
        pending = self.queue._pending
        real = pending.wait

        def wait(last: int, timeout: float | None) -> bool:
            waits.set()  # what is enqueued from now on is none of its business
            return real(last, timeout)

        pending.wait = wait  # type: ignore[method-assign]  # only to see when the drain has begun
        thread = threading.Thread(target=lambda: answers.append(self.queue.drain(PATIENCE_S)), daemon=True)
        thread.start()
        assert waits.wait(PATIENCE_S)
        del pending.wait
        self.drains.append(Drain(thread, self.model.pending, answers))

    @rule(drain=st.booleans(), chance=st.integers(0, 9))
    def close(self, drain: bool, chance: int) -> None:
        if chance and not self.closed:  # seldom: little happens afterwards
            return
        if not drain:
            for known in self.model.those("waiting"):
                known.state = "cancelled"
        assert self.queue.close(0 if self.model.pending else PATIENCE_S, drain=drain) == (not self.model.pending)
        self.closed = True

    @precondition(lambda self: self.closed)
    @rule()
    def enqueue_too_late(self) -> None:
        releases: list[int] = []
        with pytest.raises(InvalidInput, match="closed"):
            self.queue.enqueue(Pinned("late"), 1, release=lambda: releases.append(1))
        assert releases == []

    # ---- what must hold

    @invariant()
    def the_numbers_are_exact(self) -> None:
        assert self.queue.stats == self.model.stats()

    @invariant()
    def one_is_in_flight_at_most(self) -> None:
        assert self.desk.most_at_once <= 1

    @invariant()
    def only_what_pends_is_pinned(self) -> None:
        for known in self.model.items:
            assert known.item is not None
            assert known.future.done() != known.pends
            assert is_dead(known.item) != known.pends
            if known.pends:
                assert known.releases == []
            else:
                assert known.future.result().reason == (None if known.state == "stored" else known.state)

    @invariant()
    def each_is_released_once(self) -> None:
        """A done-callback, which stands for release in some, may follow the future by a moment."""
        for known in self.model.items:
            if not known.pends:
                assert becomes(lambda: known.releases != [])  # noqa: B023  # called before the next one comes
                assert len(known.releases) == 1

    @invariant()
    def drains_end_with_what_was_there_before(self) -> None:
        for drain in list(self.drains):
            if any(known.pends for known in drain.of):
                assert drain.answers == []
            else:
                drain.thread.join(PATIENCE_S)
                assert drain.answers == [True]
                self.drains.remove(drain)

    def teardown(self) -> None:
        while self.model.those("in flight"):
            self.finish("succeeds")
        assert self.queue.close(PATIENCE_S)
        self.drains_end_with_what_was_there_before()
        self.the_numbers_are_exact()
        assert self.desk.is_idle()


TestSpillMachine: Any = SpillMachine.TestCase
