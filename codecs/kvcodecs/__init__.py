"""What a KV cache is: cache classes for MLX, and the codecs that take caches apart and put them together again.

Names are looked up when they are first used. `kvcodecs.entry` and `kvcodecs.geometry` therefore work without MLX;
everything that needs MLX raises MissingBackend where it has no backend.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .algebra import (
        Codec,
        CodecError,
        CodecProvider,
        PrototypeMismatch,
        Snapshot,
        SnapshotContext,
        UnknownKind,
        UnmatchedCache,
    )
    from .backend import MissingBackend
    from .composed import Composed
    from .entry import HeaderEntry, Slot
    from .geometry import BadEntry
    from .kv import KVCache
    from .mla import MLACache, MLADSACache, MTPMLACache
    from .paged import PagedKVCache
    from .provider import default_provider
    from .quantized import QuantizedKVCache
    from .recurrent import RecurrentCache
    from .rotating import RotatingKVCache, RotatingQuantizedKVCache
    from .turboquant import TurboQuantKVCache

__all__ = [
    "BadEntry",
    "Codec",
    "CodecError",
    "CodecProvider",
    "Composed",
    "HeaderEntry",
    "KVCache",
    "MLACache",
    "MLADSACache",
    "MTPMLACache",
    "MissingBackend",
    "PagedKVCache",
    "PrototypeMismatch",
    "QuantizedKVCache",
    "RecurrentCache",
    "RotatingKVCache",
    "RotatingQuantizedKVCache",
    "Slot",
    "Snapshot",
    "SnapshotContext",
    "TurboQuantKVCache",
    "UnknownKind",
    "UnmatchedCache",
    "default_provider",
]

_HOMES = {
    "algebra": ("Codec CodecError CodecProvider PrototypeMismatch Snapshot SnapshotContext UnknownKind UnmatchedCache"),
    "backend": "MissingBackend",
    "composed": "Composed",
    "entry": "HeaderEntry Slot",
    "geometry": "BadEntry",
    "kv": "KVCache",
    "mla": "MLACache MLADSACache MTPMLACache",
    "paged": "PagedKVCache",
    "provider": "default_provider",
    "quantized": "QuantizedKVCache",
    "recurrent": "RecurrentCache",
    "rotating": "RotatingKVCache RotatingQuantizedKVCache",
    "turboquant": "TurboQuantKVCache",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
