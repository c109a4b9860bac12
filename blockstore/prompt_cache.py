"""A prompt cache that remembers: mlx-lm's LRUPromptCache in memory, a store behind it.

Memory is asked first, the store where it knows a strictly longer prefix. What is inserted is written behind. Nothing
that the store does fails a request: each failure is a miss, and is logged once.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from .agreement import agreed
from .extracted import shorten_views, taken_views
from .failures import Failures
from .identity import Identity
from .prefixes import MAX_TOKEN
from .records import slots_of
from .restoring import Loaded
from .store import Store
from .write_behind import WriteBehind

_LOG: Final = logging.getLogger("blockstore")
_QUEUE_BYTES: Final = 4 << 30


class PromptCacheStats(msgspec.Struct, frozen=True):
    """What became of lookups and inserts since the start. Bytes are those of tensors; times are in seconds.

    failures: calls of the store that failed, each of which was a miss. failed: snapshots that were given up.
    """

    hits_memory: int
    hits_store: int
    misses: int
    tokens_from_memory: int
    tokens_restored: int
    bytes_restored: int
    last_restore_s: float
    entries: int
    nbytes: int
    pending_count: int
    pending_bytes: int
    stored: int
    dropped: int
    failed: int
    failures: int


@dataclass
class _Counts:
    hits_memory: int = 0
    hits_store: int = 0
    misses: int = 0
    tokens_from_memory: int = 0
    tokens_restored: int = 0
    bytes_restored: int = 0
    last_restore_s: float = 0.0


class PersistentPromptCache:
    """Stands where mlx-lm's LRUPromptCache stands, over `store`.

    identity: what a server's model key (any hashable value) means; asked once for each. prototypes: for a key, lists of
    empty caches as the model makes them, tried in turn; more than one where caches may have been quantized. max_size,
    max_bytes: what stays in memory, as for LRUPromptCache. queue_bytes: how much may wait to be written; over that the
    oldest snapshots are dropped. supersede: an entry goes once a longer one that begins with it, and can be shortened,
    is stored. leave_one: at least one token is always left to compute, which mlx-lm's server needs.

    fetch and insert belong to the thread that owns the caches; flush, close and stats to any.
    """

    def __init__(
        self,
        store: Store,
        *,
        identity: Callable[[Any], Identity],
        prototypes: Callable[[Any], Iterable[Sequence[Any]]],
        max_size: int = 10,
        max_bytes: int = 1 << 63,
        queue_bytes: int = _QUEUE_BYTES,
        supersede: bool = True,
        leave_one: bool = False,
    ) -> None:
        from mlx_lm.models.cache import LRUPromptCache

        self.store = store
        self._identity = identity
        self._identities: dict[Any, Identity | None] = {}
        self._prototypes = prototypes
        self._memory: Any = LRUPromptCache(max_size, max_bytes)
        self._leave_one = leave_one
        self._failures = Failures()
        self._behind = WriteBehind(store, queue_bytes=queue_bytes, supersede=supersede, failures=self._failures)
        self._counts = _Counts()

    # ---- as LRUPromptCache

    @property
    def max_size(self) -> int:
        return int(self._memory.max_size)

    @property
    def max_bytes(self) -> int:
        return int(self._memory.max_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(self._memory.nbytes)

    def __len__(self) -> int:
        return len(self._memory)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Let go of sequences in memory; what is stored or waits to be stays."""
        self._memory.trim_to(n_sequences=n_sequences, n_bytes=n_bytes)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = self._memory.stats_by_type()
        return found

    def fetch_nearest_cache(self, model: Any, tokens: list[Any]) -> tuple[list[Any] | None, list[Any]]:
        """Caches of the longest prefix of `tokens` that is known, the caller's to change, and the tokens behind it.

        From memory they are copies, from the store they are new. None and all tokens where nothing is known.
        """
        caches, rest = self._from_memory(model, tokens)
        known = len(tokens) - len(rest)
        loaded = self._from_store(model, tokens, known)
        if loaded is not None:
            return loaded.caches, tokens[loaded.token_count :]
        self._counts.hits_memory += caches is not None
        self._counts.misses += caches is None
        self._counts.tokens_from_memory += known
        return caches, rest

    def insert_cache(
        self, model: Any, tokens: list[Any], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep caches, which become this one's, in memory, and write them to the store behind the caller's back.

        Where key and caches disagree, all are brought to what they have in common; what has nothing is not kept.
        """
        views = taken_views(prompt_cache)
        is_storable = _is_storable(tokens)
        if is_storable:
            count = agreed(tokens, prompt_cache)
            if count == 0:
                self._failures.say("caches of different lengths were not kept")
                return
            tokens = tokens[:count]
            shorten_views(views, prompt_cache)
        self._memory.insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
        if is_storable:
            self._write_behind(model, tokens, prompt_cache, views)

    # ---- the store

    @property
    def stats(self) -> PromptCacheStats:
        return PromptCacheStats(
            **vars(self._counts),
            **self._behind.written._asdict(),
            entries=len(self),
            nbytes=self.nbytes,
            failures=self._failures.count,
        )

    def flush(self, timeout: float | None = None) -> None:
        """Return when all that was inserted before is committed; what failed is tried again first.

        On another thread than the caches' a snapshot that would have to be taken again, since what it continues went
        from the store, counts as missing. Raises NotStored, with what is missing.
        """
        self._behind.flush(timeout)

    def settle(self) -> None:
        """Wait until all that was inserted before was tried once."""
        self._behind.settle()

    def close(self, timeout: float | None = None) -> bool:
        """Write what waits, and write behind no more; False where that took longer than `timeout` seconds.

        Memory and lookups go on. The store stays open: it is the caller's.
        """
        return self._behind.close(timeout)

    # ---- inside

    def _from_memory(self, model: Any, tokens: list[Any]) -> tuple[list[Any] | None, list[Any]]:
        caches, rest = self._memory.fetch_nearest_cache(model, tokens)
        if rest or caches is None or not self._leave_one:
            return caches, rest
        if all(cache.is_trimmable() for cache in caches):
            for cache in caches:
                cache.trim(1)
            return caches, tokens[-1:]
        caches, rest = self._memory.fetch_nearest_cache(model, tokens[:-1])
        return caches, [*rest, *tokens[-1:]]

    def _from_store(self, model: Any, tokens: list[Any], known: int) -> Loaded | None:
        """What the store knows, if that is longer than `known`."""
        if known >= len(tokens) - 1 or not _is_storable(tokens):
            return None
        began = time.perf_counter()
        try:
            identity = self._identity_of(model)
            packed = np.array(tokens, np.uint32)
            match = None if identity is None else self.store.find(packed, identity)
            if identity is None or match is None or match.length <= known:
                return None
            loaded = self._loaded(model, packed, identity, known)
        except Exception as error:
            self._failures.say("the store was not asked", error)
            return None
        if loaded is not None:
            self._count_restored(loaded, time.perf_counter() - began)
        return loaded

    def _loaded(self, model: Any, packed: Any, identity: Identity, known: int) -> Loaded | None:
        for prototypes in self._prototypes(model):
            loaded = self.store.restore(packed, identity, list(prototypes))
            if loaded is not None and loaded.token_count > known:
                return loaded
        return None

    def _count_restored(self, loaded: Loaded, seconds: float) -> None:
        whole = sum(slot.bytes for slot in slots_of(loaded.header))
        size = whole * loaded.token_count // len(loaded.header.tokens)
        counts = self._counts
        counts.hits_store += 1
        counts.tokens_restored += loaded.token_count
        counts.bytes_restored += size
        counts.last_restore_s = seconds
        _LOG.info("restored %d tokens (%.1f MB) in %.3f s", loaded.token_count, size / 1e6, seconds)

    def _write_behind(self, model: Any, tokens: list[int], caches: Sequence[Any], views: Sequence[Any]) -> None:
        self._behind.retry()
        identity = self._identity_of(model)
        if identity is not None:
            self._behind.put(identity, tokens, caches, views)

    def _identity_of(self, model: Any) -> Identity | None:
        """Of a model key, worked out once; None, for good, where that failed."""
        if model not in self._identities:
            try:
                self._identities[model] = self._identity(model)
            except Exception as error:
                self._identities[model] = None
                self._failures.say("nothing of this model is stored: its identity is unknown", error)
        return self._identities[model]


def _is_storable(tokens: Sequence[Any]) -> bool:
    """Whether a key is made of tokens alone; ids of images are below zero."""
    return bool(tokens) and all(isinstance(token, int) and 0 <= token <= MAX_TOKEN for token in tokens)
