"""A model of the protocol by which processes share a store: who does what, in which atomic steps.

Processes are generators; each `yield` stands between two atomic steps: one transaction on the index, one call on the
file system, or one look. `run(seed, rules)` interleaves savers, a remover, loaders, collectors, a full collector and
damage from outside at random, kills some of them, and looks at the whole world after every step. What it finds wrong
comes back as a text; None is a run without a fault.

Each field of `Rules` is one rule of the protocol. With one of them broken the model must find a fault: that is why the
rule is there. Where the steps are in blockstore/:

    take, release       leases.Leases.take, Lease.release      a lock that death frees
    reserve             index.Index.reserve                    the lease's row and its references
    place               saving._Saver._place                   a block gets its name
    write_header        saving._Saver._write_header
    publish             index.Index.publish                    the lease becomes an entry
    doom                ledger.Ledger.doom                     an entry leaves the index
    finish              rooms.Rooms.finish_doomed              its header goes, then the doomed row
    condemn             loading._condemn, index.Index.condemn
    reap                collect._reap_leases, index.Index.reap
    collect             index.Index.collect
    judge, sweep        full_mark.judge, full_mark.mark
"""

import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

ABSENT, WRITING, PRESENT = "absent", "writing", "present"
GOOD, BAD = "good", "bad"
BLOCKS = "abcdef"
STRAY, STRAY_BLOCKS = "stray", ("x", "y")  # an entry that only its header knows, as after the loss of an index
Steps = Generator[None, None, None]


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol; True is as designed."""

    ids_are_never_reused: bool = True
    blocks_are_reserved_before_they_are_placed: bool = True
    hits_are_looked_at: bool = True
    hits_are_judged_again_when_published: bool = True
    headers_stand_before_the_index_names_them: bool = True
    equal_entries_give_way: bool = True
    the_index_goes_before_the_header: bool = True
    doomed_entries_are_remembered: bool = True
    condemning_judges_again: bool = True
    condemned_blocks_are_not_believed: bool = True
    only_free_leases_are_reaped: bool = True
    reaping_unlinks_the_header: bool = True
    row_and_file_go_in_one_step: bool = True
    full_leaves_leased_headers_alone: bool = True
    full_judges_what_is_true_now: bool = True
    orphans_go_in_the_step_that_sees_no_row: bool = True
    unreadable_headers_stop_the_sweep: bool = True

    def without(self, name: str) -> "Rules":
        return replace(self, **{name: False})


@dataclass
class Row:
    refs: int
    state: str


@dataclass(frozen=True)
class Entry:
    """What a header says: which tokens, in which blocks."""

    tokens: int
    blocks: tuple[str, ...]


@dataclass
class Process:
    """One actor: its steps, and the locks that its death frees."""

    mortal: bool = True
    locks: set[str] = field(default_factory=set)
    steps: Steps = field(init=False)


class Fault(Exception):
    """The world is wrong."""


class World:
    """The directory, the index, and what an onlooker knows who sees everything."""

    def __init__(self, rng: random.Random, rules: Rules) -> None:
        self.rng, self.rules = rng, rules
        self.files: dict[str, str] = {}
        self.headers: dict[str, Entry] = {}
        self.unreadable: set[str] = set()
        self.rows: dict[str, Row] = {}
        self.entries: dict[str, Entry] = {}
        self.doomed: set[str] = set()
        self.leases: dict[str, Entry] = {}
        self.headers_of: dict[str, str] = {}  # by lease: the header that it will publish
        self.held: set[str] = set()
        self.step = self.last_id = 0
        # the onlooker's
        self.promised: dict[str, Entry] = {}
        self.damaged: dict[str, int] = {}  # block -> when; until it is written again
        self.known_bad: set[str] = set()
        self.headerless: set[str] = set()

    # ---- savers

    def new_id(self) -> str:
        self.last_id += 1
        return f"id{self.last_id}"

    def reserve(self, lease: str, header: str, entry: Entry) -> set[str]:
        """One transaction: the lease's row, and one reference a block. Returns the hits."""
        hits = set()
        for name in entry.blocks:
            row = self.rows.setdefault(name, Row(0, WRITING))
            if row.state == PRESENT and row.refs:
                hits.add(name)
            else:
                row.state = WRITING
            row.refs += 1
        self.leases[lease], self.headers_of[lease] = entry, header
        return hits

    def has(self, name: str) -> bool:
        """What a look at the size says: a flipped bit does not show."""
        return name in self.files

    def place(self, name: str) -> None:
        self.files[name] = GOOD
        self.damaged.pop(name, None)
        self.known_bad.discard(name)

    def write_header(self, header: str, entry: Entry) -> None:
        self.headers[header] = entry

    def publish(self, lease: str, entry_id: str, hits: set[str], since: int) -> tuple[list[str], list[str]]:
        """One transaction: the entry stands, or hits that were lost must be placed first. (lost, superseded)"""
        if lease not in self.leases:
            raise Fault(f"the lease of a living saver is gone: {lease}")
        entry = self.leases[lease]
        if self.rules.hits_are_judged_again_when_published:
            lost = [name for name in entry.blocks if name in hits and self.rows[name].state != PRESENT]
            if lost:
                for name in lost:
                    self.rows[name].state = WRITING
                return lost, []
        for name in entry.blocks:
            self.judge_published(name, name in hits, since)
            self.rows[name].state = PRESENT
        equal = [key for key, other in self.entries.items() if other.tokens == entry.tokens]
        superseded = equal if self.rules.equal_entries_give_way else []
        for key in superseded:
            self.doom(key)
        self.entries[entry_id] = self.promised[entry_id] = entry
        del self.leases[lease]
        return [], superseded

    def judge_published(self, name: str, hit: bool, since: int) -> None:
        """The onlooker: a save must not build on what was already known to be bad, or could be seen to be gone.

        For a block that it placed itself it answers, whatever was done to that since.
        """
        if not hit:
            self.known_bad.discard(name)
        elif self.files.get(name) != GOOD:
            if name in self.known_bad:
                raise Fault(f"published over a block that is known to be bad: {name}")
            if name not in self.files and self.damaged.get(name, since) < since:
                raise Fault(f"published over a block that had long been gone: {name}")

    # ---- removing

    def unrefer(self, entry: Entry) -> None:
        for name in entry.blocks:
            self.rows[name].refs -= 1

    def doom(self, entry_id: str) -> None:
        """Part of a transaction: the entry leaves the index."""
        self.unrefer(self.entries.pop(entry_id))
        self.promised.pop(entry_id, None)
        if self.rules.doomed_entries_are_remembered:
            self.doomed.add(entry_id)

    def condemn(self, entry_id: str, seen: Entry, bad: str) -> bool:
        """One transaction: judge again, then doom, and believe the bad block no longer. `bad` may be "header"."""
        if self.entries.get(entry_id) != seen and self.rules.condemning_judges_again:
            return False
        still_bad = entry_id not in self.headers if bad == "header" else self.files.get(bad) != GOOD
        if not still_bad and self.rules.condemning_judges_again:
            return False
        if still_bad and bad in self.rows:
            self.known_bad.add(bad)
            if self.rules.condemned_blocks_are_not_believed and self.rows[bad].state == PRESENT:
                self.rows[bad].state = ABSENT
        if entry_id in self.entries:
            if not still_bad and self.is_whole(self.entries[entry_id]):
                raise Fault(f"a load that failed drops an entry that is whole again: {entry_id}")
            self.doom(entry_id)
        return True

    def is_whole(self, entry: Entry) -> bool:
        return all(self.files.get(name) == GOOD for name in entry.blocks)

    # ---- collecting

    def reap(self, lease: str) -> None:
        """One transaction: undo what a lease holds."""
        if lease in self.leases:
            if self.rules.reaping_unlinks_the_header:
                self.headers.pop(self.headers_of[lease], None)
            self.unrefer(self.leases.pop(lease))

    def dead(self) -> list[str]:
        return [name for name, row in sorted(self.rows.items()) if row.refs == 0]

    def judge(self, header: str, indexed: bool, standing: Entry | None) -> None:
        """One transaction of the full collection: bring one header and its entry together."""
        if indexed:
            if standing is None and header in self.entries:
                self.doom(header)
            return
        leased = (
            {self.headers_of[lease] for lease in self.leases} if self.rules.full_leaves_leased_headers_alone else ()
        )
        if standing is None or header in self.doomed or header in leased or header in self.unreadable:
            return
        equal = any(other.tokens == standing.tokens for other in self.entries.values())
        if equal or not self.is_whole(standing):
            self.doomed.add(header)
            return
        for name in standing.blocks:
            row = self.rows.setdefault(name, Row(0, PRESENT))
            row.refs, row.state = row.refs + 1, PRESENT
        self.entries[header] = self.promised[header] = standing

    # ---- the onlooker

    def check(self) -> None:
        """After every step."""
        for entry_id, entry in self.promised.items():
            if self.entries.get(entry_id) != entry:
                raise Fault(f"an entry that nobody removed has vanished: {entry_id}")
        for entry_id, entry in self.entries.items():
            for name in entry.blocks:
                if self.files.get(name) != GOOD and name not in self.damaged:
                    raise Fault(f"lost: block {name} of {entry_id}")
        if len({entry.tokens for entry in self.entries.values()}) < len(self.entries):
            raise Fault("two entries of equal tokens")
        if {name: row.refs for name, row in self.rows.items() if row.refs} != self.counted():
            raise Fault("references are not what entries and leases say")
        for header, entry in self.headers.items():
            if (
                header == STRAY
                and header not in self.entries
                and header not in self.doomed
                and not self.is_whole(entry)
            ):
                raise Fault("lost: a block of an entry that only its header knows")

    def counted(self) -> dict[str, int]:
        counted: Counter[str] = Counter()
        for entry in (*self.entries.values(), *self.leases.values()):
            counted.update(entry.blocks)
        return dict(counted)

    def check_collected(self) -> None:
        """When everybody is gone and one collector has finished. What no row ever named is not its business."""
        self.check()
        if set(self.headers) - set(self.entries) - {STRAY}:
            raise Fault("a header without an entry is left")
        if set(self.entries) - set(self.headers) - self.headerless:
            raise Fault("an entry without its header is left")
        if any(self.headers.get(key, entry) != entry for key, entry in self.entries.items()):
            raise Fault("a header and the index name different blocks")
        if self.leases or self.doomed or set(self.rows) != set(self.counted()):
            raise Fault("rows are left that nobody needs")

    def check_fully_collected(self) -> None:
        """After a full collection, too: headers, entries, rows and files agree."""
        self.check()
        if set(self.headers) != set(self.entries) or set(self.rows) != set(self.counted()):
            raise Fault("headers, entries and rows disagree")
        if set(self.files) - set(self.rows):
            raise Fault("files are left that nobody needs")


