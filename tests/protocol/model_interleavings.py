"""A model of the protocol by which processes share a store: who does what, in which atomic steps.

Processes are generators; each `yield` stands between two atomic steps: one transaction on the index, one call on the
file system, or one look. `run(seed, rules)` interleaves savers, a remover, loaders, collectors, a full collector and
damage from outside at random, kills some of them, and looks at the whole world after every step. What it finds wrong
comes back as a text; None is a run without a fault.

Each field of `world.Rules` is one rule of the protocol. With one of them broken the model must find a fault: that is
why the rule is there. Where the steps are in blockstore/:

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
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from protocol.world import ABSENT, BAD, BLOCKS, GOOD, PRESENT, STRAY, STRAY_BLOCKS, Entry, Fault, Row, Rules, World

__all__ = ["Rules", "run"]
Steps = Generator[None, None, None]


@dataclass
class Process:
    """One actor: its steps, and the locks that its death frees."""

    mortal: bool = True
    locks: set[str] = field(default_factory=set)
    steps: Steps = field(init=False)


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
