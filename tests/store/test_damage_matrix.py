"""The damage matrix: each kind of damage to each kind of file, but for the index (test_damaged_index).

Every cell says which error a load raises, what still loads, whether saving again heals, what a check says with and
without --deep, and that a repair leaves a clean store in which everything undamaged loads. No cell hands out a wrong
byte: whatever loads is compared bit for bit.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockstore import CorruptEntry, EntryGone, Store
from fs_doubles import Call, Crash, Killed, Watching
from store.damage_kit import APART, DAMAGES, SEEN_BY_SIZE, SHARING, TOKENS, VICTIM, World, loads, world
from store_kit import assert_clean, assert_exact, is_bad, lease_folders, report_of
from token_caches import IDENTITY, plain, small_store

LATE = tuple(range(70, 82))  # what is being saved while its temporaries are damaged

each_damage = pytest.mark.parametrize("how", DAMAGES)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "store") as built:
        yield built


def findings(store: Store, *, deep: bool) -> set[tuple[str, str, str]]:
    return {(problem.severity, problem.what, problem.name) for problem in report_of(store, deep=deep).problems}


def assert_sound(made: World, tokens: list[tuple[int, ...]]) -> None:
    """Clean, with exactly these entries, and every one of them loads."""
    assert_clean(made.store)
    assert made.restored() == sorted(tokens)
    made.store.gc()
    assert_exact(made.store)


# ---- blocks


BLOCK_PLACES = ["shared", "own"]
each_place = pytest.mark.parametrize("place", BLOCK_PLACES)


def damage_block(made: World, place: str, how: str) -> set[str]:
    """Damage a block of the victim that is also `sharing`'s, or its own; the names of the blocks that are bad now."""
    first, second, third = made.blocks("victim")
    path, other = (first, second) if place == "shared" else (third, made.blocks("sharing")[2])
    DAMAGES[how](path, other)
    bad = {path.name, other.name} if how == "swapped" else {path.name}
    assert all(is_bad(made.store, name) for name in bad)
    return bad


def spared(place: str, how: str) -> set[str]:
    """Which entries do not need a damaged block. A swapped block spoils the other one's entry, too."""
    return {"apart"} if place == "shared" or how == "swapped" else {"apart", "sharing"}


@each_place
@each_damage
def test_a_bad_block_is_a_miss_that_names_it_and_spoils_only_who_needs_it(made: World, place: str, how: str) -> None:
    bad = damage_block(made, place, how)
    with pytest.raises(CorruptEntry) as caught:
        made.store.load(made.ids["victim"])
    assert caught.value.digest in bad
    with pytest.raises(EntryGone):
        made.store.load(made.ids["victim"])
    assert made.loading() == spared(place, how)
    assert {entry.entry_id for entry in made.store.entries()} == {made.ids[name] for name in spared(place, how)}


@each_place
@each_damage
def test_check_finds_a_bad_block_by_its_size_or_in_depth_by_its_bytes(made: World, place: str, how: str) -> None:
    expected = {("damage", "block", name) for name in damage_block(made, place, how)}
    assert findings(made.store, deep=False) == (expected if how in SEEN_BY_SIZE else set())
    assert findings(made.store, deep=True) == expected


@each_place
@each_damage
def test_saving_after_a_miss_heals_everybody_who_shares_the_block(made: World, place: str, how: str) -> None:
    damage_block(made, place, how)
    for _ in range(2):  # where two blocks are bad each miss names one
        if not loads(made.store, made.ids["victim"], VICTIM):
            made.save("victim")
    if how == "swapped" and place == "own":  # the other block is not the victim's: its own miss heals it
        assert not loads(made.store, made.ids["sharing"], SHARING)
        made.save("sharing")
    assert made.loading() == set(TOKENS)
    assert_sound(made, list(TOKENS.values()))


