"""Composed caches are saved and cloned as their storage, and composed again by the prototype of their layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import kvcodecs
from blockstore import IdentityMismatch, InvalidInput, Store
from cache_cases import Wrapped, bits, facts, feed, feed_planes
from golden_kit import PROVIDER, assert_shorter_load_is_a_trimmed_cache, continued, save, snapshot
from kvcodecs import CodecProvider, PrototypeMismatch, UnmatchedCache
from kvcodecs.codec import ClassCodec, ClassRef
from kvcodecs.kv import KVCodec
from store_kit import header_of
from token_caches import small_store

pytestmark = pytest.mark.mlx_lm


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store") as opened:
        yield opened


class Scaled(kvcodecs.KVCache):
    """A composed cache with behaviour of its own: returns what its storage holds, times `factor`."""

    def __init__(self, factor: float, storage: Any) -> None:
        super().__init__()
        self.factor, self.inner = factor, storage

    def storage(self) -> Any:
        return self.inner

    def over(self, storage: Any) -> "Scaled":
        return Scaled(self.factor, storage)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        first, second = self.inner.update_and_fetch(keys, values)
        return self.factor * first, self.factor * second


def filled(*chunks: int) -> Any:
    return feed(kvcodecs.KVCache(), *chunks)


def test_it_is_stored_as_its_storage() -> None:
    (part,), (expected,) = snapshot([Scaled(2.0, filled(9))], 9), snapshot([filled(9)], 9)
    assert part.entry == expected.entry
    assert [bits(array) for array in part.arrays] == [bits(array) for array in expected.arrays]
    assert PROVIDER.handles(Scaled(2.0, filled(9)))


@pytest.mark.parametrize("layout", ["segments", "rows"])
def test_it_is_composed_again_by_its_prototype(store: Store, layout: str) -> None:
    entry_id = save(store, [Scaled(2.0, filled(9)), filled(9)], 9, layout)
    prototypes = [Scaled(3.0, kvcodecs.KVCache()), kvcodecs.KVCache()]
    first, second = store.load(entry_id, prototypes).caches
    assert (type(first), first.factor, type(second)) == (Scaled, 3.0, kvcodecs.KVCache)
    assert facts(first.storage()) == facts(second) == facts(filled(9))
    assert prototypes[0].storage().empty()
    plain = [type(cache) for cache in store.load(entry_id).caches]
    assert plain == [kvcodecs.KVCache, kvcodecs.KVCache]
    ones = mx.ones((1, 2, 1, 64)), mx.ones((1, 2, 1, 32))
    kept = filled(9).update_and_fetch(*ones)
    assert [bits(side) for side in first.update_and_fetch(*ones)] == [bits(3.0 * side) for side in kept]


def test_what_was_stored_plain_can_be_composed(store: Store) -> None:
    entry_id = save(store, [feed(mlx_lm_cache.KVCache(), 9)], 9)
    (loaded,) = store.load(entry_id, [Wrapped(mlx_lm_cache.KVCache())]).caches
    assert (type(loaded), type(loaded.storage())) == (Wrapped, mlx_lm_cache.KVCache)
    (quantized,) = snapshot([filled(9).to_quantized(32, 4)], 9)
    prototype = Wrapped(kvcodecs.KVCache())
    codec = PROVIDER.for_entry(quantized.entry, prototype)
    assert type(codec.load(quantized.entry, quantized.arrays, prototype).storage()) is kvcodecs.QuantizedKVCache


def test_shorter_loads(store: Store) -> None:
    class Counted(Wrapped):
        offset = property(lambda self: self.storage().offset)

        def over(self, storage: Any) -> "Counted":
            return Counted(storage)

    assert_shorter_load_is_a_trimmed_cache(store, lambda: [Counted(filled(9))], 5, "segments")


def test_clones_are_composed_and_independent() -> None:
    original = Scaled(2.0, filled(9))
    (clone,) = PROVIDER.clone([original])
    assert (type(clone), clone.factor) == (Scaled, 2.0)
    assert clone.storage() is not original.storage()
    continued([clone.storage()])
    assert facts(original.storage()) == facts(filled(9))


def test_inside_a_list(store: Store) -> None:
    def caches(*chunks: int) -> list[Any]:
        parts = (
            Wrapped(feed(kvcodecs.RotatingKVCache(8), *chunks)),
            Wrapped(feed_planes(kvcodecs.MLACache(16, 8), *chunks)),
        )
        return [mlx_lm_cache.CacheList(*parts, feed(mlx_lm_cache.KVCache(), *chunks))]

    entry_id = save(store, caches(9), 9)
    assert [child.kind for child in header_of(store, entry_id).caches[0].children] == ["rotating", "mla", "kv"]
    loaded = store.load(entry_id, caches()).caches
    assert [type(child) for child in loaded[0].caches] == [Wrapped, Wrapped, mlx_lm_cache.KVCache]
    assert facts(loaded[0]) == facts(caches(9)[0])
    assert facts(PROVIDER.clone(loaded)[0]) == facts(caches(9)[0])
    assert continued(loaded) == continued(caches(9))


def test_prototypes_are_checked_by_their_storage(store: Store) -> None:
    entry_id = save(store, [Wrapped(feed_planes(kvcodecs.MLACache(16, 8), 9))], 9)
    for storage in (kvcodecs.MLACache(16, 4), kvcodecs.KVCache(), mlx_lm_cache.KVCache()):
        with pytest.raises(IdentityMismatch):
            store.load(entry_id, [Wrapped(storage)])
    (plain,) = snapshot([filled(9)], 9)
    prototype = Wrapped(Wrapped(kvcodecs.MLACache(16, 8)))
    with pytest.raises(PrototypeMismatch, match="kind"):
        PROVIDER.for_entry(plain.entry, prototype).check_prototype(plain.entry, prototype)


# ---- exactly one


@dataclass(frozen=True)
class ScaledCodec(KVCodec):
    """Claims a class that is composed, too."""


class Halfway:
    """Offers one of the two methods only."""

    def storage(self) -> Any:
        return kvcodecs.KVCache()


def test_a_storage_that_nobody_handles_is_named(store: Store) -> None:
    with pytest.raises(UnmatchedCache, match=r"no codec of provider mlx-cache-v5 matches builtins\.int"):
        PROVIDER.clone([Wrapped(7)])
    assert not PROVIDER.handles(Wrapped(7))
    with pytest.raises(InvalidInput, match=r"matches builtins\.NoneType"):
        save(store, [Wrapped(None)], 9)


@pytest.mark.parametrize("cache", [Halfway(), Wrapped])
def test_what_is_not_composed_is_not_taken_apart(cache: object) -> None:
    with pytest.raises(UnmatchedCache, match="no codec"):
        PROVIDER.for_cache(cache)


def test_a_codec_for_the_class_itself_makes_two() -> None:
    codec: ClassCodec = ScaledCodec("test", ClassRef.of(Scaled))
    provider = CodecProvider("test", (*PROVIDER.codecs, codec))
    cache = Scaled(2.0, filled(9))
    (entry,) = (part.entry for part in snapshot([filled(9)], 9))
    for use in (provider.for_cache, lambda cache: provider.for_entry(entry, cache)):
        with pytest.raises(
            UnmatchedCache, match=r"2 codecs of provider test match .*Scaled: ScaledCodec.*ComposedCodec"
        ):
            use(cache)
    assert not provider.handles(cache)