# ---- the processes


def saver(world: World, me: Process) -> Steps:
    rng, rules = world.rng, world.rules
    tokens = rng.randrange(3)
    usual = random.Random(tokens).sample(BLOCKS, 3)
    if rng.random() < 0.3 or not rules.ids_are_never_reused:
        usual[0] = rng.choice([name for name in BLOCKS if name not in usual[1:]])
    entry, lease = Entry(tokens, tuple(sorted(usual))), world.new_id()
    entry_id = lease if rules.ids_are_never_reused else f"tokens{tokens}"
    me.locks.add(lease)
    world.held.add(lease)
    yield
    early = set()
    if not rules.blocks_are_reserved_before_they_are_placed:
        for name in entry.blocks:
            if world.rows.get(name, Row(0, ABSENT)).state != PRESENT:
                world.place(name)
                early.add(name)
            yield
    hits, since = world.reserve(lease, entry_id, entry), world.step
    yield
    for name in entry.blocks:
        if name in hits and rules.hits_are_looked_at and not world.has(name):
            hits.discard(name)
        yield
        if name not in hits and name not in early:
            world.place(name)
            yield
    if rng.random() < 0.15:
        world.reap(lease)
        return
    if rules.headers_stand_before_the_index_names_them:
        world.write_header(entry_id, entry)
        yield
        yield  # the directory is synced
    superseded = yield from published(world, lease, entry_id, hits, since)
    if not rules.headers_stand_before_the_index_names_them:
        yield
        world.write_header(entry_id, entry)
    for key in superseded:
        yield from finish(world, key)