@each_place
@each_damage
def test_saving_before_any_miss_heals_what_the_size_shows(made: World, place: str, how: str) -> None:
    """A hit is believed by its size alone: other bytes are met by the next load, which lets the save after it heal."""
    bad = damage_block(made, place, how)
    made.save("victim")
    healed = how in SEEN_BY_SIZE
    assert {is_bad(made.store, name) for name in bad} == {not healed}
    assert loads(made.store, made.ids["victim"], VICTIM) == healed


@each_place
@each_damage
def test_repair_drops_who_needs_a_bad_block_and_keeps_the_others(made: World, place: str, how: str) -> None:
    bad = damage_block(made, place, how)
    report = made.repair()
    moved = {problem.name for problem in report.problems if problem.what == "block"}
    assert moved == (set() if how == "deleted" else bad)
    dropped = {problem.name for problem in report.problems if problem.what == "entry"}
    assert dropped == {made.ids[name] for name in set(TOKENS) - spared(place, how)}
    assert_sound(made, [TOKENS[name] for name in spared(place, how)])
    for name in TOKENS:
        made.save(name)
    assert_sound(made, list(TOKENS.values()))


# ---- headers

# What follows a header's JSON means nothing: such a header is whole, only longer than the index says.
HARMLESS_TO_A_HEADER = "long by one"


def damage_header(made: World, how: str) -> set[str]:
    """Damage the victim's header; the entries that cannot load now."""
    DAMAGES[how](made.header("victim"), made.header("sharing"))
    return {"deleted": {"victim"}, HARMLESS_TO_A_HEADER: set(), "swapped": {"victim", "sharing"}}.get(how, {"victim"})


@each_damage
def test_a_bad_header_is_a_miss_of_its_entry_alone(made: World, how: str) -> None:
    spoiled = damage_header(made, how)
    if "victim" in spoiled:
        with pytest.raises(CorruptEntry):
            made.store.load(made.ids["victim"])
        with pytest.raises(EntryGone):
            made.store.load(made.ids["victim"])
    assert made.loading() == set(TOKENS) - spoiled


@each_damage
def test_check_finds_a_bad_header_without_depth(made: World, how: str) -> None:
    victim, sharing = made.ids["victim"], made.ids["sharing"]
    damage_header(made, how)
    expected = {("damage", "header", victim)}
    if how == "deleted":
        expected.add(("leftover", "entry", victim))  # what a full collection takes
    if how == HARMLESS_TO_A_HEADER:
        expected = {("drift", "entry", victim)}
    if how == "swapped":
        expected = {("drift", "entry", victim), ("drift", "entry", sharing)}
    assert findings(made.store, deep=False) == findings(made.store, deep=True) == expected


@each_damage
def test_saving_again_heals_a_bad_header(made: World, how: str) -> None:
    spoiled = damage_header(made, how)
    made.save("victim")
    assert made.loading() == set(TOKENS) - (spoiled - {"victim"})
    for name in spoiled:
        made.save(name)
    assert made.loading() == set(TOKENS)
    assert_sound(made, list(TOKENS.values()))


@each_damage
def test_repair_sets_a_bad_header_aside_and_believes_a_whole_one(made: World, how: str) -> None:
    """Swapped headers are whole, and the headers are the truth: each is found again under the other's name."""
    damage_header(made, how)
    report = made.repair()
    whole = how in (HARMLESS_TO_A_HEADER, "swapped")
    lost = set() if whole or how == "deleted" else {("header", made.ids["victim"])}
    assert {(problem.what, problem.name) for problem in report.problems} == lost
    assert_sound(made, list(TOKENS.values()) if whole else [SHARING, APART])


# ---- a live lease's temporaries: the save goes on with them


class Meddling(Watching):
    """Damages a temporary right before it is renamed into its place: once."""

    def meddle(self, how: str, matches: Callable[[Call], bool], header: Path) -> None:
        """`header` is another one, for a header to be swapped with; blocks have others beside them."""

        def act(call: Call) -> None:
            if matches(call) and not self.done:
                self.done = True
                path = Path(call.path)
                beside = sorted(other for other in path.parent.iterdir() if other.name not in ("lock", path.name))
                DAMAGES[how](path, beside[0] if call.places_block else header)

        self.before = act

    done = False


