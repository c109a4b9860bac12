"""A prompt cache that remembers: as mlx-lm's in memory, and what the store adds to it."""

import copy
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from blockstore import EntryGone, Identity, InvalidInput, NotStored, PersistentPromptCache, Store, StoreFull
from blockstore.extracted import viewed_extractions
from token_caches import extend, identity, rows_of, small_store

pytestmark = pytest.mark.mlx_lm

MODEL = ("model", None, None)
OTHER = ("other", None, None)
Make = Callable[..., PersistentPromptCache]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def make(store: Store) -> Iterator[Make]:
    """Makes prompt caches over the store, as a process does when it starts."""
    made = list[PersistentPromptCache]()

    def fresh(**options: Any) -> PersistentPromptCache:
        given = {"identity": lambda key: identity(key[0]), "prototypes": lambda key: [[KVCache()]], **options}
        made.append(PersistentPromptCache(given.pop("store", store), **given))
        return made[-1]

    yield fresh
    for cache in made:
        assert cache.close(timeout=60)


def kv(tokens: Sequence[int], **options: Any) -> list[Any]:
    return [extend(KVCache(), tokens, **options)]


def tokens_in(caches: Sequence[Any] | None, tokens: Sequence[int]) -> int:
    """How many of `tokens` a one-layer cache encodes; they must be the first ones."""
    assert caches is not None
    count = caches[0].offset
    assert mx.array_equal(caches[0].keys[..., :count, :], mx.array(rows_of(tokens[:count], 4)))
    return int(count)


# ---- as mlx-lm's


class Anything:
    """A cache of a class that nobody knows."""

    def __init__(self, name: str, trimmable: bool = True) -> None:
        self.name = name
        self.trimmable = trimmable
        self.trimmed = 0

    @property
    def nbytes(self) -> int:
        return len(self.name)

    def is_trimmable(self) -> bool:
        return self.trimmable

    def trim(self, count: int) -> int:
        self.trimmed += count
        return count


def test_what_was_inserted_is_fetched_and_copied(make: Make) -> None:
    cache = make()
    assert cache.fetch_nearest_cache(MODEL, [1, 2, 3]) == (None, [1, 2, 3])
    cache.insert_cache(MODEL, [1, 2, 3], kv([1, 2, 3]))
    found, rest = cache.fetch_nearest_cache(MODEL, [1, 2, 3])
    assert (tokens_in(found, [1, 2, 3]), rest) == (3, [])
    assert found is not None
    extend(found[0], [1, 2, 3, 4])
    again, _ = cache.fetch_nearest_cache(MODEL, [1, 2, 3])
    assert tokens_in(again, [1, 2, 3]) == 3
    assert cache.fetch_nearest_cache(OTHER, [1, 2, 3]) == (None, [1, 2, 3])


def test_shorter_and_longer_sequences_serve(make: Make) -> None:
    cache = make()
    cache.insert_cache(MODEL, [1, 2, 3, 4], kv([1, 2, 3, 4]))
    found, rest = cache.fetch_nearest_cache(MODEL, [1, 2, 3, 4, 5, 6])
    assert (tokens_in(found, [1, 2, 3, 4]), rest) == (4, [5, 6])
    found, rest = cache.fetch_nearest_cache(MODEL, [1, 2, 9])
    assert (tokens_in(found, [1, 2]), rest) == (2, [9])


def test_what_cannot_be_trimmed_serves_as_it_is_alone(make: Make) -> None:
    cache = make()
    cache.insert_cache(MODEL, [1, 2, 3], [Anything("x", trimmable=False)])
    assert cache.fetch_nearest_cache(MODEL, [1, 2, 9]) == (None, [1, 2, 9])
    assert cache.fetch_nearest_cache(MODEL, [1, 2, 3, 4])[1] == [4]