def published(world: World, lease: str, entry_id: str, hits: set[str], since: int) -> Generator[None, None, list[str]]:
    while True:
        lost, superseded = world.publish(lease, entry_id, hits, since)
        yield
        if not lost:
            return superseded
        hits.difference_update(lost)
        for name in lost:
            world.place(name)
            yield


def finish(world: World, entry_id: str) -> Steps:
    """The second half of a removal."""
    yield
    world.headers.pop(entry_id, None)
    yield
    world.doomed.discard(entry_id)


def remover(world: World, me: Process) -> Steps:
    for _ in range(3):
        yield
        if not world.entries:
            continue
        entry_id = world.rng.choice(sorted(world.entries))
        if world.rules.the_index_goes_before_the_header:
            world.doom(entry_id)
            yield from finish(world, entry_id)
            continue
        world.headers.pop(entry_id, None)
        yield
        if entry_id in world.entries:
            world.doom(entry_id)
            world.doomed.discard(entry_id)


def loader(world: World, me: Process) -> Steps:
    for _ in range(4):
        yield
        if not world.entries:
            continue
        entry_id = world.rng.choice(sorted(world.entries))
        seen, bad = world.entries[entry_id], ""
        yield
        if entry_id not in world.headers:
            bad = "header"
        else:
            for name in seen.blocks:
                yield
                if world.files.get(name) != GOOD:
                    bad = name
                    break
        if bad:
            yield
            if world.condemn(entry_id, seen, bad):
                yield from finish(world, entry_id)


