"""Kind turboquant: what a foreign quantizer packed comes back as it was, and is cut no further than its minimum."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

import kvcodecs
from blockstore import InvalidInput, Store
from blockstore.header import encode_header
from cache_cases import bits, facts, feed_planes, new_planes
from golden_kit import (
    PROVIDER,
    assert_golden_comes_back,
    assert_shorter_load_is_a_trimmed_cache,
    golden_header,
    loaded_from,
    refused,
    save,
    snapshot,
)
from kvcodecs import CodecError, HeaderEntry, PrototypeMismatch
from kvcodecs.geometry import minimum_reusable, shortened
from store_kit import header_of
from token_caches import IDENTITY, small_store

pytestmark = pytest.mark.mlx_lm
FILES = [
    "v3-turboquant", "v3-nocodec-turboquant", "v4-turboquant", "v5/turboquant", "v5/minreuse-genckpt-turboquant",
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store") as opened:
        yield opened


def filled(*chunks: int, k_bits: int = 4, v_bits: int = 3, minimum: int | None = 0) -> Any:
    cache = feed_planes(kvcodecs.TurboQuantKVCache(k_bits, v_bits, 64), *chunks)
    cache.minimum_reusable_offset = minimum
    return cache


def entry_of(cache: Any) -> HeaderEntry:
    return snapshot([cache], cache.offset)[0].entry


@pytest.mark.parametrize("name", FILES)
def test_golden_files_come_back(name: str) -> None:
    assert_golden_comes_back(f"{name}.mlxkv")


def test_other_kinds_tell_0_from_nothing_too() -> None:
    assert_golden_comes_back("v3-minreuse-genckpt-kv.mlxkv")


def test_what_is_stored() -> None:
    entry = entry_of(filled(6, k_bits=8))
    assert list(entry.fields.items()) == [("kBits", 8), ("vBits", 3), ("headDim", 64)]
    assert [slot.shape for slot in entry.tensors] == [
        (1, 2, 6, 64), (1, 2, 6, 2), (1, 2, 6, 2), (1, 2, 6, 24), (1, 2, 6, 2),
    ]  # fmt: skip
    assert [slot.dtype for slot in entry.tensors] == [5, 9, 9, 1, 9]


# ---- the least length


@pytest.mark.parametrize(("minimum", "least"), [(None, 9), (0, 0), (4, 4), (9, 9)])
def test_the_minimum_is_written_as_it_is(store: Store, minimum: int | None, least: int) -> None:
    """0 and nothing differ: what names no minimum is reusable at its own length only."""
    entry_id = save(store, [filled(9, minimum=minimum)], 9)
    (entry,) = header_of(store, entry_id).caches
    assert entry.minimum_reusable_offset == minimum
    assert (b"minimumReusableOffset" in encode_header(header_of(store, entry_id))) == (minimum is not None)
    assert minimum_reusable(entry) == least == store.entry(entry_id).minimum_reusable
    (loaded,) = store.load(entry_id).caches
    assert loaded.minimum_reusable_offset == minimum
    assert PROVIDER.clone([loaded])[0].minimum_reusable_offset == minimum
    assert entry_of(loaded) == entry_of(filled(9, minimum=minimum))


@pytest.mark.parametrize(("minimum", "least"), [(None, 9), (0, 1), (4, 4), (9, 9)])
def test_it_is_cut_no_further(store: Store, minimum: int | None, least: int) -> None:
    entry_id = save(store, [filled(9, minimum=minimum)], 9)
    for prompt in range(1, 9):
        match = store.find([*range(prompt), 99], IDENTITY)
        assert (match.length if match else None) == (prompt if prompt >= least else None)
        if prompt < least:
            with pytest.raises(InvalidInput, match="cannot be cut"):
                store.load(entry_id, length=prompt)
    assert store.load(entry_id, length=9).token_count == 9


@pytest.mark.parametrize("layout", ["segments", "rows"])
@pytest.mark.parametrize("length", [1, 8, 260])
def test_a_shorter_load(store: Store, layout: str, length: int) -> None:
    assert_shorter_load_is_a_trimmed_cache(store, lambda: [filled(257, 5), filled(262, k_bits=8)], length, layout)


def test_a_longer_entry_shares_the_blocks_of_a_shorter_one(store: Store) -> None:
    first = store.save(list(range(8)), [filled(8)], IDENTITY)
    second = store.save(list(range(10)), [filled(8, 2)], IDENTITY)
    assert (first.blocks_reused, second.blocks_reused) == (0, first.blocks_written)


# ---- the class


def test_appended_planes_stand_one_behind_the_other() -> None:
    cache = kvcodecs.TurboQuantKVCache(4, 4, 32)
    one, two = new_planes(cache, 1, 255), new_planes(cache, 2, 3)
    cache.append(*one)
    assert cache.planes[0].shape[2] == 256
    found = cache.append(*two)
    assert [bits(plane) for plane in found] == [
        bits(mx.concatenate(list(pair), axis=2)) for pair in zip(one, two, strict=True)
    ]
    assert (cache.size(), cache.planes[0].shape[2], cache.is_trimmable()) == (258, 511, True)
    assert cache.nbytes == sum(plane.nbytes for plane in cache.state)
    assert (cache.trim(250), cache.offset, cache.trim(100), cache.offset) == (250, 8, 8, 0)
    assert (cache.empty(), kvcodecs.TurboQuantKVCache(4, 4, 32).empty()) == (False, True)


def test_a_loaded_cache_has_room_for_the_next_token() -> None:
    (part,) = snapshot([filled(256)], 256)
    loaded = loaded_from(part.entry, part.arrays)
    size = loaded.nbytes
    feed_planes(loaded, 1)
    assert (loaded.nbytes, loaded.planes[0].shape[2]) == (size, 512)


def test_planes_of_another_dtype_or_shape_are_refused() -> None:
    cache = filled(3)
    planes = new_planes(cache, 0, 2)
    for index, name in enumerate(cache.names):
        for wrong in (planes[index].astype(mx.float32), planes[index][..., 1:], planes[index][:, :1], planes[index][0]):
            with pytest.raises(ValueError, match=f"{name}: expected"):
                cache.append(*planes[:index], wrong, *planes[index + 1 :])
    assert facts(cache) == facts(filled(3))


@pytest.mark.parametrize("sizes", [(0, 4, 64), (4, 9, 64), (4, 4, 48), (4, 4, 0)])
def test_impossible_sizes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"(is|are) not "):
        kvcodecs.TurboQuantKVCache(*sizes)


@pytest.mark.parametrize("cache", [kvcodecs.TurboQuantKVCache(4, 4, 64), filled(3, -3)])
def test_an_empty_cache_can_neither_be_saved_nor_cloned(cache: Any) -> None:
    for use in (lambda caches: snapshot(caches, 3), PROVIDER.clone):
        with pytest.raises(
            CodecError, match="a cache of kind turboquant that has seen no token has nothing to save or clone"
        ):
            use([cache])


def test_states_that_nobody_could_load() -> None:
    missing, longer, negative = filled(3), filled(3), filled(3)
    missing.v_scales = None
    longer.offset = 300
    negative.minimum_reusable_offset = 4
    for cache, why in ((missing, "not aligned.*v_scales': None"), (longer, "300 tokens"), (negative, "minimum.* 4")):
        with pytest.raises(CodecError, match=f"cannot be saved: .*{why}"):
            snapshot([cache], 3)


# ---- entries


def changed(entry: HeaderEntry, **fields: Any) -> HeaderEntry:
    return msgspec.structs.replace(entry, fields={**entry.fields, **fields})


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"kBits": None}, "kBits"), ({"vBits": 0}, "vBits"), ({"kBits": 9}, "kBits"), ({"headDim": 48}, "headDim"),
        ({"headDim": 96}, "tensors[0].shape"), ({"vBits": 4}, "tensors[3].shape"), ({"kBits": 8}, "tensors[0].shape"),
    ],
)  # fmt: skip
def test_entries_that_no_cache_could_have_written(fields: dict[str, Any], where: str) -> None:
    refused(changed(golden_header("v3-turboquant.mlxkv").caches[0], **fields), where)


def test_dtypes_and_the_number_of_tensors_belong_to_the_kind() -> None:
    entry = golden_header("v3-turboquant.mlxkv").caches[0]
    for index, dtype in enumerate((5, 1, 1, 5, 10)):
        slots = list(entry.tensors)
        slots[index] = msgspec.structs.replace(slots[index], dtype=dtype)
        refused(msgspec.structs.replace(entry, tensors=tuple(slots)), f"tensors[{index}].dtype")
    refused(msgspec.structs.replace(entry, tensors=entry.tensors[:4]), "tensors")
    refused(msgspec.structs.replace(entry, tensors=(), offset=0), "tensors")
    refused(msgspec.structs.replace(entry, offset=5), "tensors[0].shape")
    cut = shortened(entry, 2)
    assert (cut.offset, {slot.shape[2] for slot in cut.tensors}) == (2, {2})


def test_prototypes() -> None:
    entry = entry_of(filled(3))
    for prototype in (None, kvcodecs.KVCache(), kvcodecs.TurboQuantKVCache(4, 3, 64)):
        PROVIDER.for_entry(entry, prototype).check_prototype(entry, prototype)
    for prototype, field in (
        (kvcodecs.TurboQuantKVCache(8, 3, 64), "turboquant.kBits"),
        (kvcodecs.TurboQuantKVCache(4, 4, 64), "turboquant.vBits"),
        (kvcodecs.TurboQuantKVCache(4, 3, 128), "turboquant.headDim"),
        (kvcodecs.RecurrentCache(), "kind"),
        (kvcodecs.MLACache(4, 4), "kind"),
    ):
        with pytest.raises(PrototypeMismatch) as caught:
            PROVIDER.for_entry(entry, prototype).check_prototype(entry, prototype)
        assert caught.value.field == field
    plain = golden_header("v3-kv.mlxkv").caches[0]
    PROVIDER.for_entry(plain, filled(3)).check_prototype(plain, filled(3))