def test_a_longer_sequence_replaces_its_prefix_in_memory(make: Make) -> None:
    cache = make()
    cache.insert_cache(MODEL, [1, 2], kv([1, 2]))
    cache.insert_cache(MODEL, [1, 2, 3], kv([1, 2, 3]))
    assert len(cache) == 1
    cache.insert_cache(MODEL, [7], [Anything("x", trimmable=False)])
    cache.insert_cache(MODEL, [7, 8], [Anything("x", trimmable=False)])
    assert len(cache) == 3


def test_memory_keeps_the_latest_and_counts_bytes(make: Make) -> None:
    cache = make(max_size=2)
    for token in (1, 2, 3):
        cache.insert_cache(MODEL, [token], [Anything("x" * token)])
    assert (len(cache), cache.nbytes) == (2, 5)
    assert cache.fetch_nearest_cache(MODEL, [1]) == (None, [1])
    cache.insert_cache(MODEL, [2], [Anything("xx")])
    cache.insert_cache(MODEL, [4], [Anything("x")])
    assert cache.fetch_nearest_cache(MODEL, [3]) == (None, [3])
    small = make(max_bytes=10)
    small.insert_cache(MODEL, [1], [Anything("x" * 6)])
    small.insert_cache(MODEL, [2], [Anything("x" * 6)])
    assert (len(small), small.nbytes, small.max_bytes, small.max_size) == (1, 6, 10, 10)


def test_kinds_of_sequences_have_a_weight_of_their_own(make: Make) -> None:
    """Answers go before what users and systems said."""
    cache = make(max_size=3)
    for token, kind in ((1, "system"), (2, "user"), (3, "assistant"), (4, "assistant")):
        cache.insert_cache(MODEL, [token], [Anything("x")], cache_type=kind)
    found = cache.stats_by_type()
    assert {kind: numbers["n_sequences"] for kind, numbers in found.items()} == {"assistant": 1, "user": 1, "system": 1}
    assert sum(numbers["n_bytes"] for numbers in found.values()) == cache.nbytes
    assert cache.fetch_nearest_cache(MODEL, [3]) == (None, [3])


def test_trimming_to_a_number_or_to_bytes(make: Make) -> None:
    cache = make()
    for token in range(1, 6):
        cache.insert_cache(MODEL, [token], [Anything("xx")])
    cache.trim_to(n_sequences=3)
    assert len(cache) == 3
    cache.trim_to(n_bytes=2)
    assert (len(cache), cache.nbytes) == (1, 2)
    cache.trim_to(n_bytes=-1)
    assert len(cache) == 0


# ---- the store behind it


def test_another_process_goes_on_where_this_one_was(make: Make) -> None:
    first = make()
    tokens = list(range(1, 40))
    first.insert_cache(MODEL, tokens, kv(tokens))
    first.flush(60)
    second = make()
    found, rest = second.fetch_nearest_cache(MODEL, [*tokens, 77, 78])
    assert (tokens_in(found, tokens), rest) == (39, [77, 78])
    stats = second.stats
    assert (stats.hits_store, stats.hits_memory, stats.misses, stats.tokens_restored) == (1, 0, 0, 39)
    assert stats.bytes_restored > 0
    assert 0 < stats.last_restore_s < 60
    assert len(second) == 0  # memory has it when the request inserts


def test_the_store_is_asked_for_more_than_memory_knows_alone(make: Make) -> None:
    first = make()
    tokens = list(range(1, 40))
    first.insert_cache(MODEL, tokens, kv(tokens))
    first.flush(60)
    second = make()
    second.insert_cache(MODEL, tokens[:20], kv(tokens[:20]))
    assert tokens_in(second.fetch_nearest_cache(MODEL, tokens[:21])[0], tokens) == 20
    assert (second.stats.hits_memory, second.stats.hits_store) == (1, 0)
    assert tokens_in(second.fetch_nearest_cache(MODEL, [*tokens, 99])[0], tokens) == 39
    assert (second.stats.hits_memory, second.stats.hits_store) == (1, 1)


def test_models_never_see_each_other(make: Make) -> None:
    cache = make()
    cache.insert_cache(MODEL, list(range(30)), kv(range(30)))
    cache.flush(60)
    assert make().fetch_nearest_cache(OTHER, list(range(31)))[0] is None


