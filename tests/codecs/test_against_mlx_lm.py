"""Our classes against mlx-lm's own, step by step over random histories."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

import kvcodecs
from cache_cases import bits, random_array
from kvcodecs.planes import quantize

pytestmark = pytest.mark.mlx_lm

GROUP, BITS = 32, 4
SMALL = st.integers(1, 6)
# Positive: append so many tokens. Negative: trim. Around 256 the arrays grow.
HISTORIES = st.lists(st.one_of(SMALL, SMALL, SMALL.map(lambda n: -n), st.sampled_from([250, 256, 257])), max_size=12)
RING_HISTORIES = st.lists(st.one_of(st.just(1), SMALL, SMALL.map(lambda n: -n)), max_size=16)
RING_SIZES = st.integers(1, 9).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))


def chunk(step: int, count: int) -> tuple[mx.array, mx.array]:
    return random_array(2 * step, (1, 2, count, 32)), random_array(2 * step + 1, (1, 2, count, 64))


def flat(fetched: Any) -> list[object]:
    parts = [part for side in fetched for part in ([side] if isinstance(side, mx.array) else side)]
    return [bits(part) for part in parts]


def comparable(mask: Any) -> object:
    return bits(mask) if isinstance(mask, mx.array) else mask


def masks(cache: Any) -> list[object]:
    """What a model gets for one token and for several, as mlx-lm asks for it."""
    return [
        comparable(create_attention_mask(mx.zeros((1, n, 1)), cache, window_size=window, return_array=as_array))
        for n in (1, 4)
        for window in (None, 1, 3, 100)
        for as_array in (False, True)
    ]


def compare(ours: Any, theirs: Any, history: list[int], encode: Any = lambda fetched: fetched) -> None:
    """Do `history` with both. `encode` turns what mlx-lm's class returns into what ours should."""
    for step, count in enumerate(history):
        if count > 0:
            keys, values = chunk(step, count)
            expected = encode(theirs.update_and_fetch(keys, values))
            assert flat(ours.update_and_fetch(keys, values)) == flat(expected)
        else:
            assert ours.is_trimmable() == theirs.is_trimmable()
            if theirs.is_trimmable():
                assert ours.trim(-count) == theirs.trim(-count)
        assert (ours.offset, ours.empty()) == (theirs.offset, theirs.empty())
        assert masks(ours) == masks(theirs)


@given(HISTORIES)
def test_kv(history: list[int]) -> None:
    compare(kvcodecs.KVCache(), mlx_lm_cache.KVCache(), history)


@given(HISTORIES)
@settings(max_examples=20)
def test_quantized(history: list[int]) -> None:
    compare(kvcodecs.QuantizedKVCache(GROUP, BITS), mlx_lm_cache.QuantizedKVCache(GROUP, BITS), history)


@given(RING_SIZES, RING_HISTORIES)
def test_rotating(sizes: tuple[int, int], history: list[int]) -> None:
    ours, theirs = kvcodecs.RotatingKVCache(*sizes), mlx_lm_cache.RotatingKVCache(*sizes)
    compare(ours, theirs, history)
    assert (ours.size(), ours._idx) == (theirs.size(), theirs._idx)


@given(st.lists(st.sampled_from([1, 1, 1, 60, 200]), max_size=10))
@settings(max_examples=20)
def test_rotating_where_the_ring_grows(history: list[int]) -> None:
    compare(kvcodecs.RotatingKVCache(260, 4), mlx_lm_cache.RotatingKVCache(260, 4), history)


