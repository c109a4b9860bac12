"""A prefix of an entry: equal to what the prefix alone would be, and read from no more blocks than it needs."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import kvcodecs
from blockstore import CorruptEntry, InvalidInput, Match, Store
from fs_doubles import Recording
from store_kit import all_facts, block_path, described, flip, header_of, needed_blocks, served
from token_caches import IDENTITY, extend, hybrid, plain, recurrent, small_store, windowed

pytestmark = pytest.mark.mlx_lm
TOKENS = [(i * 7 + 3) % 11 for i in range(150)]
LENGTHS = (1, 2, 3, 4, 5, 8, 13, 63, 64, 65, 100, 127, 128, 129, 148, 149, 150)
LAYOUTS = ("segments", "rows")
Make = Callable[[Sequence[int]], list[Any]]


def one(make: Callable[[], Any], dim: int = 4) -> Make:
    return lambda tokens: [extend(make(), tokens, 40, 1, dim=dim)]


def nested(tokens: Sequence[int]) -> list[Any]:
    first, second, third = (extend(mlx_lm_cache.KVCache(), tokens, salt=salt) for salt in range(3))
    return [mlx_lm_cache.CacheList(first, mlx_lm_cache.CacheList(second, mlx_lm_cache.KVCache())), third]


SHORTENS: dict[str, Make] = {
    "ours kv": one(kvcodecs.KVCache),
    "ours kv, three layers": lambda tokens: plain(tokens, 3),
    "ours qkv": one(lambda: kvcodecs.QuantizedKVCache(group_size=32, bits=4), 32),
    "ours ring, not full": one(lambda: kvcodecs.RotatingKVCache(200, 2)),
    "ours quantized ring, not full": one(lambda: kvcodecs.RotatingQuantizedKVCache(200, 0, group_size=32), 32),
    "mlx-lm kv": one(mlx_lm_cache.KVCache),
    "mlx-lm qkv": one(lambda: mlx_lm_cache.QuantizedKVCache(group_size=32, bits=8), 32),
    "mlx-lm ring, not full": one(lambda: mlx_lm_cache.RotatingKVCache(200, keep=2)),
    "mlx-lm chunked, front not trimmed": one(lambda: mlx_lm_cache.ChunkedKVCache(1000)),
    "mlx-lm concatenate": one(mlx_lm_cache.ConcatenateKVCache),
    "mlx-lm list, nested": nested,
}
STANDS: dict[str, Make] = {
    "recurrent": lambda tokens: [recurrent(tokens)],
    "recurrent beside plain": hybrid,
    "full ring": one(lambda: kvcodecs.RotatingKVCache(150)),
    "wrapped ring": one(lambda: kvcodecs.RotatingKVCache(20, 3)),
    "wrapped ring beside plain": windowed,
    "quantized ring, wrapped": one(lambda: kvcodecs.RotatingQuantizedKVCache(20, 0, group_size=32), 32),
    "arrays": lambda tokens: [*plain(tokens), _arrays()],
    "list with arrays": lambda tokens: [mlx_lm_cache.CacheList(*plain(tokens), _arrays())],
    "chunked, front trimmed": lambda tokens: [_front_trimmed(tokens)],
}


def _arrays() -> Any:
    cache = mlx_lm_cache.ArraysCache(1)
    cache[0] = recurrent([1])[0]
    return cache


def _front_trimmed(tokens: Sequence[int]) -> Any:
    """Only the last 64 tokens are left. Done here, since 0.31's maybe_trim_front takes spare rows for tokens."""
    cache = extend(mlx_lm_cache.ChunkedKVCache(64), tokens)
    dropped = cache.start_position = max(cache.offset - 64, 0)
    if dropped:
        cache.keys, cache.values = (side[..., dropped : cache.offset, :] for side in (cache.keys, cache.values))
    return cache


@pytest.fixture
def fs() -> Recording:
    return Recording()


@pytest.fixture
def store(tmp_path: Path, fs: Recording) -> Iterator[Store]:
    with small_store(tmp_path / "store", span=64, fs=fs) as opened:
        yield opened


def match(entry_id: str, length: int) -> Match:
    return Match(entry_id, length, len(TOKENS))