@pytest.mark.parametrize("kind", ["trimmable", "not trimmable"])
def test_one_token_is_left_where_that_is_asked_for(make: Make, kind: str) -> None:
    cache = make(leave_one=True)
    tokens = list(range(1, 31))
    if kind == "trimmable":
        cache.insert_cache(MODEL, tokens, kv(tokens))
        found, rest = cache.fetch_nearest_cache(MODEL, tokens)
        assert (tokens_in(found, tokens), rest) == (29, [30])
    else:
        cache.insert_cache(MODEL, tokens, [Anything("x", trimmable=False)])
        cache.insert_cache(MODEL, tokens[:20], [Anything("y", trimmable=False)])
        found, rest = cache.fetch_nearest_cache(MODEL, tokens)
        assert found is not None
        assert (found[0].name, rest) == ("y", tokens[20:])
    assert cache.fetch_nearest_cache(MODEL, [5])[1] == [5]


def test_what_falls_out_of_memory_is_in_the_store(make: Make) -> None:
    cache = make(max_size=1)
    for start in (100, 200, 300):
        tokens = list(range(start, start + 20))
        cache.insert_cache(MODEL, tokens, kv(tokens))
    assert len(cache) == 1
    cache.flush(60)
    for start in (100, 200, 300):
        tokens = list(range(start, start + 20))
        assert tokens_in(cache.fetch_nearest_cache(MODEL, [*tokens, 1])[0], tokens) == 20


def test_what_is_stored_already_is_not_stored_again(make: Make, store: Store) -> None:
    cache = make()
    tokens = list(range(30))
    for length in (30, 30, 12):
        cache.insert_cache(MODEL, tokens[:length], kv(tokens[:length]))
        cache.flush(60)
    assert cache.stats.stored == 1
    assert len(store.entries()) == 1


@pytest.mark.parametrize("supersede", [True, False])
def test_turns_supersede_one_another(make: Make, store: Store, supersede: bool) -> None:
    cache = make(supersede=supersede)
    tokens = list(range(60))
    for length in (20, 40, 60):
        cache.insert_cache(MODEL, tokens[:length], kv(tokens[:length]))
        cache.flush(60)
    assert sorted(entry.token_count for entry in store.entries()) == ([60] if supersede else [20, 40, 60])
    assert tokens_in(make().fetch_nearest_cache(MODEL, [*tokens[:20], 99])[0], tokens) == 20


def test_a_pinned_turn_is_kept(make: Make, store: Store) -> None:
    cache = make()
    cache.insert_cache(MODEL, list(range(20)), kv(range(20)))
    cache.flush(60)
    store.pin(store.entries()[0].entry_id)
    cache.insert_cache(MODEL, list(range(40)), kv(range(40)))
    cache.flush(60)
    assert len(store.entries()) == 2


def test_states_that_cannot_be_shortened_supersede_nothing(make: Make, store: Store) -> None:
    def hybrid(tokens: Sequence[int]) -> list[Any]:
        state = ArraysCache(1)
        state[0] = mx.array(rows_of(tokens, 4)[:, :, -1])
        return [extend(KVCache(), tokens), state]

    cache = make(prototypes=lambda key: [[KVCache(), ArraysCache(1)]])
    for length in (20, 40):
        cache.insert_cache(MODEL, list(range(length)), hybrid(range(length)))
        cache.flush(60)
    assert sorted(entry.token_count for entry in store.entries()) == [20, 40]
    found, rest = make(prototypes=lambda key: [[KVCache(), ArraysCache(1)]]).fetch_nearest_cache(
        MODEL, [*range(20), 99]
    )
    assert (tokens_in(found, range(20)), rest) == (20, [99])


# ---- keys and caches that disagree


