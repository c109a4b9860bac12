"""Small caches of every class in many states, and how to go on with them: shared by the tests that save and load.

CASES           name -> function that builds a cache list, the same bytes each time
token_count     how many tokens such a list encodes
facts           everything that counts of a cache, comparable with ==; caches_equal compares two
continue_cache  the next steps of a cache, and what each of them returned
reload          snapshots -> new caches, in memory
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

import kvcodecs
from kvcodecs.algebra import Snapshot

try:
    from mlx_lm.models.deepseek_v41 import LayerCache
except ImportError:  # mlx-lm before 0.32
    LayerCache = None

STEPS = (1, 1, 3, 1, 2, 1, 1, 5, 1, 1)  # tokens of each step of continue_cache; one token, or several, act differently
ARRAY_TOKENS = 9  # what a list is said to encode whose caches do not count
UINTS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


# ---- building


def random_array(seed: int, shape: Sequence[int], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(tuple(shape), key=mx.random.key(seed)).astype(dtype)


def feed(
    cache: Any,
    *chunks: int,
    batch: int = 1,
    dims: tuple[int, int] = (64, 32),
    dtype: mx.Dtype = mx.float32,
    transposed: bool = False,
) -> Any:
    """Append chunks of random tokens, two heads each; a negative number trims."""
    for chunk in chunks:
        if chunk < 0:
            assert cache.trim(-chunk) == -chunk
            continue
        keys, values = (
            _tokens(cache.offset * 2 + i, batch, chunk, dim, dtype, transposed) for i, dim in enumerate(dims)
        )
        mx.eval(cache.update_and_fetch(keys, values))
    return cache


def _tokens(seed: int, batch: int, count: int, dim: int, dtype: mx.Dtype, transposed: bool) -> mx.array:
    if transposed:
        return random_array(seed, (batch, count, 2, dim), dtype).transpose(0, 2, 1, 3)
    return random_array(seed, (batch, 2, count, dim), dtype)


Case = Callable[[], list[Any]]
Histories = dict[str, tuple[tuple[int, ...], dict[str, Any]]]

# name of a state -> chunks (negative: trim), and how they are made
STRAIGHT: Histories = {
    "fresh": ((), {}),
    "partly filled": ((5, 1, 1), {}),
    "one short of 256": ((255,), {}),
    "at 256": ((256,), {}),
    "one past 256": ((256, 1), {}),
    "trimmed": ((20, -7), {}),
    "trimmed to nothing": ((6, -6), {}),
    "trimmed and regrown": ((20, -7, 3, 1), {}),
    "trimmed and regrown past 256": ((257, -10, 60), {}),
    "batch of 2": ((6, 1), {"batch": 2}),
    "transposed": ((6, 1), {"transposed": True}),
    "bfloat16": ((6, 1), {"dtype": mx.bfloat16}),
    "float16": ((6, 1), {"dtype": mx.float16}),
}
ZERO_WIDTH: Histories = {"values without width": ((6, 1), {"dims": (32, 0)})}
# for rings of 8 rows, keep up to 3
RINGS: Histories = {
    "fresh": ((), {}),
    "not full, token by token": ((1, 1, 1), {}),
    "not full": ((5,), {}),
    "not full, then one": ((5, 1), {}),
    "full": ((5, 1, 1, 1), {}),
    "full at once": ((8,), {}),
    "wrapped": ((5, *[1] * 6), {}),
    "wrapped twice": ((5, *[1] * 16), {}),
    "longer than its window": ((13,), {}),
    "longer, then one": ((13, 1), {}),
    "longer after a wrap": ((5, *[1] * 6, 4), {}),
    "trimmed": ((7, -3), {}),
    "trimmed to nothing": ((7, -7), {}),
    "trimmed and regrown": ((7, -3, 1, 1), {}),
    "batch of 2, wrapped": ((5, *[1] * 5), {"batch": 2}),
    "transposed": ((6,), {"transposed": True}),
    "transposed, wrapped": ((6, 1, 1, 1, 1), {"transposed": True}),
    "bfloat16, wrapped": ((5, *[1] * 5), {"dtype": mx.bfloat16}),
    "float16, wrapped": ((5, *[1] * 5), {"dtype": mx.float16}),
}
LARGE_RING: Histories = {
    "at 256 of 300": ((256,), {}),
    "past 256 of 300": ((255, 1, 1), {}),
    "300 of 300": ((299, 1), {}),
    "past 300 of 300": ((299, 1, 1), {}),
}


def _histories(name: str, make: Callable[[], Any], histories: Histories) -> dict[str, Case]:
    def case(chunks: tuple[int, ...], how: dict[str, Any]) -> Case:
        return lambda: [feed(make(), *chunks, **how)]

    return {f"{name}: {state}": case(chunks, how) for state, (chunks, how) in histories.items()}


def _library(name: str, library: Any) -> dict[str, Case]:
    """The kinds that our classes and mlx-lm's share."""

    def quantized_while_running() -> list[Any]:
        return [feed(feed(library.KVCache(), 6, 1).to_quantized(group_size=32, bits=4), 2, 1)]

    return {
        **_histories(f"{name} kv", library.KVCache, {**STRAIGHT, **ZERO_WIDTH}),
        **_histories(f"{name} qkv", lambda: library.QuantizedKVCache(group_size=32, bits=8), STRAIGHT),
        **_histories(f"{name} rotating", lambda: library.RotatingKVCache(max_size=8), RINGS),
        **_histories(f"{name} rotating keep 3", lambda: library.RotatingKVCache(max_size=8, keep=3), RINGS),
        **_histories(f"{name} rotating large", lambda: library.RotatingKVCache(max_size=300), LARGE_RING),
        f"{name} qkv: quantized while running": quantized_while_running,
    }