@pytest.fixture
def meddled(made: World) -> tuple[World, Meddling]:
    """The same store, opened once more through the double."""
    made.store.close()
    fs = Meddling()
    made.store = small_store(made.store.root, fs=fs)
    return made, fs


def save_late(made: World) -> str | None:
    """The id of the entry that was committed, or None where saving failed as it may."""
    try:
        return made.store.save(LATE, plain(LATE), IDENTITY).entry_id
    except FileNotFoundError:
        return None


@each_damage
@pytest.mark.parametrize("what", ["block", "header"])
def test_a_live_leases_damaged_temporary_is_an_error_or_a_later_miss(
    meddled: tuple[World, Meddling], what: str, how: str
) -> None:
    made, fs = meddled
    fs.meddle(how, lambda call: call.places_block if what == "block" else call.places_header, made.header("sharing"))
    entry_id = save_late(made)
    assert fs.done
    assert (entry_id is None) == (how == "deleted")
    harmless = what == "header" and how == HARMLESS_TO_A_HEADER
    severities = {problem.severity for problem in report_of(made.store).problems}
    if entry_id is not None:
        # Whole headers in each other's places are no damage: the index is wrong about them.
        assert severities == (
            {"drift"} if what == "header" and how in (HARMLESS_TO_A_HEADER, "swapped") else {"damage"}
        )
        assert loads(made.store, entry_id, LATE) == harmless
    else:
        assert severities == set()
    spoiled = {"sharing"} if what == "header" and how == "swapped" else set()
    assert made.loading() == set(TOKENS) - spoiled
    assert_late_heals(made, entry_id, spoiled)


def assert_late_heals(made: World, entry_id: str | None, spoiled: set[str]) -> None:
    """Saving again heals, after as many misses as there are bad blocks; nothing is left of the lease."""
    assert lease_folders(made.store) == []
    for name in spoiled:
        made.save(name)
    for _ in range(2):
        if entry_id is None or not loads(made.store, entry_id, LATE):
            entry_id = made.store.save(LATE, plain(LATE), IDENTITY).entry_id
    assert made.repair().problems == ()
    assert_sound(made, [*TOKENS.values(), LATE])


# ---- a dead lease's temporaries: nobody will ever read them


class Dying(Crash):
    """Dies when the first block, or the header, is about to get its place."""

    what = ""

    def about_to(self, name: str, args: Any) -> None:
        call = self.described(name, args)
        if self.what and (call.places_block if self.what == "block" else call.places_header):
            self.arm(0)


@pytest.fixture(params=["block", "header"])
def with_dead_lease(made: World, request: pytest.FixtureRequest) -> tuple[World, Path]:
    """A store whose last saver died; the temporary that it left unplaced."""
    made.store.close()
    fs = Dying()
    doomed = small_store(made.store.root, fs=fs)
    fs.what = request.param
    with pytest.raises(Killed):
        doomed.save(LATE, plain(LATE), IDENTITY)
    fs.bury(doomed)
    made.store = small_store(made.store.root)
    [folder] = Path(made.store.root, "leases").iterdir()
    return made, min(path for path in folder.iterdir() if path.name != "lock")


@each_damage
@pytest.mark.parametrize("by", ["gc", "full gc", "repair"])
def test_a_dead_leases_damaged_temporary_is_only_a_leftover(
    with_dead_lease: tuple[World, Path], how: str, by: str
) -> None:
    made, temporary = with_dead_lease
    DAMAGES[how](temporary, temporary.with_name("lock"))
    assert {problem.severity for problem in report_of(made.store).problems} == {"leftover"}
    assert made.loading() == set(TOKENS)
    if by == "repair":
        assert made.repair().problems == ()
    else:
        made.store.gc(full=by == "full gc")
    assert lease_folders(made.store) == []
    assert_sound(made, list(TOKENS.values()))
    saved = made.store.save(LATE, plain(LATE), IDENTITY)
    assert loads(made.store, saved.entry_id, LATE)
    assert_sound(made, [*TOKENS.values(), LATE])
