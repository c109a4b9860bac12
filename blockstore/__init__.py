"""A content-addressed block store for LLM prompt caches on MLX arrays.

with Store("~/.cache/blockstore") as store:
    store.save(tokens, caches, identity)
    loaded = store.restore(prompt, identity, model)
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    BlockstoreError,
    CacheMiss,
    Cancelled,
    CorruptEntry,
    EntryGone,
    FileMissing,
    IdentityMismatch,
    InvalidInput,
    NotPermitted,
    NotStored,
    StoreBroken,
    StoreBusy,
    StoreFull,
    UnsupportedFormat,
)
from .identity import Identity, identity_of
from .limits import Limits
from .listing import Entry, Match, Stats
from .meta import Attachment, Meta
from .records import GenerationCheckpoint
from .store import Store

if TYPE_CHECKING:
    from .files import (
        SavedFile,
        clone_kv_caches,
        load_kv_cache,
        load_kv_cache_async,
        read_kv_header,
        save_kv_cache,
        save_kv_cache_async,
    )
    from .pending import Outcome, SpillStats
    from .prompt_cache import PersistentPromptCache, PromptCacheStats
    from .prompt_cache_files import load_prompt_cache, save_prompt_cache
    from .restoring import Loaded
    from .saving import Saved
    from .spill import SpillQueue

# These bring mlx, or what only servers need: the commands that only look or collect do without.
_LAZY = {
    "Loaded": "restoring",
    "PersistentPromptCache": "prompt_cache",
    "PromptCacheStats": "prompt_cache",
    "Outcome": "pending",
    "Saved": "saving",
    "SavedFile": "files",
    "SpillQueue": "spill",
    "SpillStats": "pending",
    "clone_kv_caches": "files",
    "load_kv_cache": "files",
    "load_kv_cache_async": "files",
    "load_prompt_cache": "prompt_cache_files",
    "read_kv_header": "files",
    "save_kv_cache": "files",
    "save_kv_cache_async": "files",
    "save_prompt_cache": "prompt_cache_files",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


__all__ = [
    "Attachment",
    "BlockstoreError",
    "CacheMiss",
    "Cancelled",
    "CorruptEntry",
    "Entry",
    "EntryGone",
    "FileMissing",
    "GenerationCheckpoint",
    "Identity",
    "IdentityMismatch",
    "InvalidInput",
    "Limits",
    "Loaded",
    "Match",
    "Meta",
    "NotPermitted",
    "NotStored",
    "Outcome",
    "PersistentPromptCache",
    "PromptCacheStats",
    "Saved",
    "SavedFile",
    "SpillQueue",
    "SpillStats",
    "Stats",
    "Store",
    "StoreBroken",
    "StoreBusy",
    "StoreFull",
    "UnsupportedFormat",
    "clone_kv_caches",
    "identity_of",
    "load_kv_cache",
    "load_kv_cache_async",
    "load_prompt_cache",
    "read_kv_header",
    "save_kv_cache",
    "save_kv_cache_async",
    "save_prompt_cache",
]