def _quantized_ring(keep: int) -> Any:
    return kvcodecs.RotatingQuantizedKVCache(8, keep, group_size=32, bits=4)


def _ours() -> dict[str, Case]:
    def recurrent(dtype: mx.Dtype = mx.float32, batch: int = 1) -> list[Any]:
        cache = kvcodecs.RecurrentCache()
        cache[0] = random_array(1, (batch, 3, 8), dtype)
        cache[1] = random_array(2, (batch, 4, 2, 2), mx.float32).transpose(0, 2, 1, 3)
        cache.advance(11)
        return [cache]

    def limited() -> list[Any]:
        cache = feed(kvcodecs.KVCache(), 9)
        cache.minimum_reusable_offset = 4
        return [cache]

    def quantized_while_running() -> list[Any]:
        return [feed(feed(kvcodecs.RotatingKVCache(8, 2), 6, 1, 1, 1).to_quantized(group_size=32, bits=8), 1)]

    return {
        **_histories("ours rotating-qkv", lambda: _quantized_ring(0), RINGS),
        **_histories("ours rotating-qkv keep 3", lambda: _quantized_ring(3), RINGS),
        "ours rotating-qkv: quantized while running": quantized_while_running,
        "ours kv: with a least length": limited,
        "ours ssm: set": recurrent,
        "ours ssm: bfloat16, batch of 2": lambda: recurrent(mx.bfloat16, 2),
    }


# ---- kinds that no class of mlx-lm's has


def new_planes(cache: Any, seed: int, count: int, batch: int = 1) -> tuple[mx.array, ...]:
    """`count` random tokens, as the planes that a turboquant or mla cache keeps; two heads where it has heads."""
    leading = cache.planes[0].shape[:-2] if cache.planes else (batch, 2)[: cache.rank - 2]
    return tuple(
        _random_plane(seed + i, (*leading, count, width), dtype) for i, (dtype, width) in enumerate(cache.layout)
    )