@given(RING_SIZES, RING_HISTORIES)
def test_rotating_quantized_is_the_ring_with_its_rows_quantized(sizes: tuple[int, int], history: list[int]) -> None:
    ours = kvcodecs.RotatingQuantizedKVCache(*sizes, GROUP, BITS)
    theirs = mlx_lm_cache.RotatingKVCache(*sizes)
    compare(ours, theirs, history, lambda fetched: (quantize(tuple(fetched), GROUP, BITS),))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (kvcodecs.KVCache(), mlx_lm_cache.KVCache()),
        (kvcodecs.QuantizedKVCache(GROUP, BITS), mlx_lm_cache.QuantizedKVCache(GROUP, BITS)),
        (kvcodecs.RotatingKVCache(300), mlx_lm_cache.RotatingKVCache(300)),
    ],
    ids=["kv", "qkv", "rotating"],
)
def test_capacity_steps(ours: Any, theirs: Any) -> None:
    for step, count in enumerate([5, 1, 250, 1, 1, 300, 1]):
        for cache in (ours, theirs):
            cache.update_and_fetch(*chunk(step, count))
        assert ours.nbytes == theirs.nbytes
    assert sum(array.nbytes for array in ours.state) == ours.nbytes


@pytest.mark.parametrize("bits_per_element", [2, 3, 4, 5, 6, 8])
def test_every_width_of_quantization(bits_per_element: int) -> None:
    keys, values = chunk(0, 3)
    cache = kvcodecs.QuantizedKVCache(GROUP, bits_per_element)
    cache.update_and_fetch(keys, values)
    fetched = cache.update_and_fetch(keys, values)
    twice = tuple(mx.concatenate([side, side], axis=2) for side in (keys, values))
    assert flat(fetched) == flat([quantize(twice, GROUP, bits_per_element)])


def test_to_quantized() -> None:
    ours, theirs = kvcodecs.KVCache(), mlx_lm_cache.KVCache()
    for cache in (ours, theirs):
        cache.update_and_fetch(*chunk(0, 7))
    compare(ours.to_quantized(GROUP, BITS), theirs.to_quantized(GROUP, BITS), [1, 3, -2, 1])
    assert ours.offset == 7
    assert kvcodecs.KVCache().to_quantized(GROUP, BITS).empty()


def test_the_first_chunk_of_a_ring_stays_the_callers() -> None:
    keys, values = chunk(0, 4)
    before = bits(keys), bits(values)
    cache = kvcodecs.RotatingKVCache(4)
    cache.update_and_fetch(keys, values)
    cache.update_and_fetch(*chunk(1, 1))
    assert (bits(keys), bits(values)) == before


def test_a_ring_that_has_dropped_tokens_does_not_trim() -> None:
    cache = kvcodecs.RotatingKVCache(4)
    cache.update_and_fetch(*chunk(0, 6))
    assert (cache.is_trimmable(), cache.trim(2), cache.offset, cache.size()) == (False, 0, 6, 4)


@pytest.mark.parametrize("keep", [-1, 4, 5])
def test_keep_must_leave_room(keep: int) -> None:
    with pytest.raises(ValueError, match=f"keep {keep} is not between 0 and max_size 4"):
        kvcodecs.RotatingKVCache(4, keep)


def test_a_recurrent_cache_stands_for_an_arrays_cache_of_two_slots() -> None:
    ours, theirs = kvcodecs.RecurrentCache(), mlx_lm_cache.ArraysCache(size=2)
    assert (ours.empty(), ours.nbytes, ours.state) == (True, 0, [])
    for cache in (ours, theirs):
        assert cache[0] is None
        cache[0], cache[1] = random_array(0, (1, 3, 8)), random_array(1, (1, 2, 4, 4))
        cache.advance(5)
        assert create_ssm_mask(mx.zeros((1, 4, 1)), cache) is None
        assert (cache.lengths, cache.left_padding, cache.is_trimmable(), cache.empty()) == (None, None, False, False)
    assert [bits(ours[i]) for i in (0, 1)] == [bits(theirs[i]) for i in (0, 1)]
    assert (ours.nbytes, ours.offset, ours.size(), ours.trim(3)) == (theirs.nbytes, 5, 5, 0)
    with pytest.raises(IndexError):
        ours[2]
