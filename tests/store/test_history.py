"""Known history: caches that continue an entry are saved by what is new of them, and never believed without a look."""

import copy
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

import kvcodecs
from blockstore import CorruptEntry, EntryGone, InvalidInput, Match, Store, history, packing
from store_kit import all_facts, assert_clean, assert_exact, block_names, block_path, header_of, named_blocks
from token_caches import IDENTITY, extend, hybrid, plain, recurrent, small_store

FIRST = list(range(13))
LONGER = list(range(30))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "store") as opened:
        yield opened


def grown(caches: list[Any], tokens: list[int]) -> list[Any]:
    for layer, cache in enumerate(caches):
        extend(cache, tokens, salt=layer)
    return caches


class Packed:
    """Counts the blocks that are made."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __enter__(self) -> "Packed":
        real, numbers = packing.Packer.pack, self.numbers

        def pack(packer: packing.Packer, number: int) -> memoryview:
            numbers.append(number)
            return real(packer, number)

        self._patch = mock.patch.object(packing.Packer, "pack", pack)
        self._patch.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._patch.stop()


def save(store: Store, tokens: list[int], caches: list[Any], **options: Any) -> Any:
    saved = store.save(tokens, caches, IDENTITY, **options)
    assert all_facts(store.load(saved.entry_id).caches) == all_facts(caches)
    return saved


def test_a_saved_cache_that_goes_on_is_saved_by_its_new_blocks(store: Store) -> None:
    long = list(range(800))
    caches = plain(long)
    first = save(store, long, caches)
    longer = [*long, 1, 2, 3, 4, 5]
    with Packed() as packed:
        second = save(store, longer, grown(caches, longer))
    assert second.blocks_written == 2
    assert second.blocks_reused == first.blocks_written
    # A sample, the new ones; far fewer than all.
    assert len(packed.numbers) <= 2 + 1 + 4
    assert named_blocks(header_of(store, first.entry_id)) < named_blocks(header_of(store, second.entry_id))
    store.gc()
    assert_exact(store)
    assert_clean(store)


def test_it_is_byte_for_byte_what_a_save_without_history_makes(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as known, small_store(tmp_path / "b") as unknown:
        caches = plain(FIRST, layers=3)
        known.save(FIRST, caches, IDENTITY)
        grown(caches, LONGER)
        one = known.save(LONGER, caches, IDENTITY)
        history.forget(caches)
        other = unknown.save(LONGER, caches, IDENTITY)
        assert named_blocks(header_of(known, one.entry_id)) == named_blocks(header_of(unknown, other.entry_id))


@pytest.mark.parametrize("deep", [False, True], ids=["the cache itself", "a deep copy"])
def test_a_loaded_cache_remembers_its_entry(store: Store, deep: bool) -> None:
    store.save(LONGER, plain(LONGER), IDENTITY)
    loaded = store.restore([*LONGER[:22], 77], IDENTITY)
    assert loaded is not None
    caches = copy.deepcopy(loaded.caches) if deep else loaded.caches
    tokens = [*LONGER[:22], 77, 78]
    with Packed() as packed:
        saved = store.save(tokens, grown(caches, tokens), IDENTITY)
    assert saved.blocks_written == 1
    assert history.remembered(store.root, caches) is not None
    assert len(set(packed.numbers)) <= 1 + 1 + 4


@pytest.mark.parametrize("named", ["Saved", "Match", "Loaded", "id"])
def test_an_entry_may_be_named_as_the_parent(store: Store, named: str) -> None:
    saved = store.save(FIRST, plain(FIRST), IDENTITY)
    parent = {
        "Saved": saved,
        "Match": store.find(LONGER, IDENTITY),
        "Loaded": store.load(saved.entry_id),
        "id": saved.entry_id,
    }[named]
    strangers = plain(LONGER)
    with mock.patch.object(packing.Packer, "taken", autospec=True, side_effect=packing.Packer.taken) as taken:
        found = save(store, LONGER, strangers, parent=parent)
    assert taken.called
    assert found.blocks_reused == 3
    assert_clean(store)


@pytest.mark.parametrize("parent", [7, 1.5, ["x"], "", "hello", "aa", "A" * 32, Match("", 1, 1)])
def test_what_names_no_entry_is_refused(store: Store, parent: Any) -> None:
    with pytest.raises(InvalidInput, match="parent"):
        store.save(FIRST, plain(FIRST), IDENTITY, parent=parent)
    save(store, FIRST, plain(FIRST))


def test_a_parent_that_is_gone_costs_a_look_at_everything(store: Store) -> None:
    saved = store.save(FIRST, plain(FIRST), IDENTITY)
    store.remove(saved.entry_id)
    store.gc()
    save(store, LONGER, plain(LONGER), parent=saved)
    assert_clean(store)


def test_a_wrong_parent_is_found_out_by_the_sample(store: Store) -> None:
    """The same tokens, but other bytes: a cache that was computed anew."""
    parent = store.save(LONGER, [extend(kvcodecs.KVCache(), LONGER, salt=9)], IDENTITY)
    longer = [*LONGER, 1, 2]
    caches = plain(longer)
    saved = save(store, longer, caches, parent=parent)
    assert not named_blocks(header_of(store, saved.entry_id)) & named_blocks(header_of(store, parent.entry_id))


def test_a_seeded_program_goes_on_as_it_would_without_a_save(store: Store) -> None:
    caches = plain(FIRST)
    store.save(FIRST, caches, IDENTITY)
    random.seed(5)
    expected = random.getstate()
    save(store, LONGER, grown(caches, LONGER))
    assert random.getstate() == expected


def test_caches_that_were_trimmed_and_went_elsewhere_share_what_they_share(store: Store) -> None:
    caches = plain(LONGER)
    store.save(LONGER, caches, IDENTITY)
    caches[0].trim(20)
    other = [*LONGER[:10], *range(60, 90)]
    saved = save(store, other, grown(caches, other))
    assert saved.blocks_reused == 2
    assert_clean(store)


def test_caches_of_different_entries_have_no_common_history(store: Store) -> None:
    one, other = plain(FIRST), plain(FIRST)
    store.save(FIRST, one, IDENTITY)
    store.save(LONGER, plain(LONGER), IDENTITY)
    mixed = [one[0], other[0]]
    assert history.remembered(store.root, mixed) is None
    assert history.remembered(store.root + "x", one) is None


@pytest.mark.parametrize("how", ["evicted", "deleted from outside"])
def test_blocks_that_went_since_are_made_again_by_a_save(store: Store, how: str) -> None:
    caches = plain(FIRST)
    saved = store.save(FIRST, caches, IDENTITY)
    lose(store, saved.entry_id, how)
    save(store, LONGER, grown(caches, LONGER))
    if how == "deleted from outside":
        with pytest.raises(CorruptEntry):  # its own last block is still missing
            store.load(saved.entry_id)
    store.gc()
    assert_exact(store)
    assert_clean(store)


def lose(store: Store, entry_id: str, how: str) -> None:
    if how == "evicted":
        store.remove(entry_id)
        store.gc()
    else:
        for name in block_names(store):
            block_path(store, name).unlink()


@pytest.mark.parametrize("how", ["evicted", "deleted from outside"])
def test_a_commit_whose_history_went_says_so_and_the_next_one_makes_all(store: Store, how: str) -> None:
    caches = plain(FIRST)
    saved = store.save(FIRST, caches, IDENTITY)
    prepared = store.prepare(LONGER, grown(caches, LONGER), IDENTITY)
    lose(store, saved.entry_id, how)
    with pytest.raises(EntryGone, match="continue"):
        store.commit(prepared)
    assert Path(store.root, "leases").exists()
    assert list(Path(store.root, "leases").iterdir()) == []
    again = store.commit(store.prepare(LONGER, caches, IDENTITY))
    assert all_facts(store.load(again.entry_id).caches) == all_facts(caches)


def test_a_named_parent_whose_blocks_went_fails_one_commit_alone(store: Store) -> None:
    parent = store.save(FIRST, plain(FIRST), IDENTITY)
    lose(store, parent.entry_id, "deleted from outside")
    with pytest.raises(EntryGone, match="continue"):
        store.commit(store.prepare(LONGER, plain(LONGER), IDENTITY, parent=parent))
    saved = store.commit(store.prepare(LONGER, plain(LONGER), IDENTITY, parent=parent))
    assert all_facts(store.load(saved.entry_id).caches) == all_facts(plain(LONGER))
    with pytest.raises(CorruptEntry):  # its own last block is still missing
        store.load(parent.entry_id)
    assert_clean(store)


def test_a_parent_that_loads_again_is_taken_over_again(store: Store) -> None:
    parent = store.save(LONGER[:12], plain(LONGER[:12]), IDENTITY)
    lose(store, parent.entry_id, "deleted from outside")
    with pytest.raises(EntryGone):
        store.commit(store.prepare(LONGER, plain(LONGER), IDENTITY, parent=parent))
    store.save(LONGER, plain(LONGER), IDENTITY)
    store.load(parent.entry_id)
    prepared = store.prepare([*LONGER, 1], plain([*LONGER, 1]), IDENTITY, parent=parent)
    assert [taken.tokens for taken in prepared.taken] == [12]


def test_prepare_with_history_leaves_the_caches_free_and_the_snapshot_as_it_was(store: Store) -> None:
    caches = plain(LONGER)
    store.save(LONGER, caches, IDENTITY)
    longer = [*LONGER, *range(50, 60)]
    grown(caches, longer)
    expected = all_facts(caches)
    prepared = store.prepare(longer, caches, IDENTITY)
    assert all(view.base is None or view.flags.owndata for view in prepared.views.values())
    address = np.asarray(memoryview(caches[0].keys)).ctypes.data
    grown(caches, [*longer, 5, 6])
    mx.eval(caches[0].keys)
    gc.collect()
    assert np.asarray(memoryview(caches[0].keys)).ctypes.data == address, "the live array was copied"
    saved = store.commit(prepared)
    assert all_facts(store.load(saved.entry_id).caches) == expected


def test_saving_the_same_again_takes_everything_over(store: Store) -> None:
    caches = plain(FIRST)
    first = store.save(FIRST, caches, IDENTITY)
    second = save(store, FIRST, caches)
    assert (second.blocks_written, second.blocks_reused) == (0, first.blocks_written)
    assert [entry.entry_id for entry in store.entries()] == [second.entry_id]
    store.gc()
    assert_exact(store)


def test_layers_without_a_token_axis_are_made_each_time(store: Store) -> None:
    caches = hybrid(FIRST)
    store.save(FIRST, caches, IDENTITY)
    again = hybrid(LONGER)
    history.remember(again, history.of_header(store.root, "x", header_of(store, store.entries()[0].entry_id)))
    saved = save(store, LONGER, again)
    assert saved.blocks_reused == 3


def test_a_list_of_caches_without_blocks_in_groups_remembers_nothing(store: Store) -> None:
    caches = [recurrent(FIRST)]
    store.save(FIRST, caches, IDENTITY)
    assert history.remembered(store.root, caches) is None


@pytest.mark.parametrize(("one", "other", "common"), [
    ([], [1], 0), ([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1), ([7], [8], 0),
    (list(range(1000)), [*range(777), 1, 2], 777),
])  # fmt: skip
def test_common_tokens(one: list[int], other: list[int], common: int) -> None:
    packed = [np.array(tokens, "<u4").tobytes() for tokens in (one, other)]
    assert history.common_tokens(*packed) == common
