"""Every class in every state through a real store: both cuts, both hashes, verified or not; then ten steps further."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import kvcodecs
from blockstore import InvalidInput, Store
from cache_cases import CASES, bits, continue_cache, feed, random_array, token_count
from kvcodecs import default_provider
from kvcodecs.algebra import SnapshotContext
from store_kit import all_facts, assert_clean, described
from token_caches import IDENTITY, small_store

pytestmark = pytest.mark.mlx_lm
Build = Callable[[], list[Any]]


def holds_something(build: Build) -> bool:
    """False for fresh caches, and for those that were trimmed to nothing."""
    caches = build()
    parts = default_provider().snapshot(caches, SnapshotContext(token_count(caches)))
    return any(not part.entry.is_empty for part in parts)


FILLED = {name: build for name, build in CASES.items() if holds_something(build)}
EMPTY = {name: build for name, build in CASES.items() if name not in FILLED}
LAYOUTS = ("segments", "rows")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Store]]:
    """One for each hash. Blocks of 64 tokens and about 8 KiB: the larger tensors are cut, and layers share blocks."""
    root = tmp_path_factory.mktemp("round-trip")
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context(small_store(root / name, hash=name, span=64, block_bytes=8192))
            for name in ("blake3", "sha256")
        }
        yield opened
        for store in opened.values():
            assert_clean(store)


@pytest.fixture(scope="module")
def store(stores: dict[str, Store]) -> Store:
    return stores["blake3"]


def tokens_of(caches: list[Any]) -> list[int]:
    return list(range(token_count(caches)))


def continued(caches: list[Any]) -> list[object]:
    return [bits(array) for i, cache in enumerate(caches) for array in continue_cache(cache, 1000 * i)]


@pytest.mark.parametrize("build", FILLED.values(), ids=FILLED)
def test_what_is_loaded_is_what_was_saved_and_goes_on_as_if_nothing_had_happened(
    build: Build, stores: dict[str, Store]
) -> None:
    kept, source, prototypes = build(), build(), build()
    tokens, expected, says = tokens_of(kept), all_facts(kept), described(kept, token_count(kept))
    steps = continued(kept)
    for layout, store in itertools.product(LAYOUTS, stores.values()):
        saved = store.save(tokens, source, IDENTITY, layout=layout)
        verify = store is stores["blake3"]
        loaded, other = (store.load(saved.entry_id, prototypes, verify=how) for how in (verify, not verify))
        ours = store.load(saved.entry_id, verify=verify)
        assert loaded.tokens == tokens
        assert all_facts(loaded.caches) == all_facts(other.caches) == expected
        assert described(ours.caches, len(tokens)) == says
        if verify:
            goes_on = loaded if layout == "segments" else ours
            assert continued(goes_on.caches) == steps
        store.remove(saved.entry_id)


@pytest.mark.parametrize("build", EMPTY.values(), ids=EMPTY)
def test_a_list_that_holds_nothing_is_refused(build: Build, store: Store) -> None:
    with pytest.raises(InvalidInput, match="empty"):
        store.save([1], build(), IDENTITY)


# ---- lists


def full_and_empty() -> list[Any]:
    """Empty layers among full ones, as a model leaves them that skips layers."""
    ring = feed(kvcodecs.RotatingKVCache(8), 8, 1)
    return [
        kvcodecs.KVCache(),
        feed(kvcodecs.KVCache(), 9),
        kvcodecs.RotatingKVCache(8),
        ring,
        kvcodecs.QuantizedKVCache(group_size=32),
    ]


def every_kind() -> list[Any]:
    recurrent = kvcodecs.RecurrentCache()
    recurrent[0], recurrent[1] = random_array(1, (1, 3, 8), mx.bfloat16), random_array(2, (1, 4, 2))
    recurrent.advance(9)
    quantized = feed(kvcodecs.QuantizedKVCache(group_size=32, bits=4), 9)
    return [
        feed(kvcodecs.KVCache(), 9), feed(kvcodecs.RotatingKVCache(8, 2), 8, 1), quantized, recurrent,
        feed(kvcodecs.KVCache(), 9, dtype=mx.bfloat16), feed(kvcodecs.KVCache(), 9, dims=(16, 48)),
        feed(kvcodecs.RotatingQuantizedKVCache(8, 1, group_size=32, bits=8), 5, 1, 1, 1, 1),
    ]  # fmt: skip


def nested_lists() -> list[Any]:
    lists, plain = mlx_lm_cache.CacheList, mlx_lm_cache.KVCache
    ring = feed(mlx_lm_cache.RotatingKVCache(8, keep=1), 8, 1)
    deep = lists(feed(plain(), 9), lists(feed(plain(), 9, dims=(8, 8)), plain()))
    return [lists(ring, deep), feed(plain(), 9), lists(feed(plain(), 9))]


def batch_of_two() -> list[Any]:
    return [feed(kvcodecs.KVCache(), 6, 3, batch=2), feed(kvcodecs.RotatingKVCache(8), 6, 1, 1, 1, batch=2)]


LISTS: dict[str, Build] = {
    "empty layers among full ones": full_and_empty, "every kind": every_kind, "nested": nested_lists,
    "batch of 2": batch_of_two,
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("build", LISTS.values(), ids=LISTS)
def test_lists_of_several_kinds_come_back(build: Build, layout: str, store: Store) -> None:
    saved = store.save(list(range(9)), build(), IDENTITY, layout=layout)
    loaded = store.load(saved.entry_id, build())
    assert all_facts(loaded.caches) == all_facts(build())
    assert continued(loaded.caches) == continued(build())


# ---- strides

ARRANGED: dict[str, Callable[[mx.array], mx.array]] = {
    "as made": lambda array: array,
    "heads and tokens swapped": lambda array: array.transpose(0, 2, 1, 3),
    "tokens last": lambda array: array.transpose(0, 1, 3, 2),
    "every second row": lambda array: array[:, :, ::2],
    "backwards": lambda array: array[:, :, ::-1],
    "one row for all": lambda array: mx.broadcast_to(array[:, :, :1], array.shape),
    "a part of a larger one": lambda array: array[:, 1:, 3:11, 2:6],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("arrange", ARRANGED.values(), ids=ARRANGED)
def test_arrays_of_any_strides_come_back(
    arrange: Callable[[mx.array], mx.array], dtype: mx.Dtype, layout: str, store: Store
) -> None:
    arrays = [arrange(random_array(seed, (2, 16, 16, 16), dtype)) for seed in range(2)]
    cache = mlx_lm_cache.ConcatenateKVCache()
    cache.keys, cache.values = arrays
    cache.offset = count = arrays[0].shape[2]
    saved = store.save(list(range(count)), [cache], IDENTITY, layout=layout)
    [loaded] = store.load(saved.entry_id, [mlx_lm_cache.ConcatenateKVCache()]).caches
    live = [array[:, :, :count] for array in (loaded.keys, loaded.values)]
    assert [bits(array) for array in live] == [bits(array) for array in arrays]


# ---- a live cache

# Of each class the states whose next steps write in place, or move what is there. That a snapshot is independent in all
# the others, too, is what the codecs' own tests say.
STATES = (
    "one past 256",
    "regrown",
    "wrapped",
    "longer than",
    "chunk",
    "set",
    "least length",
    "nested",
    "hybrid",
    "layer",
)
WRITTEN = {name: build for name, build in FILLED.items() if any(state in name for state in STATES)}


@pytest.mark.parametrize("build", [*LISTS.values(), *WRITTEN.values()], ids=[*LISTS, *WRITTEN])
def test_a_cache_that_goes_on_between_prepare_and_commit_leaves_what_is_stored_alone(
    build: Build, store: Store
) -> None:
    caches, prototypes, expected = build(), build(), all_facts(build())
    prepared = [store.prepare(tokens_of(caches), caches, IDENTITY, layout=layout) for layout in LAYOUTS]
    for cache in caches:
        if hasattr(cache, "is_trimmable") and cache.is_trimmable():
            cache.trim(2)
    for i, cache in enumerate(caches):
        continue_cache(cache, 1000 * i, steps=4)
    for part in prepared:
        saved = store.commit(part)
        assert all_facts(store.load(saved.entry_id, prototypes).caches) == expected
        store.remove(saved.entry_id)