def test_all_are_brought_to_the_least_that_one_of_them_holds(make: Make) -> None:
    """Speculative decoding: the key is ahead of the model, the model of its draft."""
    cache = make(prototypes=lambda key: [[KVCache(), KVCache()]])
    tokens = list(range(1, 20))
    cache.insert_cache(MODEL, tokens, [*kv(tokens[:18]), *kv(tokens[:17])])
    found, rest = cache.fetch_nearest_cache(MODEL, [*tokens, 50])
    assert found is not None
    assert ([layer.offset for layer in found], rest) == ([17, 17], [18, 19, 50])
    cache.flush(60)
    restored, rest = make(prototypes=lambda key: [[KVCache(), KVCache()]]).fetch_nearest_cache(MODEL, [*tokens, 50])
    assert restored is not None
    assert ([layer.offset for layer in restored], rest) == ([17, 17], [18, 19, 50])


def test_what_has_no_common_length_is_kept_nowhere(make: Make, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    full = extend(RotatingKVCache(max_size=8), range(20))
    state = ArraysCache(1)
    state[0] = mx.ones((1, 4))
    cache = make()
    cache.insert_cache(MODEL, list(range(21)), [full, *kv(range(18))])
    cache.insert_cache(MODEL, list(range(21)), [*kv(range(20)), *kv(range(18)), state])
    cache.flush(60)
    assert (len(cache), store.entries(), cache.stats.failures) == (0, [], 2)
    assert len(caplog.records) == 1


def test_composed_caches_are_brought_to_one_length(make: Make) -> None:
    cache = make()
    cache.insert_cache(MODEL, list(range(12)), [CacheList(*kv(range(12)), *kv(range(10)))])
    found, rest = cache.fetch_nearest_cache(MODEL, [*range(12), 5])
    assert found is not None
    assert ([leaf.offset for leaf in found[0].caches], rest) == ([10, 10], [10, 11, 5])


def test_images_stay_in_memory(make: Make, store: Store) -> None:
    cache = make()
    key = [1, 2, -7, -7, 3]
    cache.insert_cache(MODEL, key, kv([1, 2, 9, 9, 3]))
    cache.flush(60)
    assert (len(cache), store.entries()) == (1, [])
    assert cache.fetch_nearest_cache(MODEL, [*key, 4])[1] == [4]
    assert cache.fetch_nearest_cache(MODEL, [1, 2, -8, -8, 3, 4])[1] == [-8, -8, 3, 4]


def test_quantized_caches_are_found_by_the_second_kind_of_prototypes(make: Make) -> None:
    def prototypes(key: Any) -> list[list[Any]]:
        return [[QuantizedKVCache(group_size=32, bits=4)], [KVCache()]]

    cache = make(prototypes=prototypes)
    quantized = extend(QuantizedKVCache(group_size=32, bits=4), range(20), dim=32)
    cache.insert_cache(MODEL, list(range(20)), [quantized])
    cache.insert_cache(MODEL, list(range(50, 70)), kv(range(50, 70)))
    cache.flush(60)
    other = make(prototypes=prototypes)
    assert [type(layer) for layer in other.fetch_nearest_cache(MODEL, [*range(20), 1])[0] or ()] == [QuantizedKVCache]
    assert [type(layer) for layer in other.fetch_nearest_cache(MODEL, [*range(50, 70), 1])[0] or ()] == [KVCache]


# ---- batches


def batched(tokens: Sequence[int], capacity: int = 64) -> BatchKVCache:
    """A batch of two, the second of which holds `tokens`."""
    other = [3, *tokens[:-3]]
    cache = BatchKVCache.merge([extend(KVCache(), other), extend(KVCache(), tokens)])
    mx.eval(cache.keys, cache.values)
    return cache


def test_rows_of_a_batch_are_stored_from_where_they_lie(make: Make) -> None:
    tokens = list(range(1, 41))
    cache = make()
    with viewed_extractions():
        taken = batched(tokens).extract(1)
        cache.insert_cache(MODEL, tokens, [taken])
    cache.flush(60)
    assert not [name for name in vars(taken) if name.startswith("_blockstore_rows")]
    assert tokens_in(cache.fetch_nearest_cache(MODEL, [*tokens, 9])[0], tokens) == 40
    assert tokens_in(make().fetch_nearest_cache(MODEL, [*tokens, 9])[0], tokens) == 40
    assert not hasattr(batched(tokens).extract(1), "_blockstore_rows")


def test_a_key_behind_a_batch_shortens_its_rows(make: Make) -> None:
    tokens = list(range(1, 41))
    cache = make()
    with viewed_extractions():
        cache.insert_cache(MODEL, tokens[:33], [batched(tokens).extract(1)])
    cache.flush(60)
    assert tokens_in(make().fetch_nearest_cache(MODEL, [*tokens[:33], 9])[0], tokens) == 33


def test_a_continued_batch_writes_what_is_new(make: Make, store: Store) -> None:
    """Rows that were taken out of a batch remember nothing: the entry that they continue is looked up."""
    cache = make()
    tokens = list(range(1, 129))
    cache.insert_cache(MODEL, tokens[:96], [extend(KVCache(), tokens[:96])])
    cache.flush(60)
    names = set(os.listdir(os.path.join(store.root, "blocks")))
    cache.insert_cache(MODEL, tokens, [batched(tokens).extract(1)])
    cache.flush(60)
    new = set(os.listdir(os.path.join(store.root, "blocks"))) - names
    assert len(new) == 8  # 32 tokens in blocks of 4


# ---- failures


class Failing(Store):
    """Fails where it is told to."""

    failure: Exception | None = None
    where: tuple[str, ...] = ()

    def _fail(self, name: str) -> None:
        if self.failure is not None and name in self.where:
            raise self.failure

    def find(self, *args: Any, **options: Any) -> Any:
        self._fail("find")
        return super().find(*args, **options)

    def restore(self, *args: Any, **options: Any) -> Any:
        self._fail("restore")
        return super().restore(*args, **options)

    def prepare(self, *args: Any, **options: Any) -> Any:
        self._fail("prepare")
        return super().prepare(*args, **options)

    def commit(self, *args: Any, **options: Any) -> Any:
        self._fail("commit")
        return super().commit(*args, **options)


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Failing]:
    with Failing(tmp_path / "failing", span=4, durability="none") as opened:
        yield opened


