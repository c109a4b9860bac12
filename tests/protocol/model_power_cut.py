"""A model of what a power cut may leave of a store, and of the order of syncs that nothing committed is lost by.

The medium, as pessimistic as file systems may be: bytes of a file are durable once it was synced, and may be anything
otherwise; a name is durable once its directory was synced; until then it may show what it named before, or any later
file that was renamed to it. The index is LMDB: commits are durable, one after the other.

Where the steps are in blockstore/: saving._Saver._place (sync the temporaries, rename, sync the directory),
saving._Saver._write_header (the same for the header), index.Index.publish (the commit), layout.StoreConfig.durability
(one for the whole store). `run(seed, rules)` lets some savers write, cuts the power at a random step, and looks for a
committed entry that might have lost a file; each field of `Rules` is a rule that can be broken.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

BLOCKS = "abcd"
SAVERS = 4
LONGEST = 140  # steps; the four together take about as many
Steps = Iterator[None]


@dataclass(frozen=True)
class Rules:
    """The rules of a durable save; True is as designed."""

    files_are_synced_before_they_are_renamed: bool = True
    directories_are_synced: bool = True
    headers_are_synced: bool = True
    the_index_comes_last: bool = True
    one_durability_for_all: bool = True

    def without(self, name: str) -> "Rules":
        return replace(self, **{name: False})


class Medium:
    """Names, the files (by number) that they show, and what of that has reached the disk."""

    def __init__(self) -> None:
        self.shown: dict[str, int] = {}
        self.durable: dict[str, int] = {}
        self.pending: dict[str, list[int]] = {}
        self.synced: set[int] = set()
        self._numbers = itertools.count()

    def write(self) -> int:
        return next(self._numbers)

    def sync(self, file: int) -> None:
        self.synced.add(file)

    def rename(self, file: int, name: str) -> None:
        self.shown[name] = file
        self.pending.setdefault(name, []).append(file)

    def sync_names(self, folder: str) -> None:
        for name, file in self.shown.items():
            if name.startswith(folder):
                self.durable[name] = file
                self.pending.pop(name, None)

    def fault(self, name: str) -> str | None:
        """What may be wrong with a name after the cut."""
        for file in (self.durable.get(name), *self.pending.get(name, ())):
            if file is None:
                return f"{name} may not be there"
            if file not in self.synced:
                return f"{name} may show a file whose bytes never arrived"
        return None


class Store:
    def __init__(self, rng: random.Random, rules: Rules) -> None:
        self.rng, self.rules, self.medium = rng, rules, Medium()
        self.present: set[str] = set()
        self.promised: dict[str, tuple[str, ...]] = {}  # durable entries: the names that each needs


def saver(store: Store, number: int, durable: bool) -> Steps:
    rules, medium = store.rules, store.medium
    blocks = [f"blocks/{name}" for name in sorted(store.rng.sample(BLOCKS, store.rng.randint(1, 3)))]
    mine = [name for name in blocks if name not in store.present]
    header = f"entries/{number}"
    yield
    yield from placed(store, mine, durable)
    if durable and rules.directories_are_synced:
        medium.sync_names("blocks/")
        yield
    if not rules.the_index_comes_last:
        publish(store, blocks, header, durable)
        yield
    yield from placed(store, [header], durable and rules.headers_are_synced)
    if durable and rules.directories_are_synced:
        medium.sync_names("entries/")
        yield
    if rules.the_index_comes_last:
        publish(store, blocks, header, durable)


def placed(store: Store, names: list[str], durable: bool) -> Steps:
    """New files under their names."""
    medium, files = store.medium, {}
    first = store.rules.files_are_synced_before_they_are_renamed
    for name in names:
        files[name] = medium.write()
        yield
        if durable and first:
            medium.sync(files[name])
            yield
    for name in names:
        medium.rename(files[name], name)
        yield
    if durable and not first:
        for name in names:
            medium.sync(medium.shown[name])  # by its name: by now it may be another's file
            yield


def publish(store: Store, blocks: list[str], header: str, durable: bool) -> None:
    store.present.update(blocks)
    if durable:
        store.promised[header] = (header, *blocks)


def run(seed: int, rules: Rules) -> str | None:
    """One life of a store, up to a power cut. None, or which promise may be broken afterwards."""
    rng = random.Random(seed)
    store = Store(rng, rules)
    durable = [rules.one_durability_for_all or rng.random() < 0.5 for _ in range(SAVERS)]
    savers = [saver(store, number, full) for number, full in enumerate(durable)]
    for _ in range(rng.randint(1, LONGEST)):
        if not savers:
            break
        chosen = rng.choice(savers)
        if next(chosen, chosen) is chosen:
            savers.remove(chosen)
    faults = (store.medium.fault(name) for names in store.promised.values() for name in names)
    return next((fault for fault in faults if fault), None)
