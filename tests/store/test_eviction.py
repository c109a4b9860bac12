"""Eviction at the cap: by last use, as many as it takes, nothing pinned, and nothing that the save itself needs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from blockstore import EntryGone, Store, StoreFull, admission
from blockstore.environment import Environment
from store_kit import all_facts, assert_exact, lease_folders
from token_caches import identity, plain, small_store

UNLIMITED = 1 << 40


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The index file counts for nothing here: how many pages LMDB takes is not ours to foresee."""
    with (
        mock.patch.object(Environment, "used_bytes", return_value=0),
        small_store(tmp_path / "store", max_bytes=UNLIMITED) as opened,
    ):
        yield opened


def tokens_of(name: str) -> list[int]:
    return [ord(name), *range(8)]


def save(store: Store, name: str, *, pinned: bool = False) -> str:
    return store.save(tokens_of(name), plain(tokens_of(name)), identity(name), pinned=pinned).entry_id


def standing(store: Store) -> str:
    """The names of the entries, in order."""
    return "".join(sorted(str(entry.ns) for entry in store.entries()))


def cap_at(store: Store, spare: int) -> None:
    """A cap that leaves `spare` bytes beside what is there now."""
    store.set_limits(max_bytes=admission.used_bytes(store._rooms) + spare)


def entry_bytes(store: Store) -> int:
    """What one of these entries takes: all of them are of one size and share nothing."""
    before = store._rooms.index.total_bytes()
    entry_id = save(store, "z")
    taken = store._rooms.index.total_bytes() - before
    store.remove(entry_id)
    store.gc()
    return taken


Use = Callable[[Store, dict[str, str]], object]
USES: dict[str, tuple[Use, str]] = {
    "none: the first goes": (lambda store, ids: None, "bcdx"),
    "a load": (lambda store, ids: store.load(ids["a"]), "acdx"),
    "loads, one of them twice": (lambda store, ids: [store.load(ids[name]) for name in "abcda"], "acdx"),
    "a restore": (lambda store, ids: store.restore([*tokens_of("a"), 1], identity("a")), "acdx"),
    "a look is no use": (lambda store, ids: store.find([*tokens_of("a"), 1], identity("a")), "bcdx"),
    "saving again": (lambda store, ids: save(store, "a"), "acdx"),
    "a load, then other saves": (lambda store, ids: [store.load(ids["a"]), *(save(store, n) for n in "bcd")], "bcdx"),
}  # fmt: skip


@pytest.mark.parametrize(("use", "left"), USES.values(), ids=USES)
def test_what_was_used_the_longest_ago_goes_first(use: Use, left: str, store: Store) -> None:
    ids = {name: save(store, name) for name in "abcd"}
    use(store, ids)
    cap_at(store, 0)
    save(store, "x")
    assert standing(store) == left
    assert_exact(store)


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_as_many_go_as_it_takes_and_the_cap_holds(spare: int, store: Store) -> None:
    for name in "abcd":
        save(store, name)
    one = entry_bytes(store)
    cap_at(store, -one * (3 - spare))
    cap = store.limits.max_bytes
    save(store, "x")
    assert standing(store) == "abcd"[4 - spare :] + "x"
    assert cap is not None
    assert admission.used_bytes(store._rooms) <= cap


def test_growing_an_entry_evicts_it_last_and_keeps_what_both_share(store: Store) -> None:
    tokens = list(range(40))
    old = store.save(tokens, plain(tokens), identity("old"))
    cap_at(store, store._rooms.index.on_disk(1) * 2)  # for the two new blocks, but for no second header
    longer = [*tokens, *range(8)]
    new = store.save(longer, plain(longer), identity("new"))
    assert new.blocks_reused == old.blocks_written, "the old entry had to go, but not the blocks that are wanted now"
    assert standing(store) == "new"
    assert all_facts(store.load(new.entry_id).caches) == all_facts(plain(longer))


def test_pinned_entries_stay_and_where_nothing_else_is_left_the_save_fails(store: Store) -> None:
    save(store, "a", pinned=True)
    save(store, "b")
    cap_at(store, 0)
    save(store, "x")
    assert standing(store) == "ax"
    store.pin(next(entry.entry_id for entry in store.entries() if entry.ns == "x"))
    with pytest.raises(StoreFull):
        save(store, "y")
    assert standing(store) == "ax"
    assert lease_folders(store) == []
    store.gc()
    assert_exact(store)


def test_a_save_that_could_never_fit_costs_nobody_anything(store: Store) -> None:
    for name in "abc":
        save(store, name)
    cap_at(store, 0)
    large = list(range(4_000))
    with pytest.raises(StoreFull):
        store.save(large, plain(large), identity("large"))
    assert standing(store) == "abc"
    store.gc()
    assert_exact(store)


def test_what_is_dead_goes_before_what_lives(store: Store) -> None:
    gone = save(store, "a")
    save(store, "b")
    cap_at(store, 0)
    store.remove(gone)
    save(store, "x")
    assert standing(store) == "bx"


def test_quarantine_counts(store: Store, tmp_path: Path) -> None:
    save(store, "a")
    cap_at(store, 2 * entry_bytes(store))
    (tmp_path / "store" / "quarantine" / "moved").write_bytes(b"x" * 2 * entry_bytes(store))
    save(store, "x")
    assert standing(store) == "x"


def test_a_pin_of_what_is_gone_says_so(store: Store) -> None:
    entry_id = save(store, "a")
    store.remove(entry_id)
    with pytest.raises(EntryGone):
        store.pin(entry_id)
