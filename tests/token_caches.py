"""Small stores, and caches that follow from their tokens.

A cache here is made as a model makes one: what it holds of a token follows from that token and all before it, so that
equal prefixes give equal bytes and other prefixes do not. Nothing of mlx-lm is imported: a process starts soon.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np

import kvcodecs
from blockstore import Identity, Store

IDENTITY = Identity("model", "config", "tokenizer", "")
SMALL: dict[str, Any] = {"durability": "none", "span": 4, "block_bytes": 1024}


def small_store(root: str | os.PathLike[str], **options: Any) -> Store:
    """A store with blocks of 4 tokens, or at most 2 KiB, that waits for no disk."""
    return Store(root, **{**SMALL, **options})


def identity(ns: str) -> Identity:
    return Identity("model", "config", "tokenizer", ns)


# ---- caches


def rows_of(tokens: Sequence[int], dim: int, salt: int = 0, heads: int = 1) -> np.ndarray[Any, Any]:
    """float32 `[1, heads, len(tokens), dim]`: each row follows from its token, those before it, and `salt`."""
    hashes, at = [], salt
    for token in tokens:
        at = crc32(int(token).to_bytes(4, "little"), at)
        hashes.append(at)
    columns = np.arange(1, heads * dim + 1, dtype=np.uint32) * np.uint32(2654435761)
    mixed = np.array(hashes, np.uint32).reshape(-1, 1) * columns ^ (columns >> np.uint32(7))
    rows = (mixed >> np.uint32(8)).astype(np.float32) / np.float32(1 << 24)
    found: np.ndarray[Any, Any] = rows.reshape(len(hashes), heads, dim).transpose(1, 0, 2)[None]
    return found


def extend(cache: Any, tokens: Sequence[int], *chunks: int, dim: int = 4, salt: int = 0, dtype: Any = None) -> Any:
    """Let `cache` see those of `tokens` that it has not seen, in chunks of the sizes given, the last one repeated."""
    keys, values = (mx.array(rows_of(tokens, dim, 2 * salt + i)) for i in range(2))
    if dtype is not None:
        keys, values = keys.astype(dtype), values.astype(dtype)
    sizes = list(chunks) or [len(tokens)]
    at = cache.offset
    while at < len(tokens):
        size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(tokens) - at)
        mx.eval(cache.update_and_fetch(keys[..., at : at + size, :], values[..., at : at + size, :]))
        at += size
    return cache


def plain(tokens: Sequence[int], layers: int = 1, minimum: int = 0) -> list[Any]:
    """Caches that shorten, down to `minimum` tokens."""
    caches = [extend(kvcodecs.KVCache(), tokens, salt=layer) for layer in range(layers)]
    for cache in caches:
        cache.minimum_reusable_offset = minimum
    return caches


def recurrent(tokens: Sequence[int]) -> Any:
    """A cache that does not shorten."""
    cache = kvcodecs.RecurrentCache()
    if not tokens:
        return cache
    last = rows_of(tokens, 6, 99)[:, :, -1]
    cache[0], cache[1] = mx.array(last), mx.array(last[..., None] * 2)
    cache.advance(len(tokens))
    return cache


def hybrid(tokens: Sequence[int]) -> list[Any]:
    return [*plain(tokens), recurrent(tokens)]


def windowed(tokens: Sequence[int]) -> list[Any]:
    """A ring of 8 beside a plain cache: shortens while it is shorter than that."""
    return [*plain(tokens), extend(kvcodecs.RotatingKVCache(8), tokens, 1, salt=5)]


MODELS: dict[str, Callable[[Sequence[int]], list[Any]]] = {
    "plain": plain, "two layers": lambda tokens: plain(tokens, 2), "hybrid": hybrid, "windowed": windowed,
}  # fmt: skip


def usable(stored: Sequence[int], shortens: bool, minimum: int, prompt: Sequence[int]) -> int:
    """How many tokens of `prompt` an entry of the tokens `stored` serves: at most all but the last one."""
    common = 0
    for ours, theirs in zip(stored, prompt[:-1], strict=False):
        if ours != theirs:
            break
        common += 1
    return common if common == len(stored) or (shortens and common >= max(minimum, 1)) else 0
