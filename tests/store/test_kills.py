"""4 writers, 2 readers, a remover and a collector over one store, killed at every named step and at random.

No wrong byte is ever served, nothing that was committed is lost, and what death leaves behind one collection takes
(CASES 1, 3, 4, 9, 10, 11, 12, 20).
"""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from store.kill_roles import KEPT, SHARED, STEPS, Nursery
from store.process_roles import Tally, is_right
from store_kit import assert_clean, assert_exact
from token_caches import small_store

CREW = ("write", "write", "write", "write", "read", "read", "remove", "collect")
NAMED = [(role, step) for role, steps in STEPS.items() for step in steps]
RANDOM_KILLS, SOAK_KILLS = 8, 200


class Siege:
    """The crew at work, and its deaths. Whoever died is replaced."""

    def __init__(self, nursery: Nursery, rng: random.Random) -> None:
        self.nursery, self.rng = nursery, rng
        self.crew = [nursery.start(role) for role in CREW]
        self.kills = self.deaths_at_steps = 0

    def kill_somebody(self) -> None:
        place = self.rng.randrange(len(self.crew))
        self.nursery.kill(self.crew[place])
        self._replace(place)

    def kill_at(self, role: str, step: str) -> bool:
        """Let one of the crew be replaced by one who dies at the step; False where that step never came."""
        place = CREW.index(role)
        self.nursery.kill(self.crew[place])
        self.crew[place] = doomed = self.nursery.start(role, step=step)
        self.kills += 1
        died = self.nursery.came_to(doomed, -9, seconds=30)
        if not died:
            self.nursery.kill(doomed)
        self.deaths_at_steps += died
        self._replace(place)
        return died

    def _replace(self, place: int) -> None:
        self.crew[place] = self.nursery.start(CREW[place])
        self.kills += 1


def assert_only_what_lives_is_left(root: Path, nursery: Nursery) -> None:
    """One plain collection, and the store holds the committed entries, whole, and nothing else."""
    saved, removed = nursery.said("saved"), nursery.said("removing")
    kept = {key for key in saved if key[0] == KEPT}
    assert len(kept) > len(CREW)
    with small_store(root) as store:
        store.gc()
        assert_exact(store)
        assert_clean(store)
        found = set()
        for entry in store.entries():
            loaded = store.load(entry.entry_id)
            assert is_right(loaded.caches, list(loaded.tokens))
            found.add((entry.ns, tuple(loaded.tokens)))
        assert kept <= found
        assert {key for key in saved if key[0] == SHARED} - removed <= found


def besiege(root: Path, act: Callable[[Siege], None]) -> dict[str, float]:
    """What was done while the crew was killed by `act`, and afterwards everything must hold."""
    began = time.monotonic()
    small_store(root).close()
    with Nursery(root) as nursery:
        siege = Siege(nursery, random.Random(11))
        act(siege)
        nursery.end(siege.crew)
        assert_only_what_lives_is_left(root, nursery)
        figures = Tally.total(nursery.folder)
    assert all(figures.values()), figures
    seconds = round(time.monotonic() - began, 1)
    return {**figures, "kills": siege.kills, "kills_at_named_steps": siege.deaths_at_steps, "seconds": seconds}


@pytest.mark.slow
def test_a_death_at_any_named_step_or_moment_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    def each_step_once(siege: Siege) -> None:
        for child in siege.crew[:4]:
            siege.nursery.await_word(child)
        for role, step in NAMED:
            assert siege.kill_at(role, step), f"{role} never came to {step!r}"
        for _ in range(RANDOM_KILLS):
            time.sleep(siege.rng.random() * 0.2)
            siege.kill_somebody()

    figures = besiege(tmp_path / "store", each_step_once)
    assert figures["kills_at_named_steps"] == len(NAMED)


@pytest.mark.soak
def test_two_hundred_deaths_lose_nothing_and_leave_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every other death is at a named step; in between the crew works for some seconds."""

    def again_and_again(siege: Siege) -> None:
        steps: Iterator[tuple[str, str]] = itertools.cycle(siege.rng.sample(NAMED, len(NAMED)))
        while siege.kills < SOAK_KILLS:
            time.sleep(siege.rng.random() * 6)
            if siege.rng.random() < 0.5:
                siege.kill_somebody()
            else:
                siege.kill_at(*next(steps))

    figures = besiege(tmp_path / "store", again_and_again)
    assert figures["kills"] >= SOAK_KILLS
    record_property("kills", figures)
    with capsys.disabled():
        print("\nkills soak:", json.dumps(figures))
