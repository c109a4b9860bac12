"""Garbage collection: first a frozen plan of what would go and why, then the act.

The act does not trust the plan: each step is judged again inside the transaction that takes it.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from .index import now_ms
from .index_rows import EntryRow
from .rooms import MARGINS, Deadline, Rooms
from .space import theirs_alone

Progress = Callable[[int, int], None]  # (done, total)
_AGED: Final = "nobody used it for longer than the store's age limit"
_NO_PROGRESS: Final[Progress] = lambda done, total: None  # noqa: E731  # a default argument


class Item(msgspec.Struct, frozen=True):
    """One thing that a collection takes: what, its name, why, and the bytes on the disk that it gives back."""

    what: str
    name: str
    why: str
    bytes: int


class Plan(msgspec.Struct, frozen=True):
    """What a collection found to do. After a run: what it did."""

    items: tuple[Item, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    def count(self, what: str) -> int:
        return sum(item.what == what for item in self.items)


def plan(rooms: Rooms) -> Plan:
    """What gc() would take now; changes nothing."""
    items = _plan_aged(rooms)
    items += [Item("header", entry_id, "of a removed entry", 0) for entry_id, _ in rooms.index.doomed()]
    dead_leases = [name for name in _lease_ids(rooms) if not rooms.leases.has_live_owner(name)]
    for lease_id in dead_leases:
        size = sum(rooms.fs.allocated(path) for path in rooms.leases.temporaries(lease_id))
        items.append(Item("lease", lease_id, "its owner is dead", size))
    for digest, size in rooms.index.dead():
        items.append(Item("block", digest.hex(), "nothing refers to it", rooms.index.on_disk(size)))
    return Plan(tuple(items))


def gc(rooms: Rooms, *, full: bool = False, progress: Progress = _NO_PROGRESS) -> Plan:
    """Remove what is too old, finish removals, reap dead leases, delete blocks without references.

    `full` also marks from the headers. Bounded steps, while others serve. The cost follows what is dead, but for
    `full`, which reads every header.
    """
    rooms.index.flush()
    items = _remove_aged(rooms) + finish_doomed(rooms) + reap_leases(rooms)
    if full:
        from . import full_mark  # reads headers, which the common collection does not

        items += [Item(*found) for found in full_mark.mark(rooms, progress)]
        items += finish_doomed(rooms)
    return Plan(tuple(items + delete_dead(rooms, progress)))


def full_plan(rooms: Rooms) -> Plan:
    """What gc(full=True) would take now; changes nothing."""
    from . import full_mark  # as above

    found = [Item(*item) for item in full_mark.survey(rooms)]
    return Plan(plan(rooms).items + tuple(found))


def evict(rooms: Rooms, entry_id: str) -> None:
    """Remove an entry and delete what only it referred to."""
    rooms.index.doom(entry_id)
    finish_doomed(rooms)
    delete_dead(rooms)


def _plan_aged(rooms: Rooms) -> list[Item]:
    aged = _aged(rooms)
    items = [Item("entry", entry_id, _AGED, rooms.index.on_disk(row.header_bytes)) for entry_id, row in aged]
    named = theirs_alone(rooms, [entry_id for entry_id, _ in aged])
    return items + [Item("block", digest.hex(), "of such entries alone", size) for digest, size in named]


def _remove_aged(rooms: Rooms) -> list[Item]:
    """The entries alone: headers and blocks go with all others that nothing needs any more."""
    return [Item("entry", entry_id, _AGED, 0) for entry_id, _ in _aged(rooms) if rooms.index.doom(entry_id)]


def _aged(rooms: Rooms) -> list[tuple[str, EntryRow]]:
    limit_s = rooms.index.limits().max_age_s
    return rooms.index.unused_since(now_ms() - 1000 * limit_s) if limit_s else []


def _lease_ids(rooms: Rooms) -> list[str]:
    """Leases by folder or by row: a crash may leave either alone."""
    return sorted({*rooms.leases.ids(), *rooms.index.leases()})


def finish_doomed(rooms: Rooms) -> list[Item]:
    doomed = rooms.index.doomed()
    sizes = [rooms.fs.allocated(rooms.layout.header_path(scope, entry_id)) for entry_id, scope in doomed]
    rooms.finish_doomed(doomed)
    return [
        Item("header", entry_id, "of a removed entry", size) for (entry_id, _), size in zip(doomed, sizes, strict=True)
    ]


def reap_leases(rooms: Rooms) -> list[Item]:
    items = []
    for lease_id in _lease_ids(rooms):
        claimed = rooms.leases.claim_dead(lease_id)
        if claimed is None:
            continue
        size = sum(rooms.fs.allocated(path) for path in rooms.leases.temporaries(lease_id))
        try:
            rooms.index.reap(lease_id, rooms.unlink_header)
        finally:
            claimed.release()
        items.append(Item("lease", lease_id, "its owner is dead", size))
    return items


def delete_dead(rooms: Rooms, progress: Progress = _NO_PROGRESS) -> list[Item]:
    """Delete what nothing refers to; about as much as there is now, however much others add meanwhile."""
    items: list[Item] = []
    total = rooms.index.counts()["dead"]
    while len(items) < total:
        gone = rooms.index.collect(MARGINS.collect_batch, rooms.blocks.unlink, Deadline(MARGINS.collect_batch_s))
        if not gone:
            break
        for digest, size in gone:
            items.append(Item("block", digest.hex(), "nothing refers to it", rooms.index.on_disk(size)))
        progress(len(items), max(total, len(items)))
    return items
