"""A content-addressed block store for LLM prompt caches on MLX arrays.

with Store("~/.cache/blockstore") as store:
    store.save(tokens, caches, identity)
    loaded = store.restore(prompt, identity, model)
"""

from .errors import (
    BlockstoreError,
    CacheMiss,
    CorruptEntry,
    EntryGone,
    IdentityMismatch,
    InvalidInput,
    StoreBroken,
    StoreBusy,
    StoreFull,
    UnsupportedFormat,
)
from .identity import Identity, identity_of
from .listing import Entry, Match, Stats
from .store import Store

__all__ = [
    "BlockstoreError",
    "CacheMiss",
    "CorruptEntry",
    "Entry",
    "EntryGone",
    "Identity",
    "IdentityMismatch",
    "InvalidInput",
    "Match",
    "Stats",
    "Store",
    "StoreBroken",
    "StoreBusy",
    "StoreFull",
    "UnsupportedFormat",
    "identity_of",
]
