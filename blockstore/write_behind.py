"""Prompt caches on their way to a store: prepared where they live, committed behind their owner's back.

What fails is tried again; what a longer snapshot stands for is not written, or goes from the store.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from kvcodecs import geometry

from . import history
from .errors import BlockstoreError, EntryGone, NotStored
from .failures import Failures
from .identity import Identity
from .listing import Match
from .packing import Prepared
from .pending import Outcome
from .saving import Saved
from .spill import SpillQueue
from .store import Store

# How often one snapshot is tried before it counts as lost.
_ATTEMPTS: Final = 3
# How many lost snapshots flush() can name, for a store that fails for days.
_MOST_NAMED: Final = 20


class Written(NamedTuple):
    """What became of snapshots, since the start; the first two are of this moment. Bytes are those that are pinned.

    pending: what waits to be written, for the first time or, after a failure, once more.
    """

    pending_count: int
    pending_bytes: int
    stored: int
    dropped: int
    failed: int


@dataclass(frozen=True)
class _Label:
    """What a waiting snapshot is of."""

    identity: Identity
    packed: bytes

    @property
    def tokens(self) -> "np.ndarray[Any, np.dtype[np.uint32]]":
        return np.frombuffer(self.packed, "<u4")

    def begins(self, other: "_Label") -> bool:
        return self.identity == other.identity and other.packed.startswith(self.packed)


@dataclass(eq=False)
class _Item:
    """A snapshot on its way to the store.

    caches: where it was taken, should that have to be done once more. Weak, since a snapshot of a few new rows must not
    keep all others: who takes them out of memory wants it back.
    """

    label: _Label
    prepared: Prepared
    caches: Sequence[Callable[[], Any]]
    shortens: bool
    attempts: int = 1
    is_outdated: bool = False

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.prepared.views.values())

    def stands_for(self, label: _Label) -> bool:
        """Whether what `label` names can be served from this one."""
        return label == self.label or (self.shortens and label.begins(self.label))

    def take_again(self, store: Store) -> None:
        """Make the snapshot of everything. Raises as Store.prepare(), and EntryGone where the caches went."""
        caches = [cache() for cache in self.caches]
        if any(cache is None for cache in caches):
            raise EntryGone("what the snapshot continues is gone, and its caches went from memory")
        history.forget(caches)
        self.prepared = store.prepare(self.label.tokens, caches, self.label.identity)
        self.is_outdated = False


class WriteBehind:
    """Writes prompt caches to `store`. put(), retry() and flush() belong to the caches' thread, the rest to any."""

    def __init__(self, store: Store, *, queue_bytes: int, supersede: bool, failures: Failures) -> None:
        self._store = store
        self._supersede = supersede
        self._failures = failures
        self._queue: SpillQueue[_Item, Saved] = SpillQueue(self._write, max_bytes=queue_bytes)
        self._lock = threading.Lock()
        self._again: list[_Item] = []
        self._lost: dict[_Label, str] = {}
        self._unnamed = 0
        self._stored = self._dropped = self._failed = 0

    @property
    def written(self) -> Written:
        queue = self._queue.stats
        with self._lock:
            again = [item.nbytes for item in self._again]
        return Written(
            queue.pending_count + len(again),
            queue.pending_bytes + sum(again),
            self._stored,
            self._dropped,
            self._failed,
        )

    def put(self, identity: Identity, tokens: Sequence[int], caches: Sequence[Any], views: Sequence[Any]) -> None:
        """Take a snapshot of what is not stored yet of `caches`, and let it wait; what fails counts as lost.

        views: the same caches, where they can be read without a copy.
        """
        label = _Label(identity, np.array(tokens, "<u4").tobytes())
        try:
            self._prepare(label, caches, views)
        except Exception as error:
            with self._lock:
                self._failed += 1
                self._lose(label, f"{type(error).__name__}: {error}")
            self._failures.say("a prompt cache was not prepared", error)

    def _prepare(self, label: _Label, caches: Sequence[Any], views: Sequence[Any]) -> None:
        match = self._longest(label)
        if match is not None and match.length == len(label.tokens):
            with self._lock:
                self._lost.pop(label, None)
            return
        remembered = history.remembered(self._store.root, views) is not None
        prepared = self._store.prepare(label.tokens, views, label.identity, parent=None if remembered else match)
        item = _Item(label, prepared, [weakref.ref(cache) for cache in caches], geometry.list_shortens(prepared.caches))
        if self._supersede:
            self._queue.cancel_where(item.stands_for)
        self._enqueue(item)

    def retry(self) -> None:
        """Let what failed wait once more; a snapshot may have to be taken again."""
        with self._lock:
            items, self._again = self._again, []
        for item in items:
            item.attempts += 1
            try:
                if item.is_outdated:
                    item.take_again(self._store)
                self._enqueue(item)
            except Exception as error:
                self._not_written(item, error)

    def flush(self, timeout: float | None) -> None:
        """Return when all that was put before is committed. Raises NotStored, with what is missing.

        On another thread than the caches' a snapshot that would have to be taken again counts as lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self.retry()
            if not self._queue.drain(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise NotStored("not all was written in time", found=f"{self._queue.stats.pending_count} still wait")
            if not self._again:
                break
        with self._lock:
            lost, self._lost = self._lost, {}
            unnamed, self._unnamed = self._unnamed, 0
        if lost or unnamed:
            names = [f"{len(at.packed) // 4} tokens of {at.identity.model_id}: {why}" for at, why in lost.items()]
            names += [f"and {unnamed} before"] if unnamed else []
            raise NotStored("not all was stored", found="; ".join(names))

    def settle(self) -> None:
        """Wait until all that was put before was tried."""
        self._queue.drain()

    def close(self, timeout: float | None) -> bool:
        """Write what waits, and take no more; False where that took longer than `timeout` seconds."""
        return self._queue.close(timeout)

    def _enqueue(self, item: _Item) -> None:
        label = item.label
        future = self._queue.enqueue(item, item.nbytes, label=label)
        future.add_done_callback(lambda done: self._resolved(label, done.result()))

    def _write(self, item: _Item) -> Saved:
        """On the queue's thread."""
        try:
            former = self._longest(item.label) if item.shortens and self._supersede else None
            saved = self._store.commit(item.prepared)
        except BaseException as error:
            self._not_written(item, error)
            raise
        with self._lock:
            self._stored += 1
            self._lost = {label: why for label, why in self._lost.items() if not item.stands_for(label)}
            self._again = [other for other in self._again if not item.stands_for(other.label)]
        if former is not None and former.entry_length == former.length < saved.token_count:
            self._drop(former.entry_id)
        return saved

    def _longest(self, label: _Label) -> Match | None:
        """What the store has that begins with the most of these tokens, the last one included."""
        return self._store.find(np.append(label.tokens, np.uint32(0)), label.identity)  # find leaves one to compute

    def _not_written(self, item: _Item, error: BaseException) -> None:
        """Try it again later; its last failure counts."""
        with self._lock:
            if item.attempts < _ATTEMPTS:
                item.is_outdated |= isinstance(error, EntryGone)
                self._again.append(item)
            else:
                self._failed += 1
                self._lose(item.label, f"{type(error).__name__}: {error}")
        self._failures.say("a prompt cache was not written", error)

    def _lose(self, label: _Label, why: str) -> None:
        """With the lock."""
        self._lost.pop(label, None)
        self._lost[label] = why
        while len(self._lost) > _MOST_NAMED:
            del self._lost[next(iter(self._lost))]
            self._unnamed += 1

    def _resolved(self, label: _Label, outcome: Outcome[Saved]) -> None:
        if outcome.reason == "dropped":
            with self._lock:
                self._dropped += 1
                self._lose(label, "dropped, since too much waited to be written")
            self._failures.say("a prompt cache was dropped, since too much waited to be written")

    def _drop(self, entry_id: str) -> None:
        """Remove an entry that a longer one stands for, unless somebody pinned it; its blocks live on in that one."""
        try:
            if not self._store.entry(entry_id).pinned:
                self._store.remove(entry_id)
        except EntryGone:
            pass
        except (BlockstoreError, OSError) as error:
            self._failures.say("a superseded entry was not removed", error)
