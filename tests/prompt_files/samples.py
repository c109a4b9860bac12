"""Prompt cache files that mlx-lm itself wrote, before and since its 0.32: what they hold, and how they were made.

    python tests/prompt_files/samples.py FOLDER

with one release after the other. The files are kept in tests/golden/mlx-lm/, and are never edited.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

GOLDEN = Path(__file__).parent.parent / "golden" / "mlx-lm"
RELEASES = ("0.31.3", "0.32.2")
TOKENS = 11
METADATA = {"model": "org/tiny", "note": "prüfung"}


def ramp(start: int, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    """Values that no release of MLX computes otherwise."""
    count = 1
    for size in shape:
        count *= size
    return ((mx.arange(count) * 7 + start) % 251).reshape(shape).astype(dtype)


def fed(cache: Any, *chunks: int, dim: int = 4, dtype: mx.Dtype = mx.float32) -> Any:
    """A cache of one head with so many tokens, chunk by chunk."""
    for chunk in chunks or (TOKENS,):
        keys, values = (ramp(13 * cache.offset + side, (1, 1, chunk, dim), dtype) for side in (1, 2))
        mx.eval(cache.update_and_fetch(keys, values))
    return cache


def quantized(group_size: int, bits: int) -> Any:
    """One whose packed values, scales and biases are given: what mx.quantize makes of numbers is its own matter."""
    cache = mlx_lm_cache.QuantizedKVCache(group_size, bits)
    widths = ((64 * bits // 32, mx.uint32), (64 // group_size, mx.float32), (64 // group_size, mx.float32))
    cache.keys, cache.values = (
        tuple(ramp(side + i, (1, 1, TOKENS, width), dtype) for i, (width, dtype) in enumerate(widths))
        for side in (1, 2)
    )
    cache.offset = TOKENS
    return cache


def plain() -> list[Any]:
    return [fed(mlx_lm_cache.KVCache()), fed(mlx_lm_cache.KVCache(), 5, 6, dtype=mx.bfloat16)]


def every_class() -> list[Any]:
    """One of each class that holds a single sequence; rings that have dropped tokens, and one that has not."""
    arrays = mlx_lm_cache.ArraysCache(2)
    arrays[0], arrays[1] = ramp(1, (1, 3, 8)), ramp(2, (1, 2, 2, 2), mx.float16)
    inner = mlx_lm_cache.CacheList(fed(mlx_lm_cache.ConcatenateKVCache()), fed(mlx_lm_cache.RotatingKVCache(32)))
    return [
        fed(mlx_lm_cache.KVCache()),
        fed(mlx_lm_cache.ConcatenateKVCache(), 4, 7),
        fed(mlx_lm_cache.RotatingKVCache(8), 5, *[1] * 6),
        fed(mlx_lm_cache.RotatingKVCache(8, keep=2), 5, *[1] * 6),
        quantized(32, 4),
        fed(mlx_lm_cache.ChunkedKVCache(512)),
        arrays,
        mlx_lm_cache.CacheList(fed(mlx_lm_cache.KVCache()), inner, quantized(64, 8)),
    ]


def batch() -> list[Any]:
    rows = [fed(mlx_lm_cache.KVCache()), fed(mlx_lm_cache.KVCache(), 7)]
    rings = [fed(mlx_lm_cache.RotatingKVCache(8)), fed(mlx_lm_cache.RotatingKVCache(8), 7)]
    return [mlx_lm_cache.KVCache.merge(rows), mlx_lm_cache.RotatingKVCache.merge(rings)]


# name -> the caches, and the metadata beside them
SAMPLES: dict[str, tuple[Callable[[], list[Any]], dict[str, str]]] = {
    "plain": (plain, METADATA),
    "every-class": (every_class, {}),
    "batch": (batch, METADATA),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, (build, metadata) in SAMPLES.items():
        mlx_lm_cache.save_prompt_cache(str(folder / f"{name}.safetensors"), build(), metadata)
