"""Kinds mla, mla-dsa and mtp-mla: a layer takes back what has its own kind and geometry, and nothing else."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import kvcodecs
from blockstore import IdentityMismatch, InvalidInput, Store
from cache_cases import CASES, bits, facts, feed, feed_planes, new_planes, random_array
from golden_kit import (
    PROVIDER,
    assert_golden_comes_back,
    assert_shorter_load_is_a_trimmed_cache,
    continued,
    golden_header,
    loaded_from,
    refused,
    save,
    snapshot,
)
from kvcodecs import CodecError, HeaderEntry, PrototypeMismatch
from kvcodecs.geometry import list_shortens, minimum_reusable, shortened
from store_kit import block_names, block_path, flip, header_of
from token_caches import IDENTITY, small_store

pytestmark = pytest.mark.mlx_lm
LIMIT = (1 << 53) - 1
MAKERS: dict[str, Callable[[], Any]] = {
    "mla": lambda: kvcodecs.MLACache(16, 8),
    "mla-dsa": lambda: kvcodecs.MLADSACache(16, 8, 4),
    "mtp-mla": lambda: kvcodecs.MTPMLACache(16, 8),
}
each_kind = pytest.mark.parametrize("kind", MAKERS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store") as opened:
        yield opened


def filled(kind: str, *chunks: int) -> Any:
    return feed_planes(MAKERS[kind](), *chunks)


def entry_of(cache: Any) -> HeaderEntry:
    return snapshot([cache], cache.offset)[0].entry


@pytest.mark.parametrize("name", [f"{version}{kind}" for version in ("v3-", "v4-", "v5/") for kind in MAKERS])
def test_golden_files_come_back(name: str) -> None:
    assert_golden_comes_back(f"{name}.mlxkv")


@each_kind
def test_what_is_stored(kind: str) -> None:
    entry = entry_of(filled(kind, 5))
    dsa = {"dsaHeadDim": 4} if kind == "mla-dsa" else {}
    most = LIMIT if kind == "mtp-mla" else 131072
    fields = {"kvLoraRank": 16, "ropeHeadDim": 8, **dsa, "maxTokens": most}
    assert (entry.kind, entry.offset, list(entry.fields.items())) == (kind, 5, list(fields.items()))
    assert [slot.shape for slot in entry.tensors] == [(1, 5, 16), (1, 5, 8), (1, 5, 4)][: 3 if dsa else 2]
    assert {slot.dtype for slot in entry.tensors} == {10}
    assert entry.minimum_reusable_offset is None
    assert minimum_reusable(entry) == 0


@each_kind
@pytest.mark.parametrize("layout", ["segments", "rows"])
@pytest.mark.parametrize("length", [1, 8, 260])
def test_a_shorter_load(store: Store, kind: str, layout: str, length: int) -> None:
    assert_shorter_load_is_a_trimmed_cache(store, lambda: [filled(kind, 257, 5), filled(kind, 262)], length, layout)


@each_kind
def test_a_longer_entry_shares_the_blocks_of_a_shorter_one(store: Store, kind: str) -> None:
    first = store.save(list(range(8)), [filled(kind, 8)], IDENTITY)
    second = store.save(list(range(10)), [filled(kind, 8, 2)], IDENTITY)
    assert (first.blocks_reused, second.blocks_reused) == (0, first.blocks_written)


@each_kind
def test_a_minimum_limits_them_as_any_other(store: Store, kind: str) -> None:
    cache = filled(kind, 9)
    cache.minimum_reusable_offset = 4
    entry_id = save(store, [cache], 9)
    assert store.load(entry_id, length=4).caches[0].minimum_reusable_offset == 4
    with pytest.raises(InvalidInput, match="cannot be cut"):
        store.load(entry_id, length=3)


# ---- a token behind


@pytest.mark.parametrize("layout", ["segments", "rows"])
def test_a_prediction_layer_may_be_a_token_behind(store: Store, layout: str) -> None:
    def caches() -> list[Any]:
        return [filled("mla", 9), filled("mtp-mla", 8)]

    entry_id = save(store, caches(), 9, layout)
    assert list_shortens(header_of(store, entry_id).caches)
    whole = store.load(entry_id, caches())
    assert [cache.offset for cache in whole.caches] == [9, 8]
    assert list(map(facts, whole.caches)) == list(map(facts, caches()))
    assert continued(whole.caches) == continued(caches())
    for length in (8, 5):
        assert [cache.offset for cache in store.load(entry_id, length=length).caches] == [length, length]


def test_an_entry_that_is_behind_stays_while_it_fits() -> None:
    entry = entry_of(filled("mtp-mla", 8))
    assert shortened(entry, 9) is entry
    assert shortened(entry, 8) is entry
    assert shortened(entry, 7).offset == 7


@pytest.mark.parametrize(("kind", "offset"), [("mla", 8), ("mla-dsa", 8), ("mtp-mla", 7), ("mtp-mla", 10)])
def test_nobody_may_be_further_behind_or_ahead(store: Store, kind: str, offset: int) -> None:
    with pytest.raises(InvalidInput, match="does not encode the tokens given"):
        save(store, [filled("mla", 9), filled(kind, offset)], 9)


# ---- the classes


@each_kind
def test_appended_tokens_stand_one_behind_the_other(kind: str) -> None:
    cache = MAKERS[kind]()
    one, two = new_planes(cache, 1, 255), new_planes(cache, 2, 3)
    cache.append(*one)
    assert cache.latent.shape == (1, 256, 16)
    found = cache.append(*two)
    assert [bits(plane) for plane in found] == [
        bits(mx.concatenate(list(pair), axis=1)) for pair in zip(one, two, strict=True)
    ]
    assert (cache.size(), cache.rope.shape, cache.is_trimmable()) == (258, (1, 511, 8), True)
    assert cache.nbytes == sum(plane.nbytes for plane in cache.state)
    assert (cache.trim(250), cache.offset, cache.trim(100), cache.offset) == (250, 8, 8, 0)


def test_loaded_caches_have_room_for_the_next_token() -> None:
    (part,) = snapshot([filled("mla", 256)], 256)
    loaded = loaded_from(part.entry, part.arrays)
    size = loaded.nbytes
    feed_planes(loaded, 1)
    assert (loaded.nbytes, loaded.latent.shape) == (size, (1, 512, 16))


def test_what_does_not_fit_is_refused() -> None:
    cache = feed_planes(kvcodecs.MLACache(16, 8, max_tokens=4), 3)
    latent, rope = random_array(0, (1, 1, 16)), random_array(1, (1, 1, 8))
    for wrong in (
        (latent.astype(mx.float16), rope),
        (rope, latent),
        (latent[0], rope[0]),
        (latent, mx.zeros((1, 2, 8))),
    ):
        with pytest.raises(ValueError, match="expected"):
            cache.append(*wrong)
    cache.append(latent, rope)
    with pytest.raises(ValueError, match="5 tokens are more than max_tokens 4"):
        cache.append(latent, rope)
    assert cache.offset == 4


@each_kind
def test_an_empty_cache_can_neither_be_saved_nor_cloned(kind: str) -> None:
    for cache in (MAKERS[kind](), filled(kind, 3, -3)):
        for use in (lambda caches: snapshot(caches, 3), PROVIDER.clone):
            with pytest.raises(CodecError, match=f"of kind {kind} that has seen no token has nothing to save or clone"):
                use([cache])


def test_the_store_says_so_too(store: Store) -> None:
    with pytest.raises(InvalidInput, match="a cache of kind mla that has seen no token"):
        save(store, [feed(kvcodecs.KVCache(), 3), MAKERS["mla"]()], 3)


@pytest.mark.parametrize("dsa", [None, random_array(0, (1, 255, 4)), random_array(0, (2, 256, 4))])
def test_a_misaligned_indexer_is_refused(dsa: mx.array | None) -> None:
    cache = filled("mla-dsa", 5)
    cache.dsa = dsa
    for use in (lambda caches: snapshot(caches, 5), PROVIDER.clone):
        with pytest.raises(CodecError, match=r"cannot be saved: its planes are not aligned: .*'dsa': "):
            use([cache])


def test_another_dtype_is_refused() -> None:
    cache = filled("mla", 5)
    cache.rope = cache.rope.astype(mx.float16)
    with pytest.raises(CodecError, match="expected float32, found 'float16'"):
        snapshot([cache], 5)


# ---- prototypes

MISMATCHES: dict[str, tuple[str, Any, str, object, object]] = {
    "rank": ("mla", kvcodecs.MLACache(32, 8), "mla.kvLoraRank", 32, 16),
    "rope": ("mla", kvcodecs.MLACache(16, 4), "mla.ropeHeadDim", 4, 8),
    "most tokens": ("mla", kvcodecs.MLACache(16, 8, max_tokens=10), "mla.maxTokens", 10, 131072),
    "most tokens of mtp": ("mtp-mla", kvcodecs.MTPMLACache(16, 8, max_tokens=10), "mtp-mla.maxTokens", 10, LIMIT),
    "indexer": ("mla-dsa", kvcodecs.MLADSACache(16, 8, 8), "mla-dsa.dsaHeadDim", 8, 4),
    "no indexer": ("mla-dsa", kvcodecs.MLACache(16, 8), "kind", "mla", "mla-dsa"),
    "an indexer": ("mla", kvcodecs.MLADSACache(16, 8, 4), "kind", "mla-dsa", "mla"),
    "mtp for a layer": ("mtp-mla", kvcodecs.MLACache(16, 8), "kind", "mla", "mtp-mla"),
    "a layer for mtp": ("mla", kvcodecs.MTPMLACache(16, 8), "kind", "mtp-mla", "mla"),
    "keys and values": ("mla", kvcodecs.KVCache(), "kind", "KVCache", "mla"),
    "mlx-lm's keys and values": ("mla", mlx_lm_cache.KVCache(), "kind", "KVCache", "mla"),
    "arrays": ("mtp-mla", mlx_lm_cache.ArraysCache(2), "kind", "ArraysCache", "mtp-mla"),
    "a list": ("mla-dsa", mlx_lm_cache.CacheList(kvcodecs.KVCache()), "kind", "CacheList", "mla-dsa"),
}


@pytest.mark.parametrize(("kind", "prototype", "field", "expected", "found"), MISMATCHES.values(), ids=MISMATCHES)
def test_another_layer_does_not_take_them(
    store: Store, kind: str, prototype: Any, field: str, expected: object, found: object
) -> None:
    cache = filled(kind, 5)
    entry = entry_of(cache)
    with pytest.raises(PrototypeMismatch) as caught:
        PROVIDER.for_entry(entry, prototype).check_prototype(entry, prototype)
    assert (caught.value.field, caught.value.expected, caught.value.found) == (field, expected, found)
    entry_id = save(store, [cache], 5)
    for name in block_names(store):  # it is refused before a tensor is read: no block is looked at
        flip(block_path(store, name))
    with pytest.raises(IdentityMismatch, match=str(field)):
        store.load(entry_id, [prototype])


@pytest.mark.parametrize(
    "name",
    ["ours kv: partly filled", "ours qkv: partly filled", "ours rotating: wrapped", "ours ssm: set",
     "mlx-lm arrays: all set", "mlx-lm list: two", "mlx-lm chunked: first chunk",
     "ours turboquant 4 and 3 bits: partly filled", "ours paged: part of a page"],
)  # fmt: skip
@each_kind
def test_their_layers_take_no_other_kind(kind: str, name: str) -> None:
    entry, prototype = snapshot(CASES[name](), 9)[0].entry, MAKERS[kind]()
    with pytest.raises(PrototypeMismatch) as caught:
        PROVIDER.for_entry(entry, prototype).check_prototype(entry, prototype)
    assert (caught.value.field, caught.value.expected, caught.value.found) == ("kind", kind, entry.kind)


@each_kind
def test_their_own_layer_takes_them(kind: str) -> None:
    entry, prototype = entry_of(filled(kind, 5)), filled(kind, 2)
    PROVIDER.for_entry(entry, prototype).check_prototype(entry, prototype)
    extra = msgspec.structs.replace(entry, tensors=(*entry.tensors, entry.tensors[0]))
    with pytest.raises(PrototypeMismatch, match=f"{kind}.tensors"):
        PROVIDER.for_entry(extra, prototype).check_prototype(extra, prototype)


# ---- entries


@each_kind
def test_entries_that_no_cache_could_have_written(kind: str) -> None:
    entry = golden_header(f"v3-{kind}.mlxkv").caches[0]

    def changed(**fields: Any) -> HeaderEntry:
        return msgspec.structs.replace(entry, fields={**entry.fields, **fields})

    refused(changed(kvLoraRank=None), "kvLoraRank")
    refused(changed(ropeHeadDim=0), "ropeHeadDim")
    refused(changed(kvLoraRank=8), "tensors[0].shape")
    refused(changed(maxTokens=1 << 53), "maxTokens")
    refused(changed(maxTokens=10), "offset")
    refused(changed(dsaHeadDim=8), "tensors[2].shape" if kind == "mla-dsa" else "dsaHeadDim")
    refused(msgspec.structs.replace(entry, tensors=entry.tensors[:1]), "tensors")
    refused(msgspec.structs.replace(entry, tensors=(), offset=0), "tensors")
    refused(msgspec.structs.replace(entry, offset=10), "tensors[0].shape")
    half = msgspec.structs.replace(entry.tensors[0], dtype=9)
    refused(msgspec.structs.replace(entry, tensors=(half, *entry.tensors[1:])), "tensors[0].dtype")