def vandal(world: World, me: Process) -> Steps:
    """Damage from outside: a bit flips, a block or a header is deleted."""
    for _ in range(3):
        yield
        if world.rng.random() < 0.2 and world.promised:
            entry_id = world.rng.choice(sorted(world.promised))
            world.headers.pop(entry_id, None)
            world.headerless.add(entry_id)
            world.promised.pop(entry_id)
        elif world.files.keys() - set(STRAY_BLOCKS):
            name = world.rng.choice(sorted(world.files.keys() - set(STRAY_BLOCKS)))
            world.damaged[name] = world.step
            if world.rng.random() < 0.5:
                world.files[name] = BAD
            else:
                del world.files[name]


def collector(world: World, me: Process) -> Steps:
    for _ in range(3):
        for entry_id in sorted(world.doomed):
            yield from finish(world, entry_id)
        for lease in sorted(world.leases):
            if lease in world.held and world.rules.only_free_leases_are_reaped:
                continue
            me.locks.add(lease)
            world.held.add(lease)
            yield
            world.reap(lease)
            yield
            world.held.discard(lease)
            me.locks.discard(lease)
        yield from collected(world)
        yield


def collected(world: World) -> Steps:
    """Row and file in one transaction; a death in it leaves the rows, and files gone."""
    dead = world.dead()[:3]
    if not world.rules.row_and_file_go_in_one_step:
        yield
    for name in dead:
        world.files.pop(name, None)
        world.damaged.pop(name, None)
    if world.rng.random() < 0.15:
        return
    if not world.rules.row_and_file_go_in_one_step:
        yield
    for name in dead:
        world.rows.pop(name, None)


def full_collector(world: World, me: Process) -> Steps:
    standing, view = sorted({*world.headers, *world.entries}), (dict(world.headers), set(world.entries))
    unreadable = False
    for header in standing:
        yield
        headers, indexed = (world.headers, world.entries) if world.rules.full_judges_what_is_true_now else view
        unreadable = unreadable or (header in world.unreadable and header in world.headers)
        world.judge(header, header in indexed, headers.get(header))
    if unreadable and world.rules.unreadable_headers_stop_the_sweep:
        return
    for name in sorted(world.files):
        yield
        orphan = name not in world.rows
        if orphan and not world.rules.orphans_go_in_the_step_that_sees_no_row:
            yield
        if orphan:
            world.files.pop(name, None)
            world.damaged.pop(name, None)


def medium(world: World, me: Process) -> Steps:
    """A header that could not be read (a bad cable, say) can be read again."""
    for _ in range(world.rng.randrange(40)):
        yield
    world.unreadable.clear()


# ---- a run

MORTALITY = 0.03  # of each step
Cast = tuple[Callable[[World, Process], Steps], ...]
# One after the other by seed: everybody at once, and those whose meetings are rare among so many.
CASTS: tuple[Cast, ...] = (
    (*[saver] * 5, *[remover] * 2, *[loader] * 2, *[collector] * 2, *[full_collector] * 2, vandal, medium),
    (*[saver] * 4, *[loader] * 5, *[vandal] * 4, collector),
    (*[saver] * 5, *[remover] * 3, *[full_collector] * 4, collector),
)


def run(seed: int, rules: Rules) -> str | None:
    """One interleaving. None, or what went wrong."""
    world = World(random.Random(seed), rules)
    add_what_no_index_knows(world)
    processes = []
    for play in CASTS[seed % len(CASTS)]:
        process = Process(mortal=play not in (vandal, medium))
        process.steps = play(world, process)
        processes.append(process)
    try:
        while processes:
            world.step += 1
            process = world.rng.choice(processes)
            if not advance(world, process):
                processes.remove(process)
            world.check()
        at_rest(world)
    except Fault as fault:
        return str(fault)
    return None


def add_what_no_index_knows(world: World) -> None:
    """Files without rows, as a lost index leaves them, and a header, which may be unreadable for a while."""
    world.files.update({name: GOOD for name in BLOCKS if world.rng.random() < 0.15})
    if world.rng.random() < 0.3:
        world.headers[STRAY] = Entry(99, STRAY_BLOCKS)
        world.files.update(dict.fromkeys(STRAY_BLOCKS, GOOD))
        if world.rng.random() < 0.7:
            world.unreadable.add(STRAY)


def advance(world: World, process: Process) -> bool:
    """One step of a process, unless it dies. False where it is over; its locks are free then."""
    died = process.mortal and world.rng.random() < MORTALITY
    if not died:
        try:
            next(process.steps)
            return True
        except StopIteration:
            pass
    process.steps.close()
    world.held -= process.locks
    return False


def at_rest(world: World) -> None:
    """Everybody is gone. A collector does its work, as often as it takes; then a full one, too."""
    world.held.clear()
    undisturbed(world, collector)
    world.check_collected()
    world.unreadable.clear()
    undisturbed(world, full_collector)
    undisturbed(world, collector)
    world.check_fully_collected()


def undisturbed(world: World, play: Callable[[World, Process], Steps]) -> None:
    for _ in range(3):
        for _ in play(world, Process()):
            pass