def _random_plane(seed: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if mx.issubdtype(dtype, mx.floating):
        return random_array(seed, shape, dtype)
    return mx.random.randint(0, 256, shape, key=mx.random.key(seed)).astype(dtype)


def feed_planes(cache: Any, *chunks: int, batch: int = 1) -> Any:
    """As feed, for caches of named planes."""
    for chunk in chunks:
        if chunk < 0:
            assert cache.trim(-chunk) == -chunk
        else:
            mx.eval(cache.append(*new_planes(cache, 10 * cache.offset, chunk, batch)))
    return cache


def _with_minimum(cache: Any, minimum: int | None) -> Any:
    cache.minimum_reusable_offset = minimum
    return cache


def _named_planes(name: str, make: Callable[[], Any]) -> dict[str, Case]:
    return {
        f"ours {name}: partly filled": lambda: [feed_planes(make(), 5, 1, 1)],
        f"ours {name}: past 256, regrown": lambda: [feed_planes(make(), 257, -10, 60)],
        f"ours {name}: batch of 2": lambda: [feed_planes(make(), 6, 1, batch=2)],
        f"ours {name}: no least length": lambda: [_with_minimum(feed_planes(make(), 9), None)],
        f"ours {name}: with a least length": lambda: [_with_minimum(feed_planes(make(), 9), 4)],
    }


def _pages(*chunks: int, capacity: int = 40, bits: int | None = None, **how: Any) -> list[Any]:
    quantization = None if bits is None else (32, bits)
    return [feed(kvcodecs.PagedKVCache(capacity, 4, quantization), *chunks, **how)]


def _shuffled_pages() -> list[Any]:
    """A table that is not in order, with a page to spare: as another writer may have left it."""
    (cache,) = _pages(7, 1, 1)
    cache.block_table = [6, 0, 9, 3]
    return [cache]


class Wrapped:
    """A composed cache: what it holds, its storage holds."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def storage(self) -> Any:
        return self._storage

    def over(self, storage: Any) -> "Wrapped":
        return Wrapped(storage)

    def is_trimmable(self) -> bool:
        return bool(self._storage.is_trimmable())

    def trim(self, n: int) -> int:
        return int(self._storage.trim(n))


def _foreign() -> dict[str, Case]:
    def turboquant(k_bits: int, v_bits: int) -> Callable[[], Any]:
        return lambda: kvcodecs.TurboQuantKVCache(k_bits, v_bits, 64)

    return {
        **_named_planes("turboquant 4 and 3 bits", turboquant(4, 3)),
        **_named_planes("turboquant 8 and 4 bits", turboquant(8, 4)),
        **_named_planes("mla", lambda: kvcodecs.MLACache(16, 8)),
        **_named_planes("mla-dsa", lambda: kvcodecs.MLADSACache(16, 8, 4, max_tokens=1000)),
        **_named_planes("mtp-mla", lambda: kvcodecs.MTPMLACache(16, 8)),
        "ours paged: part of a page": lambda: _pages(3),
        "ours paged: token by token": lambda: _pages(*[1] * 9),
        "ours paged: full pages, bfloat16": lambda: _pages(8, 4, dtype=mx.bfloat16),
        "ours paged: trimmed and regrown": lambda: _pages(11, -6, 9),
        "ours paged: grown": lambda: _pages(7, 5, 1, capacity=6),
        "ours paged: shuffled": _shuffled_pages,
        "ours paged: transposed": lambda: _pages(6, 1, transposed=True),
        "ours paged: 4 bits": lambda: _pages(6, 1, 8, bits=4),
        "ours paged: 8 bits, float16, grown": lambda: _pages(6, 1, 8, capacity=6, bits=8, dtype=mx.float16),
        "composed over kv": lambda: [Wrapped(feed(kvcodecs.KVCache(), 9))],
        "composed twice": lambda: [Wrapped(Wrapped(feed(kvcodecs.RotatingKVCache(8), 5, *[1] * 6)))],
        "composed over mla": lambda: [Wrapped(feed_planes(kvcodecs.MLACache(16, 8), 9))],
        "composed in a list": lambda: [
            mlx_lm_cache.CacheList(Wrapped(feed(mlx_lm_cache.KVCache(), 9)), feed(kvcodecs.KVCache(), 9))
        ],
    }


def _chunked(*steps: int) -> Any:
    """0 trims the front, as llama4 does before each step."""
    cache = mlx_lm_cache.ChunkedKVCache(256)
    for step in steps:
        if step:
            feed(cache, step)
        else:
            cache.maybe_trim_front()
    return cache


def _arrays(*slots: bool, lengths: list[int] | None = None, left_padding: list[int] | None = None) -> Any:
    batch = len(lengths or left_padding or [0])
    cache = mlx_lm_cache.ArraysCache(len(slots), left_padding)
    for i, is_set in enumerate(slots):
        if is_set:
            cache[i] = random_array(i, (batch, 3 + i, 4), mx.bfloat16 if i % 2 else mx.float32)
    if lengths is not None:
        cache.prepare(lengths=lengths)
    return cache


def _nested() -> list[Any]:
    inner = mlx_lm_cache.CacheList(feed(mlx_lm_cache.KVCache(), 9, dims=(32, 0)), _arrays(True, False))
    ring = feed(mlx_lm_cache.RotatingKVCache(8, keep=1), 8, 1)
    return [mlx_lm_cache.CacheList(feed(mlx_lm_cache.KVCache(), 9), inner, ring)]


def _hybrid() -> list[Any]:
    ring = mlx_lm_cache.RotatingKVCache(8)
    return [feed(mlx_lm_cache.KVCache(), 8, 1), feed(ring, 8, 1), _arrays(True, True), feed(mlx_lm_cache.KVCache(), 9)]


def _mlx_lm() -> dict[str, Case]:
    lists = mlx_lm_cache.CacheList
    cases: dict[str, Case] = {
        **_histories(
            "mlx-lm concatenate", mlx_lm_cache.ConcatenateKVCache, {"fresh": ((), {}), "filled": ((5, 1), {})}
        ),
        "mlx-lm chunked: fresh": lambda: [_chunked()],
        "mlx-lm chunked: first chunk": lambda: [_chunked(0, 5, 0, 1)],
        "mlx-lm chunked: exactly one chunk": lambda: [_chunked(0, 256)],
        "mlx-lm chunked: before its front is trimmed": lambda: [_chunked(0, 256, 0, 44)],
        "mlx-lm chunked: front trimmed": lambda: [_chunked(0, 256, 0, 44, 0)],
        "mlx-lm chunked: gone on": lambda: [_chunked(0, 256, 0, 44, 0, 1)],
        "mlx-lm arrays: fresh": lambda: [_arrays(False, False)],
        "mlx-lm arrays: all set": lambda: [_arrays(True, True)],
        "mlx-lm arrays: some set": lambda: [_arrays(False, True, True, False)],
        "mlx-lm arrays: one slot": lambda: [_arrays(True)],
        "mlx-lm arrays: lengths": lambda: [_arrays(True, True, lengths=[4, 7])],
        "mlx-lm arrays: left padding": lambda: [_arrays(True, False, left_padding=[2, 0])],
        "mlx-lm list: fresh": lambda: [lists(mlx_lm_cache.KVCache(), mlx_lm_cache.RotatingKVCache(8))],
        "mlx-lm list: two": lambda: [lists(feed(mlx_lm_cache.KVCache(), 9), feed(mlx_lm_cache.KVCache(), 8, 1))],
        "mlx-lm list: concatenate inside": lambda: [lists(feed(mlx_lm_cache.ConcatenateKVCache(), 9))],
        "mlx-lm list: nested": _nested,
        "mlx-lm hybrid model": _hybrid,
    }
    if LayerCache is not None:
        cases |= {
            "mlx-lm layer cache: fresh": lambda: [LayerCache(4)],
            "mlx-lm layer cache: partly filled": lambda: [_layers(3)],
            "mlx-lm layer cache: window full": lambda: [_layers(3, 1, 5)],
        }
    return cases


def _layers(*steps: int) -> Any:
    cache = LayerCache(4)
    for i, step in enumerate(steps):
        _step_layer(cache, i, step)
    return cache


CASES: dict[str, Case] = {
    **_library("ours", kvcodecs),
    **_ours(),
    **_foreign(),
    **_library("mlx-lm", mlx_lm_cache),
    **_mlx_lm(),
}


# ---- looking


def token_count(caches: Sequence[Any]) -> int:
    """How many tokens the list encodes; 1 where no cache holds any yet."""
    return max([1, *map(_tokens_of, caches)])


def _tokens_of(cache: Any) -> int:
    if hasattr(cache, "storage"):
        return _tokens_of(cache.storage())
    if hasattr(cache, "caches"):
        return max(map(_tokens_of, cache.caches), default=0)
    offset = getattr(cache, "offset", None)
    return ARRAY_TOKENS * (not cache.empty()) if offset is None else int(offset)


def bits(array: mx.array) -> tuple[tuple[int, ...], str, bytes]:
    """Shape, dtype and bytes in C order: equal only where the arrays are bit for bit."""
    raw = array if array.dtype == mx.bool_ else array.view(UINTS[array.dtype.size])
    return tuple(array.shape), str(array.dtype), np.array(raw).tobytes()


def arrays_of(cache: Any) -> list[mx.array]:
    """The cache's own array objects, at their capacity."""
    if hasattr(cache, "storage"):
        return arrays_of(cache.storage())
    if hasattr(cache, "caches"):
        return [array for child in cache.caches for array in arrays_of(child)]
    found = cache.cache if hasattr(cache, "cache") else vars(cache).values()
    flat = [item for value in found for item in (value if isinstance(value, tuple | list) else [value])]
    return [item for item in flat if isinstance(item, mx.array)]


def facts(cache: Any) -> object:
    """Class, numbers, and the live part of each array; of pages, all."""
    if hasattr(cache, "storage"):
        return type(cache), facts(cache.storage())
    if hasattr(cache, "caches"):
        return type(cache), [facts(child) for child in cache.caches]
    if hasattr(cache, "cache"):
        lengths = [None if x is None else x.tolist() for x in (cache.lengths, cache.left_padding)]
        return type(cache), [None if array is None else bits(array) for array in cache.cache], lengths
    numbers = {name: value for name, value in vars(cache).items() if type(value) is int}
    live = arrays_of(cache)
    if hasattr(cache, "block_table"):
        return type(cache), numbers, [*cache.block_table], cache.quantization, [bits(array) for array in live]
    if hasattr(cache, "update_and_fetch") or hasattr(cache, "planes"):
        count = cache.offset - getattr(cache, "start_position", 0)
        live = [array[..., :count, :] for array in live] if count else []
    return type(cache), numbers, [bits(array) for array in live]


def caches_equal(a: Any, b: Any) -> bool:
    return facts(a) == facts(b)


# ---- going on


def continue_cache(cache: Any, seed: int, steps: int = len(STEPS)) -> list[mx.array]:
    """Go on for some steps, of one token or several, and return what each of them returned. Evaluated."""
    returned = [array for i in range(steps) for array in _step(cache, seed + i, STEPS[i % len(STEPS)])]
    mx.eval(returned)
    return returned


def _step(cache: Any, seed: int, count: int) -> list[mx.array]:
    if hasattr(cache, "caches"):
        return [array for i, child in enumerate(cache.caches) for array in _step(child, seed + 100 * i, count)]
    if hasattr(cache, "storage"):
        return _step(cache.storage(), seed, count)
    if hasattr(cache, "planes"):
        planes = cache.append(*new_planes(cache, seed, count))
        mx.eval(planes)  # now, as below
        return [mx.array(plane) for plane in planes]
    if hasattr(cache, "update_window"):
        return _step_layer(cache, seed, count)[1]
    if not hasattr(cache, "update_and_fetch"):
        return _step_slots(cache, seed, count)
    if hasattr(cache, "maybe_trim_front"):
        cache.maybe_trim_front()
    batch, heads, dims, dtype = _shape(cache)
    keys, values = (random_array(seed * 2 + i, (batch, heads, count, dim), dtype) for i, dim in enumerate(dims))
    fetched = cache.update_and_fetch(keys, values)
    arrays = [array for side in fetched for array in ([side] if isinstance(side, mx.array) else side)]
    mx.eval(arrays)  # now: a later step may write into the memory that these look at
    return [mx.array(array) for array in arrays]


def _shape(cache: Any) -> tuple[int, int, tuple[int, int], mx.Dtype]:
    """Batch, heads, widths and dtype of what the cache takes."""
    if hasattr(cache, "block_table"):
        return 1, cache.keys.shape[1], (cache.head_dim, cache.v_head_dim), cache.dtype
    if cache.keys is None:
        return 1, 2, (64, 32), mx.float32
    if isinstance(cache.keys, mx.array):
        return *cache.keys.shape[:2], (cache.keys.shape[3], cache.values.shape[3]), cache.keys.dtype
    dims = tuple(side[0].shape[3] * 32 // cache.bits for side in (cache.keys, cache.values))
    return *cache.keys[0].shape[:2], dims, cache.keys[1].dtype


def _step_slots(cache: Any, seed: int, count: int) -> list[mx.array]:
    size = len(getattr(cache, "cache", (0, 1)))
    for i in range(size):
        old = cache[i]
        new = random_array(seed + i, (1, 3, 4) if old is None else old.shape)
        cache[i] = new if old is None else (old * 0.5 + new).astype(old.dtype)
    cache.advance(count)
    mask = cache.make_mask(3)
    return [mx.array(array) for array in [*(cache[i] for i in range(size)), *([] if mask is None else [mask])]]


def _step_layer(cache: Any, seed: int, count: int) -> tuple[Any, list[mx.array]]:
    """deepseek_v41's LayerCache: a window, groups of two tokens, and the token that waits for its group."""
    new = random_array(seed, (1, count, 6))
    window = cache.update_window(new)
    pending = new if cache.pending_kv is None else mx.concatenate([cache.pending_kv, new], axis=1)
    full = pending.shape[1] // 2 * 2
    groups = pending[:, :full:2]
    cache.pending_kv = cache.pending_gate = pending[:, full:]
    cache.compress_kv = groups if cache.compress_kv is None else mx.concatenate([cache.compress_kv, groups], axis=1)
    return cache, [window, cache.compress_kv, cache.pending_kv]


# ---- loading in memory


def reload(snapshots: Sequence[Snapshot], prototypes: Sequence[Any] | None = None, stale: int = 7) -> list[Any]:
    """New caches from snapshots. What lies beyond the stored tokens holds `stale`, which must not matter."""
    provider = kvcodecs.default_provider()
    caches = []
    for snapshot, prototype in zip(snapshots, prototypes or [None] * len(snapshots), strict=True):
        codec = provider.for_entry(snapshot.entry, prototype)
        codec.check_prototype(snapshot.entry, prototype)
        shapes = [codec.capacity(snapshot.entry, i, prototype) for i in range(len(snapshot.arrays))]
        arrays = [_placed(array, shape, stale) for array, shape in zip(snapshot.arrays, shapes, strict=True)]
        caches.append(codec.load(snapshot.entry, arrays, prototype))
    return caches


def _placed(array: mx.array, shape: tuple[int, ...], stale: int) -> mx.array:
    target = mx.full(shape, stale, dtype=array.dtype)
    target[tuple(slice(0, size) for size in array.shape)] = array
    mx.eval(target)
    return target
