"""Kind paged: a pool of pages and the table that finds tokens in it, plain and quantized."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

import kvcodecs
from blockstore import InvalidInput, Store
from cache_cases import bits, facts, feed, random_array
from golden_kit import (
    PROVIDER,
    assert_golden_comes_back,
    continued,
    golden_caches,
    golden_header,
    refused,
    save,
    snapshot,
)
from kvcodecs import CodecError, HeaderEntry, PrototypeMismatch
from kvcodecs.geometry import shortened
from store_kit import header_of
from token_caches import small_store

pytestmark = pytest.mark.mlx_lm
LAYOUTS = ("segments", "rows")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store") as opened:
        yield opened


def filled(*chunks: int, capacity: int = 40, quantization: tuple[int, int] | None = None) -> Any:
    return feed(kvcodecs.PagedKVCache(capacity, 4, quantization), *chunks)


def entry_of(cache: Any) -> HeaderEntry:
    return snapshot([cache], cache.offset)[0].entry


@pytest.mark.parametrize("name", ["v3-paged", "v4-paged", "v5/paged"])
def test_golden_files_come_back(name: str) -> None:
    assert_golden_comes_back(f"{name}.mlxkv")


def test_tokens_are_where_the_table_says() -> None:
    """Two pages of four, the first token in the third page of the pool: table [2, 0], seven tokens."""
    _, (plain, quantized), arrays = golden_caches("v3-paged.mlxkv")
    keys, values = plain.gather()
    for token, (page, row) in enumerate([(2, 0), (2, 1), (2, 2), (2, 3), (0, 0), (0, 1), (0, 2)]):
        assert bits(keys[:, :, token]) == bits(arrays[0][None, page, :, row])
        assert bits(values[:, :, token]) == bits(arrays[1][None, page, :, row])
    packed, scales, biases = (arrays[2 + i][1:4:2].transpose(1, 0, 2, 3) for i in (0, 2, 3))
    flat = [part.reshape(1, 2, 8, -1)[:, :, :7] for part in (packed, scales, biases)]
    expected = mx.dequantize(*flat, group_size=32, bits=4)
    assert bits(quantized.gather()[0]) == bits(expected)


# ---- the class


@pytest.mark.parametrize("chunks", [(13,), (1,) * 13, (3, 4, 5, 1), (4, 8, 1), (20, -9, 2)])
def test_what_is_gathered_is_what_a_plain_cache_holds(chunks: tuple[int, ...]) -> None:
    plain, paged = feed(kvcodecs.KVCache(), *chunks), filled(*chunks)
    assert [bits(side) for side in paged.gather()] == [
        bits(side[..., : plain.offset, :]) for side in (plain.keys, plain.values)
    ]
    assert (paged.offset, paged.size(), paged.num_blocks) == (13, 13, 10)
    assert paged.block_table == [0, 1, 2, 3]
    assert continued([paged]) == continued([plain])


@pytest.mark.parametrize("width", [4, 8])
def test_quantized_pages_hold_what_a_quantized_cache_holds(width: int) -> None:
    rows, paged = feed(kvcodecs.QuantizedKVCache(32, width), 6, 1, 8), filled(6, 1, 8, quantization=(32, width))
    for side, found in zip((rows.keys, rows.values), paged.gather(), strict=True):
        live = [part[..., :15, :] for part in side]
        assert bits(found) == bits(mx.dequantize(*live, group_size=32, bits=width))
    assert [tuple(pool.shape[1:3]) for pool in paged.pools] == [(2, 4)] * 6
    assert (paged.key_scales.shape[3], paged.value_biases.shape[3]) == (2, 1)


def test_pages_are_taken_in_order_and_given_back() -> None:
    cache = filled(9)
    assert cache.block_table == [0, 1, 2]
    assert cache.trim(6) == 6
    assert cache.block_table == [0]
    cache.block_table = [3]
    feed(cache, 9)
    assert cache.block_table == [3, 0, 1]
    assert cache.trim(100) == 12
    assert (cache.offset, cache.block_table) == (0, [])


def test_a_full_pool_grows() -> None:
    cache = filled(4, 8, capacity=10)
    assert (cache.num_blocks, cache.capacity_tokens) == (3, 10)
    before = [bits(side) for side in cache.gather()]
    feed(cache, 1)
    assert (cache.num_blocks, cache.block_table) == (4, [0, 1, 2, 3])
    assert [bits(side[..., :12, :]) for side in cache.gather()] == before
    assert cache.nbytes == sum(pool.nbytes for pool in cache.state) == 4 * 2 * 4 * (64 + 32) * 4
    feed(cache, 40)
    assert cache.num_blocks == 14


def test_what_does_not_fit_is_refused() -> None:
    cache = filled(5)
    keys, values = random_array(0, (1, 2, 1, 64)), random_array(1, (1, 2, 1, 32))
    for wrong in (
        (keys[0], values[0]), (mx.zeros((2, 2, 1, 64)), mx.zeros((2, 2, 1, 32))), (keys, mx.zeros((1, 2, 2, 32))),
        (values, keys), (keys[:, :1], values[:, :1]), (keys.astype(mx.float16), values.astype(mx.float16)),
        (keys, values.astype(mx.float16)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            cache.append(*wrong)
    assert facts(cache) == facts(filled(5))
    with pytest.raises(ValueError, match="cannot be made"):
        kvcodecs.PagedKVCache(10, 0)
    with pytest.raises(ValueError, match="holds nothing yet"):
        kvcodecs.PagedKVCache(10, 4).gather()


def test_a_refused_first_append_leaves_a_new_cache_new() -> None:
    cache = kvcodecs.PagedKVCache(10, 4)
    with pytest.raises(ValueError, match="expected"):
        cache.append(mx.zeros((1, 2, 1, 96)), mx.zeros((1, 2, 1, 32), dtype=mx.float16))
    assert (cache.head_dim, cache.dtype, cache.empty()) == (0, None, True)
    assert facts(feed(cache, 5)) == facts(filled(5, capacity=10))


# ---- what is stored


def test_fields_and_pools() -> None:
    entry = entry_of(filled(6, quantization=(32, 4)))
    assert list(entry.fields) == ["bits", "groupSize", "paged"]
    assert list(entry.fields["paged"].items()) == [
        ("capacityTokens", 40), ("blockSize", 4), ("blockTable", [0, 1]), ("numBlocks", 10),
        ("headDim", 64), ("vHeadDim", 32), ("dtype", 10), ("direct", False),
    ]  # fmt: skip
    assert [slot.shape for slot in entry.tensors] == [
        (10, 2, 4, 8), (10, 2, 4, 4), (10, 2, 4, 2), (10, 2, 4, 2), (10, 2, 4, 1), (10, 2, 4, 1),
    ]  # fmt: skip
    assert list(entry_of(filled(6)).fields) == ["paged"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quantization", [None, (32, 8)])
def test_a_shorter_load_keeps_the_pool(store: Store, layout: str, quantization: tuple[int, int] | None) -> None:
    cache = filled(13, quantization=quantization)
    entry_id = save(store, [cache], 13, layout)
    assert store.entry(entry_id).shortens
    for length in (1, 6, 12):
        (loaded,) = store.load(entry_id, length=length).caches
        assert (loaded.offset, loaded.block_table) == (length, [0, 1, 2, 3])
        assert [bits(pool) for pool in loaded.pools] == [bits(pool) for pool in cache.pools]
        kept = filled(13, quantization=quantization)
        kept.trim(13 - length)
        assert continued([loaded]) == continued([kept])


def test_what_a_shorter_load_holds_can_be_saved_again(store: Store) -> None:
    entry_id = save(store, [filled(13)], 13)
    loaded = store.load(entry_id, length=6).caches
    (entry,) = header_of(store, save(store, loaded, 6)).caches
    assert (entry.offset, entry.fields["paged"]["blockTable"]) == (6, [0, 1, 2, 3])


def test_a_minimum_limits_it_as_any_other(store: Store) -> None:
    cache = filled(9)
    cache.minimum_reusable_offset = 4
    entry_id = save(store, [cache], 9)
    assert store.load(entry_id, length=4).caches[0].minimum_reusable_offset == 4
    with pytest.raises(InvalidInput, match="cannot be cut"):
        store.load(entry_id, length=3)


@pytest.mark.parametrize("cache", [kvcodecs.PagedKVCache(10, 4), filled(3, -3)])
def test_an_empty_cache_can_neither_be_saved_nor_cloned(cache: Any) -> None:
    for use in (lambda caches: snapshot(caches, 3), PROVIDER.clone):
        with pytest.raises(CodecError, match="a cache of kind paged that has seen no token"):
            use([cache])


def test_a_table_that_is_too_short_is_refused() -> None:
    cache = filled(9)
    cache.block_table.pop()
    with pytest.raises(CodecError, match=r"cannot be saved: .*at least 3 pages for 9 tokens"):
        snapshot([cache], 9)


# ---- entries


def layout_changed(entry: HeaderEntry, **layout: Any) -> HeaderEntry:
    return msgspec.structs.replace(entry, fields={**entry.fields, "paged": {**entry.fields["paged"], **layout}})


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ({"blockTable": [2, 3]}, "paged.blockTable"), ({"blockTable": [2, -1]}, "paged.blockTable"),
        ({"blockTable": [2, 2]}, "paged.blockTable"), ({"blockTable": [2]}, "paged.blockTable"),
        ({"blockTable": [2, True]}, "paged.blockTable"), ({"blockTable": None}, "paged.blockTable"),
        ({"blockSize": 0}, "paged.blockSize"), ({"blockSize": 8}, "tensors[0].shape"),
        ({"numBlocks": 4}, "tensors[0].shape"), ({"headDim": 4}, "tensors[0].shape"),
        ({"vHeadDim": 4}, "tensors[1].shape"), ({"dtype": 14}, "paged.dtype"), ({"dtype": "x"}, "paged.dtype"),
        ({"direct": 1}, "paged.direct"), ({"capacityTokens": None}, "paged.capacityTokens"),
    ],
)  # fmt: skip
def test_layouts_that_no_cache_could_have_written(layout: dict[str, Any], where: str) -> None:
    refused(layout_changed(golden_header("v3-paged.mlxkv").caches[0], **layout), where)


def test_tensors_belong_to_the_layout() -> None:
    plain, quantized = golden_header("v3-paged.mlxkv").caches
    refused(msgspec.structs.replace(plain, fields={}), "paged")
    refused(msgspec.structs.replace(plain, tensors=quantized.tensors), "tensors")
    refused(msgspec.structs.replace(quantized, tensors=quantized.tensors[:2]), "tensors")
    refused(msgspec.structs.replace(plain, tensors=(), offset=0), "tensors")
    refused(msgspec.structs.replace(quantized, tensors=(), offset=0), "tensors")
    refused(msgspec.structs.replace(quantized, fields={**quantized.fields, "bits": 8}), "tensors[0].shape")
    refused(msgspec.structs.replace(quantized, fields={**quantized.fields, "groupSize": 48}), "paged.headDim")
    refused(msgspec.structs.replace(quantized, fields={**quantized.fields, "bits": 64}), "bits")
    order = (0, 2, 3, 1, 4, 5)  # that of qkv
    refused(msgspec.structs.replace(quantized, tensors=tuple(quantized.tensors[i] for i in order)), "tensors[1].shape")


def test_a_table_may_name_pages_behind_the_offset() -> None:
    entry = golden_header("v3-paged.mlxkv").caches[0]
    cut = shortened(entry, 2)
    assert (cut.offset, cut.fields, cut.tensors) == (2, entry.fields, entry.tensors)


def test_prototypes() -> None:
    plain, quantized = entry_of(filled(6)), entry_of(filled(6, quantization=(32, 4)))
    pages, packed = kvcodecs.PagedKVCache(8, 4), kvcodecs.PagedKVCache(8, 4, (32, 4))
    for entry in (plain, quantized):
        for prototype in (None, kvcodecs.KVCache(), pages, packed):
            PROVIDER.for_entry(entry, prototype).check_prototype(entry, prototype)
    for entry, prototype, field in (
        (plain, kvcodecs.PagedKVCache(8, 8), "paged.blockSize"),
        (quantized, kvcodecs.PagedKVCache(8, 4, (32, 8)), "paged.bits"),
        (quantized, kvcodecs.PagedKVCache(8, 4, (64, 4)), "paged.groupSize"),
        (plain, kvcodecs.RecurrentCache(), "kind"),
        (plain, kvcodecs.MLACache(4, 4), "kind"),
    ):
        with pytest.raises(PrototypeMismatch) as caught:
            PROVIDER.for_entry(entry, prototype).check_prototype(entry, prototype)
        assert caught.value.field == field
