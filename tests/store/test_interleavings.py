"""What others do between two steps of a save, a load or a collection: each rule of the protocol in the code itself.

tests/protocol has the model of it; here another actor is let in at the very point where the rule matters.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockstore import CacheMiss, CorruptEntry, EntryGone, Store
from blockstore.index import Index
from fs_doubles import FailingAt, Watching
from store_kit import (
    all_facts,
    assert_clean,
    assert_exact,
    block_names,
    block_path,
    flip,
    header_paths,
    lease_folders,
)
from token_caches import IDENTITY, identity, plain, small_store

TOKENS = list(range(12))
OTHERS = [*range(10), 90, 91, 92, 93, 94]
UNLIKE = list(range(70, 90))


@pytest.fixture
def fs() -> Watching:
    return Watching()


@pytest.fixture
def store(tmp_path: Path, fs: Watching) -> Iterator[Store]:
    with small_store(tmp_path / "store", fs=fs) as opened:
        yield opened


def save(store: Store, tokens: list[int] = TOKENS, ns: str = "") -> str:
    return store.save(tokens, plain(tokens), identity(ns)).entry_id


def assert_loads(store: Store, entry_id: str, tokens: list[int] = TOKENS) -> None:
    assert all_facts(store.load(entry_id).caches) == all_facts(plain(tokens))


def assert_sound(store: Store) -> None:
    store.gc()
    assert_exact(store)
    assert_clean(store)


def before_first(monkeypatch: pytest.MonkeyPatch, step: str, act: Callable[[], object]) -> None:
    """Let another actor in right before the first time that the index takes `step`."""
    real: Callable[..., Any] = getattr(Index, step)
    waiting = [act]

    def stepped(self: Index, *args: Any, **options: Any) -> Any:
        if waiting:
            waiting.pop()()
        return real(self, *args, **options)

    monkeypatch.setattr(Index, step, stepped)


def collect_all(store: Store) -> None:
    for entry in store.entries():
        store.remove(entry.entry_id)
    store.gc()


# ---- what a save may believe


def test_a_block_that_has_gone_is_written_again(store: Store) -> None:
    first = save(store)
    block_path(store, min(block_names(store))).unlink()
    second = save(store, ns="other")
    assert_loads(store, second)
    assert_loads(store, first)
    assert_sound(store)


def test_a_block_that_nobody_refers_to_is_written_again(store: Store) -> None:
    """Nothing says that it is still what it was: nobody would have noticed."""
    store.remove(save(store))
    for name in block_names(store):
        flip(block_path(store, name))
    assert_loads(store, save(store))
    assert_sound(store)


def test_a_bad_block_that_a_load_has_met_is_written_again_and_heals_whoever_shares_it(store: Store) -> None:
    first, second = save(store), save(store, ns="other")
    flip(block_path(store, min(block_names(store))))
    with pytest.raises(CorruptEntry):
        store.load(first)
    again = store.save(TOKENS, plain(TOKENS), IDENTITY)
    assert again.blocks_written == 1
    assert_loads(store, again.entry_id)
    assert_loads(store, second)
    assert_sound(store)


# ---- between the steps of a save


def test_what_was_known_and_is_collected_before_the_reservation_is_written_after_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store)
    before_first(monkeypatch, "reserve", lambda: collect_all(store))
    saved = store.save(TOKENS, plain(TOKENS), identity("other"))
    assert saved.blocks_written == len(block_names(store))
    assert_loads(store, saved.entry_id)
    assert_sound(store)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("step", ["publish", "block", "header"])
def test_a_collection_in_the_middle_of_a_save_takes_nothing_of_it(
    step: str, full: bool, store: Store, fs: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store)

    def collect() -> None:
        collect_all(store)
        store.gc(full=full)

    if step == "publish":
        before_first(monkeypatch, "publish", collect)
    else:
        fs.once(lambda call: call.places_block if step == "block" else call.places_header, collect)
    assert_loads(store, save(store, OTHERS), OTHERS)
    assert_sound(store)


def test_a_hit_that_is_found_bad_before_publication_is_written_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(store)

    def condemn() -> None:
        flip(block_path(store, min(block_names(store))))
        with pytest.raises(CorruptEntry):
            store.load(first)

    before_first(monkeypatch, "publish", condemn)
    saved = store.save(TOKENS, plain(TOKENS), identity("other"))
    assert saved.blocks_written == 1
    assert_loads(store, saved.entry_id)
    assert_sound(store)


@pytest.mark.parametrize("first_wins", [False, True])
def test_of_two_saves_of_the_same_at_once_the_later_one_stays(
    first_wins: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []
    before_first(monkeypatch, "publish" if first_wins else "reserve", lambda: ids.append(save(store)))
    ids.append(save(store))
    [entry] = store.entries()
    assert entry.entry_id == ids[-1]
    assert_loads(store, ids[-1])
    assert set(header_paths(store)) == {ids[-1]}
    assert_sound(store)


def test_a_writer_that_died_before_its_blocks_had_names_is_not_believed(store: Store, fs: Watching) -> None:
    """Two save the same at once; one of them has reserved and dies: the other one places every block."""

    class Died(BaseException):
        pass

    def die() -> None:
        raise Died

    other = store.prepare(TOKENS, plain(TOKENS), identity("other"))
    ids: list[str] = []

    def meanwhile() -> None:
        fs.once(lambda call: call.places_block, die)
        with pytest.raises(Died):
            store.commit(other)

    fs.once(lambda call: call.places_block, meanwhile)
    ids.append(save(store))
    assert_loads(store, ids[0])
    assert_sound(store)


def test_a_lease_whose_folder_is_collected_before_it_is_locked_is_taken_anew(store: Store, fs: Watching) -> None:
    fs.once(lambda call: call.name == "try_lock" and "leases" in call.path, store.gc)
    assert_loads(store, save(store))
    assert_sound(store)


def test_a_save_that_fails_is_undone_at_once(tmp_path: Path) -> None:
    fs = FailingAt()
    with small_store(tmp_path / "store", fs=fs) as store:
        save(store)
        for k in itertools.count():
            fs.arm(k)
            try:
                save(store, OTHERS)
            except OSError:
                fs.disarm()
                stats = store.stats()
                assert (stats.unfinished_saves, stats.entries, len(header_paths(store))) == (0, 1, 1)
            else:
                break
        assert k > 5


# ---- between the steps of a load


def test_a_load_that_fails_drops_nothing_that_is_whole_again(store: Store, fs: Watching, tmp_path: Path) -> None:
    entry_id = save(store)
    path = block_path(store, min(block_names(store)))
    aside = tmp_path / "aside"
    path.rename(aside)
    with pytest.MonkeyPatch.context() as patch:
        before_first(patch, "condemn", lambda: aside.rename(path))
        with pytest.raises(CorruptEntry):
            store.load(entry_id)
    assert_loads(store, entry_id)
    assert_sound(store)


def test_an_entry_that_is_removed_while_it_is_loaded_is_a_miss_and_nothing_else_is_dropped(
    store: Store, fs: Watching
) -> None:
    entry_id, other = save(store), save(store, UNLIKE, "other")
    fs.once(lambda call: call.name == "open_read" and call.within("blocks"), lambda: forget(store, entry_id))
    with pytest.raises(CacheMiss):
        store.load(entry_id)
    with pytest.raises(EntryGone):
        store.load(entry_id)
    assert_loads(store, other, UNLIKE)
    assert_sound(store)


def forget(store: Store, entry_id: str) -> None:
    store.remove(entry_id)
    store.gc()


def test_a_bad_entry_that_is_replaced_before_it_is_condemned_leaves_the_new_one_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_id, new = save(store), []
    header_paths(store)[entry_id].unlink()
    before_first(monkeypatch, "condemn", lambda: new.append(save(store)))
    with pytest.raises(CorruptEntry):
        store.load(entry_id)
    assert_loads(store, new[0])
    assert_sound(store)


# ---- collectors among themselves


def test_two_collections_at_once_take_each_thing_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.remove(save(store))
    save(store, OTHERS)
    plans = []
    before_first(monkeypatch, "collect", lambda: plans.append(store.gc()))
    plans.append(store.gc())
    taken = [item.name for plan in plans for item in plan.items if item.what == "block"]
    assert len(taken) == len(set(taken)) > 0
    assert lease_folders(store) == []
    assert_sound(store)
