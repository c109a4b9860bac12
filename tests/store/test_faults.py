"""The disk fails, or the process dies, at every single change of a save, a removal, a load and a collection.

Afterwards one collection leaves exactly the committed entries, and trying again succeeds.
"""

import contextlib
import dataclasses
import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from blockstore import CorruptEntry, Store, StoreFull, saving, sources
from fs_doubles import Crash, FailingAt, Killed
from store_kit import all_facts, assert_clean, assert_exact, block_names, block_path
from token_caches import IDENTITY, plain, small_store

BASE = tuple(range(12))
LONGER = (*range(10), 90, 91, 92, 93, 94)
NEVER = 500  # no scenario makes as many changes


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The k-th change is the same one each time."""
    for module in (saving, sources):
        monkeypatch.setattr(module, "MARGINS", dataclasses.replace(module.MARGINS, threads=1))


# ---- what is done, each time to a store that holds BASE alone


def save(store: Store, tokens: tuple[int, ...]) -> None:
    store.save(tokens, plain(tokens), IDENTITY)


def doom_all(store: Store) -> None:
    """As a process that dies right after the first step of a removal leaves it."""
    for entry in store.entries():
        store._rooms.index.doom(entry.entry_id)


def lose_a_block(store: Store) -> None:
    block_path(store, min(block_names(store))).unlink()


def leave_as_is(store: Store) -> None:
    pass


def remove_all(store: Store) -> None:
    for entry in store.entries():
        store.remove(entry.entry_id)


@dataclass(frozen=True)
class Scenario:
    """`before` makes the situation, `act` is what is interrupted, `leaves` the token lists that may then be there."""

    name: str
    before: Callable[[Store], None]
    act: Callable[[Store], object]
    leaves: tuple[set[tuple[int, ...]], ...]
    saves: bool = False


SCENARIOS = [
    Scenario("save", leave_as_is, lambda store: save(store, LONGER), ({BASE}, {BASE, LONGER}), saves=True),
    Scenario("supersede", leave_as_is, lambda store: save(store, BASE), ({BASE},), saves=True),
    Scenario("heal", lose_a_block, lambda store: save(store, BASE), (set(), {BASE}), saves=True),
    Scenario("remove", leave_as_is, remove_all, ({BASE}, set())),
    Scenario("condemn", lose_a_block, lambda store: store.restore([*BASE, 1], IDENTITY), (set(),)),
    Scenario("collect", doom_all, lambda store: store.gc(), (set(),)),
    Scenario("collect fully", doom_all, lambda store: store.gc(full=True), (set(),)),
]
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


def set_up(store: Store, scenario: Scenario) -> list[str]:
    """BASE alone, then the situation; the ids of the entries there are."""
    remove_all(store)
    store.gc()
    assert_exact(store)
    save(store, BASE)
    scenario.before(store)
    return [entry.entry_id for entry in store.entries()]


def whole_entries(store: Store) -> set[tuple[int, ...]]:
    """The tokens of all entries that load, each bit for bit what its tokens say; others are dropped by it."""
    found = set()
    for entry in store.entries():
        with contextlib.suppress(CorruptEntry):
            loaded = store.load(entry.entry_id)
            assert all_facts(loaded.caches) == all_facts(plain(loaded.tokens))
            found.add(tuple(loaded.tokens))
    return found


def assert_recovers(store: Store, scenario: Scenario) -> None:
    """One collection is enough, whatever was left behind; then the same again succeeds."""
    if scenario.before is lose_a_block:
        whole_entries(store)
    store.gc()
    assert_exact(store)
    assert_clean(store)
    assert whole_entries(store) in scenario.leaves
    save(store, LONGER)
    assert LONGER in whole_entries(store)


# ---- the disk fails


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("error_number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@each_scenario
def test_an_error_at_any_change_leaves_nothing_behind(
    scenario: Scenario, error_number: int, lasting: bool, tmp_path: Path
) -> None:
    fs = FailingAt(error_number)
    with small_store(tmp_path / "store", fs=fs) as store:
        fail_at_every_change(store, fs, scenario, lasting)


@pytest.mark.parametrize("scenario", SCENARIOS[:1], ids=["save"])
def test_an_error_at_any_change_of_a_durable_save_leaves_nothing_behind(scenario: Scenario, tmp_path: Path) -> None:
    fs = FailingAt(errno.EIO)
    with small_store(tmp_path / "store", durability="full", fs=fs) as store:
        fail_at_every_change(store, fs, scenario, lasting=False)


def fail_at_every_change(store: Store, fs: FailingAt, scenario: Scenario, lasting: bool) -> None:
    for k in range(NEVER):
        ids = set_up(store, scenario)
        fs.arm(k, lasting=lasting)
        raised = attempt(scenario, store)
        fs.disarm()
        if not fs.failed:
            assert (raised, k > 0) == (None, True)
            return
        if raised is not None and scenario.saves:
            assert [entry.entry_id for entry in store.entries()] == ids, f"raised at {k}, and yet committed"
            assert isinstance(raised, StoreFull if fs.error_number == errno.ENOSPC else OSError)
        assert_recovers(store, scenario)
    raise AssertionError("it never got through")


def attempt(scenario: Scenario, store: Store) -> Exception | None:
    try:
        scenario.act(store)
    except (OSError, StoreFull) as error:
        return error
    return None


# ---- the process dies


DEATHS = [(scenario, "none") for scenario in SCENARIOS] + [(SCENARIOS[0], "full")]


@pytest.mark.parametrize(("scenario", "durability"), DEATHS, ids=lambda part: getattr(part, "name", part))
def test_a_death_at_any_change_leaves_nothing_that_one_collection_does_not_take(
    scenario: Scenario, durability: str, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    for k in range(NEVER):
        fs = Crash()
        with small_store(root, durability=durability) as store:
            set_up(store, scenario)
        store = small_store(root, durability=durability, fs=fs)
        store.entries()  # opens the index
        fs.arm(k)
        try:
            scenario.act(store)
        except Killed:
            fs.bury(store)
        else:
            fs.disarm()
            store.close()
            assert k > 0
            return
        with small_store(root, durability=durability) as store:
            assert_recovers(store, scenario)
    raise AssertionError("it never got through")


def test_a_saver_that_died_holds_nothing_back_and_its_lease_is_seen_until_collected(tmp_path: Path) -> None:
    fs = Crash()
    store = small_store(tmp_path / "store", fs=fs)
    prepared = store.prepare(LONGER, plain(LONGER), IDENTITY)
    fs.arm(6)
    with pytest.raises(Killed):
        store.commit(prepared)
    fs.bury(store)
    with small_store(tmp_path / "store") as store:
        [found] = [item for item in store.gc(dry_run=True).items if item.what == "lease"]
        assert found.why == "its owner is dead"
        assert store.gc().count("lease") == 1
        assert store.gc(dry_run=True).items == ()
        assert_exact(store)