# ---- what comes back


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", SHORTENS.values(), ids=SHORTENS)
def test_the_first_n_tokens_are_those_of_a_cache_that_saw_no_more(make: Make, layout: str, store: Store) -> None:
    saved = store.save(TOKENS, make(TOKENS), IDENTITY, layout=layout)
    for length in LENGTHS:
        expected = make(TOKENS[:length])
        for verify, model in ((True, make([])), (False, None)):
            loaded = store.load(match(saved.entry_id, length), model, verify=verify)
            assert loaded.tokens == TOKENS[:length]
            assert described(loaded.caches, length) == described(expected, length)
            if model is not None:
                assert all_facts(loaded.caches) == all_facts(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", STANDS.values(), ids=STANDS)
def test_what_does_not_shorten_is_had_whole_or_not_at_all(make: Make, layout: str, store: Store) -> None:
    saved = store.save(TOKENS, make(TOKENS), IDENTITY, layout=layout)
    for length in (0, 1, 64, 149, 151):
        with pytest.raises(InvalidInput, match="cannot be cut") as caught:
            store.load(saved.entry_id, length=length)
        assert caught.value.found == length
    assert store.find(TOKENS, IDENTITY) is None, "only the prompt's last token but one may be served"
    assert served(store.find([*TOKENS, 1], IDENTITY)) == (saved.entry_id, 150, len(TOKENS))
    assert all_facts(store.load(saved.entry_id, make([])).caches) == all_facts(make(TOKENS))


@pytest.mark.parametrize("length", [-1, 0, 151])
def test_lengths_that_no_entry_has_are_refused(length: int, store: Store) -> None:
    saved = store.save(TOKENS, plain(TOKENS), IDENTITY)
    with pytest.raises(InvalidInput):
        store.load(saved.entry_id, length=length)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_entry_is_cut_below_its_minimum(layout: str, store: Store) -> None:
    caches = [*plain(TOKENS, minimum=70), *plain(TOKENS, minimum=101), *plain(TOKENS)]
    saved = store.save(TOKENS, caches, IDENTITY, layout=layout)
    for length in (1, 70, 100):
        with pytest.raises(InvalidInput, match="101 to 150"):
            store.load(saved.entry_id, length=length)
    for length in (101, 120, 150):
        loaded = store.load(saved.entry_id, length=length)
        assert [cache.minimum_reusable_offset for cache in loaded.caches] == [70, 101, 0]
    assert served(store.find([*TOKENS[:101], 99, 99], IDENTITY)) == (saved.entry_id, 101, len(TOKENS))
    assert store.find([*TOKENS[:100], 99, 99], IDENTITY) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 100, 150])
def test_behind_the_live_tokens_stand_zeros_and_room_for_more(length: int, layout: str, store: Store) -> None:
    saved = store.save(TOKENS, plain(TOKENS), IDENTITY, layout=layout)
    [cache] = store.load(saved.entry_id, length=length).caches
    for array in (cache.keys, cache.values):
        assert array.shape == (1, 1, 256, 4)
        assert not np.array(array)[:, :, length:].any()


# ---- what is read


def opened_blocks(fs: Recording) -> list[str]:
    return [os.path.basename(call.path) for call in fs.named("open_read") if call.within("blocks")]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 128, 150])
def test_a_shorter_load_opens_only_the_blocks_it_needs_and_each_once(
    length: int, layout: str, verify: bool, store: Store, fs: Recording
) -> None:
    saved = store.save(TOKENS, plain(TOKENS, 3), IDENTITY, layout=layout)
    needed = needed_blocks(header_of(store, saved.entry_id), length)
    fs.clear()
    store.load(match(saved.entry_id, length), verify=verify)
    assert sorted(opened_blocks(fs)) == sorted(needed)
    assert (len(needed) == saved.blocks_written) == (length > 128)


@pytest.mark.parametrize("damage", [flip, os.unlink, lambda path: os.truncate(path, 1)], ids=["flip", "unlink", "cut"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_behind_the_match_does_not_hurt(
    damage: Callable[[Path], None], layout: str, store: Store, fs: Recording
) -> None:
    caches = plain(TOKENS, 2)
    saved = store.save(TOKENS, caches, IDENTITY, layout=layout)
    header = header_of(store, saved.entry_id)
    behind = needed_blocks(header, 150) - needed_blocks(header, 100)
    assert behind != set()
    for name in behind:
        damage(block_path(store, name))
    loaded = store.load(match(saved.entry_id, 100))
    assert all_facts(loaded.caches) == all_facts(plain(TOKENS[:100], 2))
    with pytest.raises(CorruptEntry) as caught:
        store.load(saved.entry_id)
    assert caught.value.digest in behind
    assert store.entries() == []
