"""The caches that the benchmarks save and restore: random bytes in the shapes of real models, and the peers' calls."""

import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)

from blockstore import Store
from blockstore.saving import Saved
from kvcodecs import MLACache
from tools.bench.kit import IDENTITY, Contender, require

VOCABULARY = 150_000
Rows = tuple[mx.array, ...]


class Workload(ABC):
    """Caches of so many layers and tokens. Arrays are made once; every list of caches shares them until it goes on."""

    kind: ClassVar[str]

    def __init__(self, layers: int, count: int, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)
        self.count = count
        self.layers = layers
        self.tokens = self.more_tokens(count)
        self._layers = [self._make(count) for _ in range(layers)]
        mx.eval(self._layers)

    @property
    def name(self) -> str:
        return f"{self.kind} {round(self.bytes / 2**20)} MiB"

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for arrays in self._layers for array in arrays)

    @property
    def token_bytes(self) -> int:
        """What one token takes in all layers."""
        return self.bytes // self.count

    def more_tokens(self, count: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
        return self._rng.integers(0, VOCABULARY, count, dtype=np.uint32)

    def caches(self) -> list[Any]:
        """New caches, as a model has them after a prefill."""
        return [self._cache(arrays) for arrays in self._layers]

    def peers(self) -> list[Any]:
        """The same bytes as a user of mlx-lm has them."""
        return self.caches()

    def prototypes(self) -> list[Any]:
        """Empty caches, as a model makes them."""
        return [self._prototype() for _ in self._layers]

    def rows(self, count: int) -> list[Rows]:
        """What a model computes for `count` more tokens: random, one tuple a layer, evaluated."""
        rows = [self._new_rows(count) for _ in self._layers]
        mx.eval(rows)
        return rows

    def append(self, caches: Sequence[Any], rows: Sequence[Rows]) -> None:
        """One step of a model, as far as its caches go: evaluated."""
        for cache, new in zip(caches, rows, strict=True):
            self._append(cache, new)
        mx.eval([held(cache) for cache in caches])

    def random(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Bytes that nothing can compress or share."""
        numbers = np.frombuffer(self._rng.bytes(int(np.prod(shape)) * dtype.size), f"u{dtype.size}")
        return mx.array(numbers.reshape(shape)).view(dtype)

    def _append(self, cache: Any, rows: Rows) -> None:
        cache.update_and_fetch(*rows)

    def _new_rows(self, count: int) -> Rows:
        return self._make(count)

    @abstractmethod
    def _make(self, count: int) -> Rows: ...

    @abstractmethod
    def _cache(self, arrays: Rows) -> Any: ...

    @abstractmethod
    def _prototype(self) -> Any: ...


class PlainKV(Workload):
    """mlx-lm's KVCache: `[1, heads, tokens, dim]` bfloat16 keys and values."""

    kind = "KV"

    def __init__(self, layers: int, count: int, heads: int = 8, dim: int = 128, seed: int = 1) -> None:
        self._heads, self._dim = heads, dim
        super().__init__(layers, count, seed)

    def _make(self, count: int) -> Rows:
        keys, values = (self.random((1, self._heads, count, self._dim), mx.bfloat16) for _ in range(2))
        return keys, values

    def _cache(self, arrays: Rows) -> Any:
        return filled(KVCache(), arrays[0][...], arrays[1][...])

    def _prototype(self) -> Any:
        return KVCache()


class Hybrid(PlainKV):
    """Layers by turns whole and with a sliding window: mlx-lm's KVCache, and a RotatingKVCache that is full."""

    kind = "window hybrid"

    def __init__(self, layers: int, count: int, window: int, dim: int = 128) -> None:
        self._window = window
        super().__init__(layers, count, dim=dim)
        self._layers = [self._kept(number, arrays) for number, arrays in enumerate(self._layers)]
        mx.eval(self._layers)

    def caches(self) -> list[Any]:
        return [self._ring(arrays) if number % 2 else self._cache(arrays) for number, arrays in enumerate(self._layers)]

    def prototypes(self) -> list[Any]:
        return [RotatingKVCache(self._window) if number % 2 else KVCache() for number in range(self.layers)]

    def _kept(self, number: int, arrays: Rows) -> Rows:
        return tuple(mx.contiguous(array[..., -self._window :, :]) for array in arrays) if number % 2 else arrays

    def _ring(self, arrays: Rows) -> Any:
        cache = filled(RotatingKVCache(self._window), arrays[0][...], arrays[1][...])
        cache.offset, cache._idx = self.count, self._window
        return cache


class Quantized(Workload):
    """mlx-lm's QuantizedKVCache of 4 bits in groups of 64: packed values, scales and biases, twice."""

    kind = "4-bit KV"
    heads, dim, group, bits = 8, 128, 64, 4

    def _make(self, count: int) -> Rows:
        return tuple(array for _ in range(2) for array in self._parts(count))

    def _parts(self, count: int) -> Iterator[mx.array]:
        shape = (1, self.heads, count)
        yield self.random((*shape, self.dim * self.bits // 32), mx.uint32)
        for _ in range(2):
            yield self.random((*shape, self.dim // self.group), mx.bfloat16)

    def _new_rows(self, count: int) -> Rows:
        keys, values = (mx.random.normal((1, self.heads, count, self.dim)).astype(mx.bfloat16) for _ in range(2))
        return keys, values

    def _cache(self, arrays: Rows) -> Any:
        own = tuple(array[...] for array in arrays)
        return filled(self._prototype(), own[:3], own[3:])

    def _prototype(self) -> Any:
        return QuantizedKVCache(group_size=self.group, bits=self.bits)


class Latent(Workload):
    """MLA: a float32 latent of 512 and a rotary part of 64; the peers hold the same bytes in mlx-lm's KVCache."""

    kind = "MLA"
    widths = (512, 64)

    def _make(self, count: int) -> Rows:
        return tuple(self.random((1, count, width), mx.float32) for width in self.widths)

    def _cache(self, arrays: Rows) -> Any:
        cache = self._prototype()
        cache.hold([array[...] for array in arrays])
        cache.offset = self.count
        return cache

    def peers(self) -> list[Any]:
        return [filled(KVCache(), *(array[:, None] for array in arrays)) for arrays in self._layers]

    def _prototype(self) -> Any:
        return MLACache(*self.widths)

    def _append(self, cache: Any, rows: Rows) -> None:
        if isinstance(cache, MLACache):
            cache.append(*rows)
        else:
            cache.update_and_fetch(*(array[:, None] for array in rows))


def filled(cache: Any, keys: Any, values: Any) -> Any:
    """An mlx-lm cache that is full to its capacity, as after a prefill of a multiple of 256 tokens."""
    first = keys[0] if isinstance(keys, tuple) else keys
    cache.keys, cache.values, cache.offset = keys, values, first.shape[-2]
    mx.eval(held(cache))
    return cache


def held(cache: Any) -> list[mx.array]:
    """The arrays of a cache, at their capacity."""
    if hasattr(cache, "planes"):
        return list(cache.planes)
    return [array for part in (cache.keys, cache.values) for array in ([part] if isinstance(part, mx.array) else part)]


def same(caches: Sequence[Any], others: Sequence[Any], count: int) -> bool:
    """Whether the first `count` tokens have the same bytes in both; a ring may have given one row to a new token."""
    return len(caches) == len(others) and all(
        _unlike_rows(one, other, count) <= isinstance(cache, RotatingKVCache)
        for cache, twin in zip(caches, others, strict=True)
        for one, other in zip(held(cache), held(twin), strict=True)
    )


def _unlike_rows(one: mx.array, other: mx.array, count: int) -> int:
    """How many tokens have other bytes in one head or another."""
    like = _bits(one, count) == _bits(other, count)
    return int(mx.sum(mx.any(mx.logical_not(like), axis=[axis for axis in range(like.ndim) if axis != like.ndim - 2])))


def _bits(array: mx.array, count: int) -> mx.array:
    live = array[..., :count, :]
    return live.view({2: mx.uint16, 4: mx.uint32}[array.itemsize])


def main_loads(quick: bool) -> Iterator[tuple[Workload, int]]:
    """What is saved and restored, one after the other, each with the number of rounds that its size allows."""
    if quick:
        yield PlainKV(2, 256, dim=16), 1
        yield Quantized(2, 256), 1
        yield Latent(2, 256), 1
        yield Hybrid(2, 256, 64, dim=16), 1
        return
    yield PlainKV(16, 4096), 5
    yield Quantized(32, 4096), 5
    yield Latent(27, 4096), 5
    yield Hybrid(24, 4096, 1024), 5
    yield PlainKV(32, 4096), 3


def saved_in(store: Store, load: Workload, caches: Sequence[Any] | None = None) -> Saved:
    return store.save(load.tokens, load.caches() if caches is None else caches, IDENTITY)


def fsync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def peer_path(folder: str) -> str:
    return os.path.join(folder, "cache.safetensors")


def saves_safetensors(load: Workload, *, sync: bool = False, grow: int = 0) -> Contender:
    """mlx-lm's save_prompt_cache of a workload, after growing by some tokens."""

    def contender(folder: str) -> Generator[None]:
        caches, path = load.peers(), peer_path(folder)
        if grow:
            load.append(caches, load.rows(grow))
        yield
        save_prompt_cache(path, caches)
        if sync:
            fsync_file(path)
        yield
        require(os.path.getsize(path) >= load.bytes + grow * load.token_bytes, "save_prompt_cache wrote too little")

    return contender


def loads_safetensors(load: Workload) -> Contender:
    """mlx-lm's load_prompt_cache up to and including the first append of one token, evaluated."""

    def contender(folder: str) -> Generator[None]:
        save_prompt_cache(peer_path(folder), load.peers())
        token = load.rows(1)
        yield
        caches = load_prompt_cache(peer_path(folder))
        load.append(caches, token)
        yield
        require(same(caches, load.peers(), load.count), "load_prompt_cache gave other bytes")

    return contender
