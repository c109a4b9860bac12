"""Checkpoints of generations under way: where each stands, so that another process goes on from there bit for bit.

A checkpoint is an entry like any other: the caches of prompt and generated tokens, the pending token, the state of the
random stream. It stands under an identity of its own, which names the request, so that no prompt is ever served from
it; its blocks are shared with whatever else holds the same tokens.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from kvcodecs.backend import mx

from .errors import CorruptEntry, EntryGone, InvalidInput
from .failures import Failures
from .identity import Identity
from .listing import entries_of
from .meta import Attachment
from .packing import Prepared
from .pending import Outcome
from .records import GenerationCheckpoint
from .restoring import Loaded
from .spill import SpillQueue
from .store import Store

_LOG: Final = logging.getLogger("blockstore")
SCHEMA: Final = "blockstore.random-state"
DEFAULT_EVERY: Final = 64
# A generation has one snapshot at a time on its way to the store, so there is nothing to drop.
_NO_CAP_BYTES: Final = 1 << 62
_Job = Callable[[], None]


class CheckpointStats(msgspec.Struct, frozen=True):
    """Since the start: checkpoints stored, generations that went on from one, tokens that these did not compute again.

    failures: what went wrong, each time at the cost of a checkpoint alone.
    """

    stored: int
    resumed: int
    tokens_resumed: int
    failures: int


@dataclass(frozen=True)
class Request:
    """What is asked of a model.

    key: a digest of all that decides the tokens, beside the identity. seed: None where none was asked for. model: as
    Store.load takes it.
    """

    identity: Identity
    key: str
    prompt: tuple[int, ...]
    seed: int | None
    model: Any

    @property
    def own_identity(self) -> Identity:
        """Under which its checkpoints are stored."""
        return replace(self.identity, ns="/".join(filter(None, [self.identity.ns, "checkpoint", self.key])))


@dataclass(frozen=True)
class Restored:
    """Where a generation stood: what it had drawn, the pending token last, and the caches of all before that."""

    generated: list[int]
    caches: list[Any]
    random_key: tuple[int, int]


class Checkpoints:
    """The checkpoints of a store: taken, found, replaced by newer ones, removed when their request is done.

    every: how many tokens are generated from one to the next. settle: called before the checkpoints of a request that
    is done are removed, on a thread of this object's: it may wait until what shares their blocks is stored as well.

    Nothing here fails a generation: what the store cannot do costs a checkpoint, and is logged once. Methods may be
    called from any thread; those of a Generation belong to the thread that owns its caches.
    """

    def __init__(
        self, store: Store, *, every: int = DEFAULT_EVERY, settle: Callable[[], object] = lambda: None
    ) -> None:
        if type(every) is not int or every < 1:
            raise InvalidInput("every is a number of tokens", field="every", expected="at least 1", found=every)
        self.store: Final = store
        self.every: Final = every
        self.settle: Final = settle
        self.queue: Final[SpillQueue[_Job, None]] = SpillQueue(lambda job: job(), max_bytes=_NO_CAP_BYTES)
        self.is_closed = False
        self._lock = threading.Lock()
        self._stored = self._resumed = self._tokens_resumed = 0
        self.failures: Final = Failures()

    def begin(self, request: Request) -> "Generation":
        """A generation that is about to start, with what an earlier process may have left of it."""
        return Generation(self, request)

    @property
    def stats(self) -> CheckpointStats:
        with self._lock:
            return CheckpointStats(self._stored, self._resumed, self._tokens_resumed, self.failures.count)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for what was handed over before; False where that takes more than `timeout` seconds."""
        return self.queue.drain(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Finish what waits and take no more; False where that takes longer. The store is the caller's to close."""
        self.is_closed = True
        return self.queue.close(timeout)

    # ---- told by generations

    def count_stored(self) -> None:
        with self._lock:
            self._stored += 1

    def count_resumed(self, tokens: int) -> None:
        with self._lock:
            self._resumed += 1
            self._tokens_resumed += tokens
        _LOG.info("a generation went on behind %d tokens", tokens)


class Generation:
    """One request's checkpoints."""

    def __init__(self, checkpoints: Checkpoints, request: Request) -> None:
        self._all = checkpoints
        self._store = checkpoints.store
        self.request: Final = request
        # The ids of what is stored of it, the longest first; the queue's thread has them once a job is enqueued.
        self._entries = self._found()
        self._last = 0
        self._prepared: Prepared | None = None
        self._under_way: Future[Outcome[None]] | None = None
        self._is_broken = False

    def restore(self) -> Restored | None:
        """The furthest checkpoint that loads; None where there is none."""
        for entry_id in self._entries:
            try:
                restored = self._checked(self._store.load(entry_id, self.request.model))
            except Exception as error:
                self._all.failures.say("a checkpoint could not be used", error)
            else:
                self._last = len(restored.generated) - 1
                return restored
        return None

    def advance(self, generated: Sequence[int], caches: Sequence[Any]) -> None:
        """Take or finish a checkpoint where it is time: `caches` hold the prompt and all of `generated`.

        The next token has been drawn already (mlx-lm computes it ahead), so that mx.random.state is the one behind it;
        which one it is, is known at the next call.
        """
        if self._is_broken or self._all.is_closed:
            return
        try:
            if self._prepared is not None:
                self._hand_over(self._prepared, generated)
            if len(generated) - self._last >= self._all.every and self._is_idle():
                self._take(generated, caches)
        except Exception as error:
            self._give_up(error)

    def end(self) -> None:
        """It is done, or must begin anew: remove what is stored of it, behind what is under way."""
        self._prepared = None
        self._last = 0
        if not self._entries and self._under_way is None:
            return
        try:
            self._all.queue.enqueue(self._remove_all, 0, droppable=False)
        except Exception as error:
            self._all.failures.say("a checkpoint was not removed", error)

    # ---- on the caches' thread

    def _found(self) -> list[str]:
        found = entries_of(self._store.rooms, self.request.own_identity, self._store.provider.id)
        return [entry.entry_id for entry in found]

    def _checked(self, loaded: Loaded) -> Restored:
        """Raise CorruptEntry where the entry is not a checkpoint of this request."""
        request, checkpoint, count = self.request, loaded.header.generation_checkpoint, len(self.request.prompt)
        generated = loaded.tokens[count:]
        if (
            checkpoint is None
            or checkpoint.key != request.key
            or checkpoint.original_prompt_tokens != count
            or checkpoint.generated_tokens != len(generated)
            or tuple(loaded.tokens[:count]) != request.prompt
        ):
            raise CorruptEntry("the checkpoint is of another request", entry_id=loaded.entry_id, found=checkpoint)
        states = [attachment.metadata for attachment in loaded.attachments if attachment.schema == SCHEMA]
        try:
            random_key = msgspec.convert(states, tuple[_RandomState])[0].key
        except msgspec.ValidationError as error:
            raise CorruptEntry("the state of the random stream is missing", entry_id=loaded.entry_id) from error
        return Restored([*generated, checkpoint.pending_token], loaded.caches, random_key)

    def _is_idle(self) -> bool:
        return self._under_way is None or self._under_way.done()

    def _take(self, generated: Sequence[int], caches: Sequence[Any]) -> None:
        tokens, state = [*self.request.prompt, *generated], Attachment(SCHEMA, {"key": list(random_key())})
        self._prepared = self._store.prepare(tokens, caches, self.request.own_identity, attachments=[state])
        self._last = len(generated)

    def _hand_over(self, prepared: Prepared, generated: Sequence[int]) -> None:
        request, self._prepared = self.request, None
        checkpoint = GenerationCheckpoint(
            key=request.key,
            cache_ns=request.identity.ns or "",
            original_prompt_tokens=len(request.prompt),
            generated_tokens=len(generated) - 1,
            pending_token=generated[-1],
            seed=request.seed or 0,
            seed_was_explicit=request.seed is not None,
        )
        complete = replace(prepared, generation_checkpoint=checkpoint)
        pinned = sum(view.nbytes for view in complete.views.values())
        self._under_way = self._all.queue.enqueue(lambda: self._commit(complete), pinned)

    # ---- on the queue's thread

    def _commit(self, prepared: Prepared) -> None:
        try:
            saved = self._store.commit(prepared)
        except EntryGone:  # what the caches continued; they have forgotten it, and the next one is taken of everything
            return
        except Exception as error:
            self._give_up(error)
            return
        older, self._entries = self._entries, [saved.entry_id]
        self._all.count_stored()
        self._remove([entry_id for entry_id in older if entry_id != saved.entry_id])

    def _remove_all(self) -> None:
        entries, self._entries = self._entries, []
        if entries:
            try:
                self._all.settle()
            except Exception as error:
                self._all.failures.say("nobody knows whether what shares a checkpoint's blocks is stored", error)
            self._remove(entries)

    def _remove(self, entry_ids: Sequence[str]) -> None:
        for entry_id in entry_ids:
            try:
                self._store.remove(entry_id)
            except EntryGone:
                pass
            except Exception as error:
                self._all.failures.say("a checkpoint was not removed", error)

    def _give_up(self, error: Exception) -> None:
        """No further checkpoint of this generation: each attempt would cost as much as one that succeeds."""
        self._is_broken = True
        self._all.failures.say("a checkpoint was not stored", error)


class _RandomState(msgspec.Struct, forbid_unknown_fields=True):
    key: tuple[int, int]


def random_key() -> tuple[int, int]:
    """The state of this thread's random stream, mx.random.state: one key of two 32-bit words."""
    state: Any = mx.random.state
    (key,) = state
    high, low = key.tolist()
    return high, low


def set_random_key(key: tuple[int, int]) -> None:
    """Let this thread's random stream go on from there. Raises InvalidInput where this release of mlx cannot."""
    high, low = key
    mx.random.seed(high << 32 | low)  # a seed's two words are the key
    if random_key() != key:
        raise InvalidInput("the random stream cannot be set", expected=key, found=random_key())