@pytest.mark.parametrize("where", ["find", "restore", "prepare", "commit"])
@pytest.mark.parametrize("failure", [OSError(5, "input/output error"), StoreFull("no room"), RuntimeError("a bug")])
def test_no_failure_of_the_store_fails_a_request(
    make: Make, failing: Failing, where: str, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = list(range(1, 31))
    first = make(store=failing)
    first.insert_cache(MODEL, tokens, kv(tokens))
    first.flush(60)
    failing.failure, failing.where = failure, (where,)
    second = make(store=failing)
    second.insert_cache(MODEL, [*tokens, 60], kv([*tokens, 60]))
    second.insert_cache(MODEL, [70, 71], kv([70, 71]))
    assert tokens_in(second.fetch_nearest_cache(MODEL, [70, 71, 72])[0], [70, 71]) == 2
    found, _ = make(store=failing).fetch_nearest_cache(MODEL, [*tokens, 99])
    assert (found is None) == (where in ("find", "restore"))
    if where == "commit":
        with pytest.raises(NotStored, match=type(failure).__name__):
            second.flush(60)
    kinds = [record.getMessage().split(";")[0] for record in caplog.records if record.levelno >= logging.ERROR]
    assert kinds
    failing.failure = None


def test_what_failed_is_tried_again(make: Make, failing: Failing) -> None:
    failing.failure, failing.where = StoreFull("no room"), ("commit",)
    cache = make(store=failing)
    tokens = list(range(1, 31))
    cache.insert_cache(MODEL, tokens, kv(tokens))
    while cache.stats.failures == 0:
        threading.Event().wait(0.01)
    assert len(cache) == 1
    failing.failure = None
    cache.flush(60)
    assert cache.stats.stored == 1
    assert tokens_in(make(store=failing).fetch_nearest_cache(MODEL, [*tokens, 9])[0], tokens) == 30


def test_a_snapshot_without_its_past_is_taken_again(make: Make, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry that a snapshot continues went before it was committed."""
    cache = make()
    tokens = list(range(1, 61))
    layers = kv(tokens[:40])
    cache.insert_cache(MODEL, tokens[:40], layers)
    cache.flush(60)
    found, _ = cache.fetch_nearest_cache(MODEL, [*tokens[:40], 41])
    assert found is not None
    extend(found[0], tokens)
    real, lost = store.commit, list[str]()

    def commit(prepared: Any) -> Any:
        if not lost:
            assert prepared.taken
            lost.extend(entry.entry_id for entry in store.entries())
            for entry_id in lost:
                store.remove(entry_id)
            store.gc()
        return real(prepared)

    monkeypatch.setattr(store, "commit", commit)
    cache.insert_cache(MODEL, tokens, found)
    cache.flush(60)
    assert [entry.token_count for entry in store.entries()] == [60]
    assert tokens_in(make().fetch_nearest_cache(MODEL, [*tokens, 9])[0], tokens) == 60


def test_what_cannot_be_taken_again_is_given_up(make: Make, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The past of a snapshot went, and a new one fails: flush must come to an end, and say so."""

    def commit(prepared: Any) -> Any:
        raise EntryGone("its past is gone")

    def prepare(*_: Any, **__: Any) -> Any:
        raise InvalidInput("no snapshot")

    cache = make()
    monkeypatch.setattr(store, "commit", commit)
    cache.insert_cache(MODEL, list(range(20)), kv(range(20)))
    while cache.stats.failures == 0:
        threading.Event().wait(0.01)
    monkeypatch.setattr(store, "prepare", prepare)
    with pytest.raises(NotStored, match="20 tokens of model: InvalidInput"):
        cache.flush(60)
    assert cache.stats.failed == 1


def test_what_waits_keeps_no_caches(make: Make, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few new rows: what falls out of memory meanwhile is free, and what waits is stored all the same."""
    cache = make(max_size=1)
    starts = (100, 200, 300)
    for start in starts:
        cache.insert_cache(MODEL, list(range(start, start + 40)), kv(range(start, start + 40)))
    cache.flush(60)
    go_on, real = threading.Event(), store.commit
    monkeypatch.setattr(store, "commit", lambda prepared: (go_on.wait(60), real(prepared))[1])
    taken = list["weakref.ref[Any]"]()
    for start in starts:
        tokens = list(range(start, start + 42))
        caches, _ = cache.fetch_nearest_cache(MODEL, tokens)
        assert caches is not None
        cache.insert_cache(MODEL, tokens, [extend(caches[0], tokens)])
        taken.append(weakref.ref(caches[0]))
        del caches
    waiting = cache.stats.pending_count
    gc.collect()
    kept = [reference() is not None for reference in taken]
    go_on.set()
    assert (waiting, kept) == (3, [False, False, True])
    cache.flush(60)
    assert sorted(entry.token_count for entry in store.entries()) == [42, 42, 42]


def test_what_cannot_be_taken_again_since_it_fell_out_of_memory_is_said(
    make: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(prepared: Any) -> Any:
        raise EntryGone("its past is gone")

    cache = make()
    monkeypatch.setattr(store, "commit", commit)
    cache.insert_cache(MODEL, list(range(20)), kv(range(20)))
    cache.settle()
    cache.trim_to(n_sequences=0)
    gc.collect()
    with pytest.raises(NotStored, match=r"20 tokens of model: EntryGone: .* went from memory"):
        cache.flush(60)


def test_a_stored_turn_stands_for_one_that_failed(make: Make, failing: Failing) -> None:
    failing.failure, failing.where = StoreFull("no room"), ("commit",)
    cache = make(store=failing)
    cache.insert_cache(MODEL, list(range(20)), kv(range(20)))
    while cache.stats.failures == 0:
        threading.Event().wait(0.01)
    failing.failure = None
    cache.insert_cache(MODEL, list(range(40)), kv(range(40)))
    cache.flush(60)
    assert [entry.token_count for entry in failing.entries()] == [40]


def test_what_waits_to_be_tried_again_is_counted_as_pending(make: Make, failing: Failing) -> None:
    failing.failure, failing.where = StoreFull("no room"), ("commit",)
    cache = make(store=failing)
    cache.insert_cache(MODEL, list(range(20)), kv(range(20)))
    cache.settle()
    assert (cache.stats.pending_count, cache.stats.pending_bytes) == (
        1,
        20 * 2 * 4 * 4,
    )  # rows, keys and values, floats, bytes
    failing.failure = None
    cache.flush(60)
    assert (cache.stats.pending_count, cache.stats.pending_bytes) == (0, 0)


def test_a_store_that_fails_for_long_is_remembered_briefly(make: Make, failing: Failing) -> None:
    failing.failure, failing.where = StoreFull("no room"), ("commit",)
    cache = make(store=failing)
    for start in range(0, 3000, 100):
        cache.insert_cache(MODEL, list(range(start, start + 20)), kv(range(start, start + 20)))
    with pytest.raises(NotStored, match="and 10 before") as caught:
        cache.flush(60)
    assert str(caught.value).count("20 tokens of model: StoreFull") == 20
    failing.failure = None
    cache.flush(60)


def test_what_somebody_else_stored_is_not_missing(make: Make, failing: Failing) -> None:
    failing.failure, failing.where = StoreFull("no room"), ("commit",)
    cache = make(store=failing)
    for tokens in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):  # each insert tries the former ones again
        cache.insert_cache(MODEL, tokens, kv(tokens))
        cache.settle()
    assert cache.stats.failed == 1
    failing.failure = None
    failing.save([1, 2, 3], kv([1, 2, 3]), identity(MODEL[0]))
    cache.insert_cache(MODEL, [1, 2, 3], kv([1, 2, 3]))
    cache.flush(60)


def test_flush_says_what_was_dropped(make: Make, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = store.commit
    monkeypatch.setattr(store, "commit", lambda prepared: (go_on.wait(60), real(prepared))[1])
    cache = make(queue_bytes=1, supersede=False)
    for start in (100, 200, 300):
        cache.insert_cache(MODEL, list(range(start, start + 20)), kv(range(start, start + 20)))
    go_on.set()
    with pytest.raises(NotStored, match="20 tokens of model: dropped"):
        cache.flush(60)
    cache.flush(60)
    assert (cache.stats.dropped, cache.stats.stored) == (1, 2)


def test_flush_keeps_to_its_time(make: Make, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = store.commit
    monkeypatch.setattr(store, "commit", lambda prepared: (go_on.wait(60), real(prepared))[1])
    cache = make()
    cache.insert_cache(MODEL, [1, 2, 3], kv([1, 2, 3]))
    with pytest.raises(NotStored, match="in time"):
        cache.flush(0.05)
    go_on.set()
    cache.flush(60)
    assert cache.stats.stored == 1


def test_a_model_without_an_identity_is_kept_in_memory(make: Make, store: Store) -> None:
    calls = list[Any]()

    def unknown(key: Any) -> Identity:
        calls.append(key)
        raise EntryGone("no such directory")

    cache = make(identity=unknown)
    for _ in range(3):
        cache.insert_cache(MODEL, [1, 2, 3], kv([1, 2, 3]))
        assert cache.fetch_nearest_cache(MODEL, [1, 2, 3, 4])[1] == [4]
    cache.flush(60)
    assert (calls, store.entries(), cache.stats.failures) == ([MODEL], [], 1)


def test_a_deep_copy_in_memory_goes_on_alone(make: Make) -> None:
    """What was fetched may be decoded on while its snapshot is written."""
    cache = make()
    tokens = list(range(1, 31))
    cache.insert_cache(MODEL, tokens, kv(tokens))
    found, _ = cache.fetch_nearest_cache(MODEL, [*tokens, 77])
    twin = copy.deepcopy(found)
    assert found is not None
    extend(found[0], [*tokens, 77, 78])
    cache.flush(60)
    assert tokens_in(twin, tokens) == 30
    assert tokens_in(make().fetch_nearest_cache(MODEL, [*tokens, 9])[0], tokens) == 30
