"""What two entries have in common is stored once, whatever their histories; what was grown costs what is new."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_lm_cache

import kvcodecs
from blockstore import Store
from blockstore.records import Header
from fs_doubles import Recording
from kvcodecs.entry import leaves
from store_kit import block_names, block_path, header_of
from token_caches import IDENTITY, extend, identity, plain, rows_of, small_store

pytestmark = pytest.mark.mlx_lm
SPAN = 4
COMMON = 50
TOKENS = [(i * i + 3 * i) % 17 for i in range(90)]
OTHERS = [*TOKENS[:COMMON], *[18 + i % 5 for i in range(40)]]

# Static sizes beyond every length here: all of these shorten.
KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "kv": (kvcodecs.KVCache, 4),
    "qkv": (lambda: kvcodecs.QuantizedKVCache(group_size=32, bits=4), 32),
    "rotating": (lambda: kvcodecs.RotatingKVCache(200), 4),
    "rotating, keep": (lambda: kvcodecs.RotatingKVCache(200, 3), 4),
    "rotating-qkv": (lambda: kvcodecs.RotatingQuantizedKVCache(200, 0, group_size=32), 32),
    "mlx-lm kv": (mlx_lm_cache.KVCache, 4),
    "mlx-lm qkv": (lambda: mlx_lm_cache.QuantizedKVCache(group_size=32), 32),
    "mlx-lm rotating": (lambda: mlx_lm_cache.RotatingKVCache(200), 4),
    "mlx-lm chunked": (lambda: mlx_lm_cache.ChunkedKVCache(1000), 4),
    "mlx-lm concatenate": (mlx_lm_cache.ConcatenateKVCache, 4),
}


@pytest.fixture
def fs() -> Recording:
    return Recording()


@pytest.fixture
def store(tmp_path: Path, fs: Recording) -> Iterator[Store]:
    with small_store(tmp_path / "store", span=SPAN, fs=fs) as opened:
        yield opened


# ---- histories


def at_once(make: Callable[[], Any], tokens: Sequence[int], dim: int) -> Any:
    return extend(make(), tokens, dim=dim)


def in_pieces(make: Callable[[], Any], tokens: Sequence[int], dim: int) -> Any:
    return extend(make(), tokens, 7, 1, 1, 30, 2, dim=dim)


def regrown(make: Callable[[], Any], tokens: Sequence[int], dim: int) -> Any:
    """Has seen other tokens and forgotten them, twice; what is stale lies behind the live ones."""
    cache = extend(make(), [*tokens[:20], *range(30, 60)], dim=dim)
    cache.trim(cache.offset - 20)
    extend(cache, [*tokens[:33], 77, 78, 79], 1, dim=dim)
    cache.trim(3)
    return extend(cache, tokens, 5, dim=dim)


def larger(make: Callable[[], Any], tokens: Sequence[int], dim: int) -> Any:
    """Has a larger capacity than it needs."""
    cache = extend(make(), [*tokens, *[5] * 100], dim=dim)
    cache.trim(100)
    return cache


HISTORIES = {"in pieces": in_pieces, "trimmed and regrown": regrown, "larger capacity": larger}


def shared_below(header: Header, count: int) -> set[str]:
    """The full blocks that hold nothing but the first `count` tokens, of caches that begin at position 0."""
    found: set[str] = set()
    flat = list(leaves(header.caches))
    for group in header.segments or ():
        leaf, index = group.tensors[0]
        start = 0
        for name, tokens in zip(group.digests(), group.counts(flat[leaf].tensors[index].shape[2]), strict=True):
            start += tokens
            found |= {name} if start <= count and tokens == group.span else set()
    return found


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize(("make", "dim"), KINDS.values(), ids=KINDS)
def test_equal_prefixes_share_every_full_block_whatever_the_histories(
    make: Callable[[], Any], dim: int, history: Callable[..., Any], store: Store
) -> None:
    if make is mlx_lm_cache.ConcatenateKVCache and history is regrown:
        history = at_once  # it appends behind what was trimmed: its offset is then wrong, by mlx-lm's own doing
    first = store.save(TOKENS, [at_once(make, TOKENS, dim), at_once(make, TOKENS, dim)], IDENTITY)
    second = store.save(OTHERS, [history(make, OTHERS, dim), at_once(make, OTHERS, dim)], IDENTITY)
    one, other = (header_of(store, saved.entry_id) for saved in (first, second))
    common = shared_below(one, COMMON)
    assert common == shared_below(other, COMMON)
    assert len(common) == COMMON // SPAN * len({group.digests()[0] for group in one.segments or ()})
    assert second.blocks_reused >= len(common)


def test_other_dtype_views_of_the_same_bytes_share_blocks(store: Store) -> None:
    plain_ones = [mx.array(rows_of(TOKENS, 8, salt)) for salt in (0, 1)]
    views = [array.view(mx.bfloat16) for array in plain_ones], [array.view(mx.int32) for array in plain_ones]
    saved = []
    for ns, arrays in zip(("float32", "bfloat16", "int32"), (plain_ones, *views), strict=True):
        cache = kvcodecs.KVCache()
        cache.keys, cache.values = arrays
        cache.offset = len(TOKENS)
        saved.append(store.save(TOKENS, [cache], identity(ns)))
    assert [part.blocks_written for part in saved[1:]] == [0, 0]


def test_what_strides_an_array_has_does_not_matter(store: Store) -> None:
    one, other = plain(TOKENS), plain(TOKENS)
    other[0].keys = mx.contiguous(other[0].keys.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    store.save(TOKENS, one, IDENTITY)
    assert store.save(TOKENS, other, identity("strided")).blocks_written == 0


# ---- growth


def block_bytes(store: Store, names: set[str]) -> int:
    return sum(os.path.getsize(block_path(store, name)) for name in names)


@pytest.mark.parametrize("name", ["kv", "qkv", "mlx-lm kv", "mlx-lm concatenate"])
def test_growing_writes_no_more_than_the_new_tokens_and_one_block(name: str, tmp_path: Path) -> None:
    make, dim = KINDS[name]
    numbered = iter(range(1_000_000))
    with small_store(tmp_path / "store", span=64, block_bytes=1 << 20) as store:

        @given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 3), st.integers(0, 1 << 20))
        def check(start: int, k: int, layers: int, seed: int) -> None:
            tokens = [seed + i % 7 for i in range(start + k)]
            caches = [extend(make(), tokens[:start], dim=dim, salt=layer) for layer in range(layers)]
            saved = store.save(tokens[:start], caches, identity(str(next(numbered))))
            before, per_token = block_names(store), saved.logical_bytes // start
            for layer, cache in enumerate(caches):
                extend(cache, tokens, 50, dim=dim, salt=layer)
            store.save(tokens, caches, identity(str(next(numbered))))
            written = block_bytes(store, block_names(store) - before)
            assert written <= (k + 64) * per_token

        check()


def test_saving_the_same_again_touches_no_block(store: Store, fs: Recording) -> None:
    store.save(TOKENS, [*plain(TOKENS, 2), extend(kvcodecs.RotatingKVCache(20), TOKENS, 1)], IDENTITY)
    fs.clear()
    again = store.save(TOKENS, [*plain(TOKENS, 2), extend(kvcodecs.RotatingKVCache(20), TOKENS, 1)], IDENTITY)
    assert again.blocks_written == 0
    assert [os.path.basename(call.path) for call in fs.named("write_new")] == ["announced", "header"]
    assert [call for call in fs.named("rename", "unlink", "open_read") if call.within("blocks")] == []


def test_within_one_entry_equal_blocks_are_stored_once(store: Store) -> None:
    caches = [extend(kvcodecs.KVCache(), TOKENS, salt=7, dim=64) for _ in range(3)]
    saved = store.save(TOKENS, caches, IDENTITY)
    assert saved.blocks_written == len(block_names(store))
    assert saved.logical_bytes >= 2 * block_bytes(store, block_names(store))


# ---- rings


def positions_by_row(offset: int, max_size: int, keep: int) -> list[int]:
    """Which position each row of a ring holds that took one token after the other."""
    rows: list[int] = []
    at = 0
    for position in range(offset):
        if len(rows) < max_size:
            rows.append(position)
            continue
        at = keep if at == 0 or at == max_size else at
        rows[at] = position
        at += 1
    return rows


def pieces(rows: list[int]) -> set[tuple[int, int]]:
    """(first position, tokens) of each block: cut at multiples of the span, and where the order breaks."""
    found, start = set(), 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1 or rows[i] % SPAN == 0:
            found.add((rows[start], i - start))
            start = i
    return found


def blocks_by_piece(header: Header, rows: list[int]) -> dict[tuple[int, int], str]:
    [group] = header.segments or ()
    found, start = {}, 0
    for name, tokens in zip(group.digests(), group.counts(len(rows)), strict=True):
        found[rows[start], tokens] = name
        start += tokens
    return found


RINGS: dict[str, Callable[[int, int], Any]] = {
    "ours": kvcodecs.RotatingKVCache,
    "mlx-lm": lambda max_size, keep: mlx_lm_cache.RotatingKVCache(max_size, keep=keep),
}


@pytest.mark.parametrize("later", [1, 3, 4, 9, 17])
@pytest.mark.parametrize(("max_size", "keep"), [(20, 0), (20, 4), (21, 0), (22, 3), (32, 5)])
@pytest.mark.parametrize("make", RINGS.values(), ids=RINGS)
def test_two_snapshots_of_a_wrapped_ring_share_what_both_still_hold(
    make: Callable[[int, int], Any], max_size: int, keep: int, later: int, store: Store
) -> None:
    offsets = (2 * max_size + 7, 2 * max_size + 7 + later)
    ring, parts = make(max_size, keep), []
    for offset in offsets:
        saved = store.save(TOKENS[:offset], [extend(ring, TOKENS[:offset], 1)], IDENTITY)
        rows = positions_by_row(offset, max_size, keep)
        found = blocks_by_piece(header_of(store, saved.entry_id), rows)
        assert set(found) == pieces(rows)
        parts.append(found)
    both = set(parts[0]) & set(parts[1])
    assert {piece: parts[0][piece] for piece in both} == {piece: parts[1][piece] for piece in both}
    # Lost are what was overwritten and, at each of the two write indexes and at the end, part of a block.
    assert sum(tokens for _, tokens in both) >= max_size - keep - later - 3 * SPAN
    assert saved.blocks_reused == len(both)


def test_a_ring_that_is_not_full_shares_with_one_that_went_on(store: Store) -> None:
    one, other = (extend(kvcodecs.RotatingKVCache(200), tokens, 1) for tokens in (TOKENS[:41], TOKENS))
    store.save(TOKENS[:41], [one], IDENTITY)
    assert store.save(TOKENS, [other], IDENTITY).blocks_reused == 40 // SPAN
