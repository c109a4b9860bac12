"""The power is cut after every single change of saves, replacements, removals and collections of the real store.

Whatever of the unsynced changes arrived: of a durable store every committed entry loads bit for bit; of one that
is not, the newest may be lost. Never a wrong byte, and one full collection leaves exactly what lives.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from blockstore import CacheMiss, Store, check, probe
from store.power_cut import Change, Luck, Medium, Tape
from store_kit import all_facts, assert_clean, assert_exact, repeatable
from token_caches import identity, plain, small_store

Held = tuple[tuple[int, ...], str]  # tokens and namespace

FIRST, SECOND, THIRD = (tuple(range(12)), ""), ((*range(10), 90, 91, 92), ""), (tuple(range(12)), "other")
# What is seldom worth a cut of its own comes in turn.
HOW = [["lost", "names"], ["lost", "any"]]


class Mark(NamedTuple):
    """From this change on: entries that must be there, and those that must not come back."""

    at: int
    promised: frozenset[Held]
    gone: frozenset[Held]


class Life:
    """A store on tape."""

    def __init__(self, root: Path, durability: str) -> None:
        self.tape = Tape(root)
        self.store = small_store(root, durability=durability, fs=self.tape)
        self.store.entries()  # opens the index
        self.durable = durability == "full"
        self.medium = Medium(root)
        self.tape.changes.clear()
        self.marks = [Mark(0, frozenset(), frozenset())]

    def save(self, held: Held) -> None:
        self._mark(gone=self.marks[-1].gone - {held})
        self.store.save(held[0], plain(held[0]), identity(held[1]))
        self._mark(promised=self.marks[-1].promised | {held})

    def remove(self, held: Held) -> None:
        self._mark(promised=self.marks[-1].promised - {held})
        self.store.remove(next(e.entry_id for e in self.store.entries() if (tokens_of(self.store, e.entry_id)) == held))
        self._mark(gone=self.marks[-1].gone | {held})

    def _mark(self, **changes: frozenset[Held]) -> None:
        self.marks.append(self.marks[-1]._replace(at=len(self.tape.changes), **changes))

    def is_news(self, count: int, change: Change | None) -> bool:
        """Whether the change made anything durable, or something was promised since."""
        return change is None or change.what in ("sync_names", "commit") or count in {mark.at for mark in self.marks}

    def mark_at(self, count: int) -> Mark:
        return [mark for mark in self.marks if mark.at <= count][-1]


def tokens_of(store: Store, entry_id: str) -> Held:
    return tuple(store.load(entry_id).tokens), store.entry(entry_id).ns or ""


def recorded(root: Path, durability: str, script: Callable[[Life], None]) -> Life:
    life = Life(root, durability)
    with life.tape.recording(), life.store:
        script(life)
    return life


@pytest.fixture(autouse=True)
def without_a_second_process() -> Iterator[None]:
    """After a cut the index is walked by one, which takes most of a second."""
    with repeatable(), mock.patch.object(probe, "survey", return_value={}):
        yield


def live_through_everything(life: Life) -> None:
    life.save(FIRST)
    life.save(SECOND)
    life.save(FIRST)  # replaces the first one
    life.remove(SECOND)
    life.store.gc()
    life.save(THIRD)
    life.remove(FIRST)
    life.store.gc(full=True)


# ---- the cuts


def each_cut(life: Life, root: Path, how: list[list[str]], see: Callable[[Path, Mark], None]) -> None:
    """Cut the power after each change, in each of the ways, and see what is left."""
    for count, change in enumerate([None, *life.tape.changes]):
        if change is not None:
            life.medium.apply(change)
        for number, way in enumerate(how[count % len(how)]):
            if way == "lost" and not life.is_news(count, change):
                continue
            life.medium.leave(root, Luck(way, 1000 * count + number), durable=life.durable)
            try:
                see(root, life.mark_at(count))
            except BaseException as error:
                error.add_note(f"cut after change {count}, {change}, {way} {number}")
                raise


@functools.cache
def facts_of(tokens: tuple[int, ...]) -> list[object]:
    return all_facts(plain(tokens))


def whole_entries(store: Store) -> set[Held]:
    """Those that load, bit for bit."""
    found = set()
    for entry in store.entries():
        with contextlib.suppress(CacheMiss):
            loaded = store.load(entry.entry_id)
            assert all_facts(loaded.caches) == facts_of(tuple(loaded.tokens))
            found.add((tuple(loaded.tokens), entry.ns or ""))
    return found


def nothing_is_lost(root: Path, mark: Mark) -> None:
    with small_store(root) as store:
        listed = len(store.entries())
        found = whole_entries(store)
        assert len(found) == listed, "an entry that the index has does not load"
        assert found >= mark.promised
        store.gc()
        assert whole_entries(store) == found
        store.gc(full=True)
        assert whole_entries(store) >= mark.promised
        assert not whole_entries(store) & mark.gone, "an entry that was removed has come back"
        goes_on(store)


def nothing_is_wrong(root: Path, mark: Mark) -> None:
    """Without durability: what loads is right; what does not is dropped by that, or by a repair."""
    with small_store(root) as store:
        whole_entries(store)
        store.gc(full=True)
        found = whole_entries(store)
        layout = store._layout
    check.repair(layout, deep=True, progress=lambda done, total: None)
    with small_store(root) as store:
        assert whole_entries(store) >= found
        store.gc()
        goes_on(store)


def goes_on(store: Store) -> None:
    assert_exact(store)
    assert_clean(store)
    for tokens, ns in (FIRST, SECOND, THIRD):
        store.save(tokens, plain(tokens), identity(ns))
    assert whole_entries(store) == {FIRST, SECOND, THIRD}
    assert_exact(store)


SEEN = [("full", nothing_is_lost), ("none", nothing_is_wrong)]


@pytest.mark.slow
@pytest.mark.parametrize(("durability", "see"), SEEN)
def test_a_power_cut_after_any_change(durability: str, see: Callable[[Path, Mark], None], tmp_path: Path) -> None:
    life = recorded(tmp_path / "store", durability, live_through_everything)
    each_cut(life, tmp_path / "left", HOW, see)


@pytest.mark.soak
@pytest.mark.parametrize(("durability", "see"), SEEN)
def test_power_cuts_in_many_more_ways(durability: str, see: Callable[[Path, Mark], None], tmp_path: Path) -> None:
    life = recorded(tmp_path / "store", durability, live_through_everything)
    each_cut(life, tmp_path / "left", [["lost", "names"] + ["any"] * 40], see)


def test_a_scope_whose_name_a_failed_save_left_unsynced_is_durable_with_the_next_save(tmp_path: Path) -> None:
    def fail_and_save(life: Life) -> None:
        life.tape.fail = ("sync_dir", "entries")
        with pytest.raises(OSError, match="did not answer"):
            life.save(FIRST)
        life.save(FIRST)
        assert life.tape.fail is None

    each_cut(recorded(tmp_path / "store", "full", fail_and_save), tmp_path / "left", [["lost"]], nothing_is_lost)
