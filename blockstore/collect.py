"""Eviction and garbage collection: first a frozen plan of what would go and why, then the act.

The act does not trust the plan: each step is judged again inside the transaction that takes it.
"""

import os
from collections.abc import Callable
from typing import Final

import msgspec

from .errors import StoreFull
from .rooms import MARGINS, Deadline, Rooms

Progress = Callable[[int, int], None]  # (done, total)
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
    items = [Item("header", entry_id, "of a removed entry", 0) for entry_id, _ in rooms.index.doomed()]
    dead_leases = [name for name in _lease_ids(rooms) if not rooms.leases.has_live_owner(name)]
    for lease_id in dead_leases:
        size = sum(rooms.fs.allocated(path) for path in rooms.leases.temporaries(lease_id))
        items.append(Item("lease", lease_id, "its owner is dead", size))
    for digest, size in rooms.index.dead():
        items.append(Item("block", digest.hex(), "nothing refers to it", rooms.index.on_disk(size)))
    return Plan(tuple(items))


def gc(rooms: Rooms, *, full: bool = False, progress: Progress = _NO_PROGRESS) -> Plan:
    """Finish removals, reap dead leases, delete blocks without references; `full` also marks from the headers.

    Bounded steps, while others serve. The cost follows what is dead, but for `full`, which reads every header.
    """
    rooms.index.flush()
    items = _finish_doomed(rooms) + _reap_leases(rooms)
    if full:
        from . import full_mark  # reads headers, which the common collection does not

        items += [Item(*found) for found in full_mark.mark(rooms, progress)]
        items += _finish_doomed(rooms)
    return Plan(tuple(items + _delete_dead(rooms, progress)))


def full_plan(rooms: Rooms) -> Plan:
    """What gc(full=True) would take now; changes nothing."""
    from . import full_mark  # as above

    found = [Item(*item) for item in full_mark.survey(rooms)]
    return Plan(plan(rooms).items + tuple(found))


def check_can_fit(rooms: Rooms, own_bytes: int) -> None:
    """Raise StoreFull where no eviction would make room for that many bytes; before they are all written."""
    cap = rooms.index.max_bytes()
    if cap is not None and _fixed_bytes(rooms) + own_bytes > cap:
        raise _full(rooms, cap, own_bytes)


def make_room(rooms: Rooms, own_bytes: int, header_bytes: int) -> None:
    """Evict the least recently used entries until a save fits the store's cap. Raises StoreFull.

    own_bytes: of its blocks, on the disk. It has reserved them: they are counted, and go with nobody who is evicted.
    """
    cap = rooms.index.max_bytes()
    if cap is None:
        return
    needed = rooms.index.on_disk(header_bytes)
    if used_bytes(rooms) + needed <= cap:
        return
    # What no eviction would make fit must not cost everybody else's entries.
    if _fixed_bytes(rooms) + own_bytes + needed > cap:
        raise _full(rooms, cap, needed)
    rooms.index.flush()  # the uses say who goes
    # What dead savers and unfinished removals hold goes before anything that lives.
    _finish_doomed(rooms)
    _reap_leases(rooms)
    _delete_dead(rooms, _NO_PROGRESS)
    while used_bytes(rooms) + needed > cap:
        oldest = rooms.index.oldest()
        if oldest is None:
            raise _full(rooms, cap, needed)
        evict(rooms, oldest)


def evict(rooms: Rooms, entry_id: str) -> None:
    """Remove an entry and delete what only it referred to."""
    rooms.index.doom(entry_id)
    _finish_doomed(rooms)
    _delete_dead(rooms, _NO_PROGRESS)


def used_bytes(rooms: Rooms) -> int:
    """Bytes of the whole directory as the index counts them: blocks, headers, the index itself, quarantine."""
    return rooms.index.total_bytes() + _fixed_bytes(rooms)


def _fixed_bytes(rooms: Rooms) -> int:
    """Bytes that no eviction gives back: the index, quarantine."""
    fs, folder = rooms.fs, rooms.layout.quarantine_folder
    moved = sum(fs.allocated(os.path.join(folder, name)) for name in fs.names(folder))
    return rooms.index.env.used_bytes() + moved


def _full(rooms: Rooms, cap: int, needed: int) -> StoreFull:
    return StoreFull(
        "the store's cap leaves no room for the entry",
        path=rooms.layout.root,
        expected=f"at most {cap} bytes",
        found=f"{used_bytes(rooms)} bytes, and {needed} more wanted",
    )


def _lease_ids(rooms: Rooms) -> list[str]:
    """Leases by folder or by row: a crash may leave either alone."""
    return sorted({*rooms.leases.ids(), *rooms.index.leases()})


def _finish_doomed(rooms: Rooms) -> list[Item]:
    doomed = rooms.index.doomed()
    sizes = [rooms.fs.allocated(rooms.layout.header_path(scope, entry_id)) for entry_id, scope in doomed]
    rooms.finish_doomed(doomed)
    return [
        Item("header", entry_id, "of a removed entry", size) for (entry_id, _), size in zip(doomed, sizes, strict=True)
    ]


def _reap_leases(rooms: Rooms) -> list[Item]:
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


def _delete_dead(rooms: Rooms, progress: Progress) -> list[Item]:
    items: list[Item] = []
    total = rooms.index.counts()["dead"]
    while True:
        gone = rooms.index.collect(MARGINS.collect_batch, rooms.blocks.unlink, Deadline(MARGINS.collect_batch_s))
        if not gone:
            return items
        for digest, size in gone:
            items.append(Item("block", digest.hex(), "nothing refers to it", rooms.index.on_disk(size)))
        progress(len(items), max(total, len(items)))
