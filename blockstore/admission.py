"""What a save must fit into: the store's cap, the space left free on the disk, its model's quota; and what goes for it.

Entries go by their last use, never by a clock. Pinned ones and what unfinished saves hold stay.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from . import collect
from .errors import StoreBusy, StoreFull
from .layout import TURN_NAME
from .leases import Lease
from .limits import Limits
from .rooms import MARGINS, Deadline, Rooms
from .space import named_blocks

_ANNOUNCED: Final = "announced"
_NUMBER_BYTES: Final = 32
_PAUSE_S: Final = 0.005


def announce(rooms: Rooms, lease: Lease, most_bytes: int) -> bool:
    """True where a save may write that much and nothing need go for it: then others count on it until it reserves.

    First said, then looked: of two savers at once each sees the other.
    """
    limits = rooms.index.limits()
    if limits.max_bytes or limits.min_free_bytes:
        path = lease.temporary(_ANNOUNCED)
        rooms.fs.write_new(path, [str(most_bytes).encode()])
        if _is_short(rooms, limits, 0, most_bytes):
            retract(rooms, lease)
            return False
    return True


def retract(rooms: Rooms, lease: Lease) -> None:
    """What a save has reserved, the index counts: nobody need count on it any more."""
    rooms.fs.unlink(lease.temporary(_ANNOUNCED))


@contextmanager
def turn(rooms: Rooms) -> Iterator[None]:
    """The turn of a save for which something may have to go: one at a time, or each would make room for all of them.

    Raises StoreBusy where another one takes very long.
    """
    fd, late = rooms.fs.open_lock(os.path.join(rooms.layout.root, TURN_NAME)), Deadline(MARGINS.turn_s)
    try:
        while not rooms.fs.try_lock(fd, exclusive=True):
            if late():
                raise StoreBusy("another save has been making room for a long time", path=rooms.layout.root)
            time.sleep(_PAUSE_S)
        yield
    finally:
        rooms.fs.close(fd)


def make_room(rooms: Rooms, lease_id: str, header_bytes: int, unwritten_bytes: int) -> None:
    """Evict the least recently used entries until a save that has reserved its blocks fits. Raises StoreFull.

    unwritten_bytes: of its blocks those that are still to come to the disk.
    """
    limits, coming = rooms.index.limits(), header_bytes + unwritten_bytes
    if not _is_short(rooms, limits, header_bytes, coming):
        return
    rooms.index.flush()  # the uses say who goes
    # What dead savers and unfinished removals hold goes before anything that lives.
    collect.finish_doomed(rooms)
    collect.reap_leases(rooms)
    collect.delete_dead(rooms)
    late = Deadline(MARGINS.turn_s)
    while _is_short(rooms, limits, header_bytes, coming):
        oldest = rooms.index.oldest() if _is_possible(rooms, limits, header_bytes, coming) else None
        if oldest is not None:
            collect.evict(rooms, oldest)
        elif late() or not set(rooms.leases.ids()) - {lease_id}:
            raise _full(rooms, limits, header_bytes, coming)
        else:  # what other unfinished saves hold will soon be an entry, or gone
            time.sleep(_PAUSE_S)


def _is_possible(rooms: Rooms, limits: Limits, header_bytes: int, coming: int) -> bool:
    """Whether evicting all that may go would make room; what never would must not cost others their entries."""
    counted = _count(rooms)
    kept = rooms.index.kept_bytes()
    if limits.max_bytes and counted.fixed + counted.unreserved + kept + header_bytes > limits.max_bytes:
        return False
    return _short_of_disk(rooms, limits, coming) <= counted.total - kept


def check_quota(rooms: Rooms, model_id: str | None, sizes: Mapping[bytes, int], header_bytes: int) -> None:
    """Raise StoreFull where a model's quota is too small for an entry with these blocks beside its pinned entries."""
    quota = rooms.index.limits().quotas.get(model_id or "")
    if quota is None or model_id is None:
        return
    blocks = {digest: rooms.index.on_disk(size) for digest, size in sizes.items()}
    if rooms.index.held_bytes(model_id) + sum(blocks.values()) + header_bytes <= quota:
        return
    pinned = [(entry_id, row) for entry_id, row in rooms.index.entries() if row.pinned and row.model_id == model_id]
    headers = header_bytes + sum(rooms.index.on_disk(row.header_bytes) for _, row in pinned)
    needed = headers + sum({**named_blocks(rooms, [entry_id for entry_id, _ in pinned]), **blocks}.values())
    if needed > quota:
        raise StoreFull(
            "the model's quota leaves no room for the entry",
            path=rooms.layout.root,
            expected=f"at most {quota} bytes for {model_id}",
            found=f"{needed} bytes with its {len(pinned)} pinned entries",
            hint="Raise the quota, or unpin entries of this model.",
        )


def keep_within(rooms: Rooms, model_id: str | None, newest: str) -> None:
    """Evict the least recently used entries, but the newest, until its model is within its quota and all in the cap.

    The cap held when the entry was let in; what may have grown since is the index.
    """
    limits = rooms.index.limits()
    quota = limits.quotas.get(model_id or "")
    if quota is not None and model_id is not None:
        _evict_while(rooms, lambda: rooms.index.held_bytes(model_id) > quota, model_id, newest)
    if limits.max_bytes:
        _evict_while(rooms, lambda: used_bytes(rooms) > limits.max_bytes, None, newest)


def _evict_while(rooms: Rooms, is_over: Callable[[], bool], model_id: str | None, newest: str) -> None:
    if is_over():
        rooms.index.flush()
    while is_over():
        oldest = rooms.index.oldest(model_id, but=newest)
        if oldest is None:
            return
        collect.evict(rooms, oldest)


def used_bytes(rooms: Rooms) -> int:
    """Bytes of the whole directory: blocks and headers as the index counts them, and all else as du does."""
    return sum(_count(rooms)) + _folder_bytes(rooms)


class _Counted(NamedTuple):
    """Bytes that the index counts, that saves which have not reserved have written or announced, and all others."""

    total: int
    unreserved: int
    fixed: int


def _count(rooms: Rooms) -> _Counted:
    """Folders first: a save that reserves meanwhile is in the index then, and what its folder holds is left out."""
    found = {lease_id: _lease_bytes(rooms, lease_id) for lease_id in rooms.leases.ids()}
    total, unknown = rooms.index.total_beside(found)
    return _Counted(total, sum(found[lease_id] for lease_id in unknown), _fixed_bytes(rooms))


def _is_short(rooms: Rooms, limits: Limits, more_bytes: int, coming_bytes: int) -> bool:
    """Whether something must go for more_bytes that nobody counts yet, or coming_bytes that are not on the disk yet."""
    over_cap = limits.max_bytes and used_bytes(rooms) + more_bytes > limits.max_bytes
    return bool(over_cap) or _short_of_disk(rooms, limits, coming_bytes) > 0


def _short_of_disk(rooms: Rooms, limits: Limits, coming_bytes: int) -> int:
    if not limits.min_free_bytes:
        return 0
    return max(limits.min_free_bytes + coming_bytes - rooms.fs.free_bytes(rooms.layout.root)[0], 0)


def _fixed_bytes(rooms: Rooms) -> int:
    """Bytes that no eviction gives back: the index, quarantine, the directories, whatever else lies in the root."""
    fs, layout = rooms.fs, rooms.layout
    folders = (rooms.blocks.directory, layout.index_folder, rooms.leases.directory, layout.entries_folder)
    counted = {os.path.basename(folder) for folder in folders}
    others = [os.path.join(layout.root, name) for name in fs.names(layout.root) if name not in counted]
    own = fs.allocated(layout.root) + sum(map(fs.allocated, folders)) + sum(map(fs.tree_bytes, others))
    return own + rooms.index.env.used_bytes()


def _folder_bytes(rooms: Rooms) -> int:
    """One folder for each identity that has entries; the last entry's removal takes it along."""
    folder = rooms.layout.entries_folder
    return sum(rooms.fs.allocated(os.path.join(folder, name)) for name in rooms.fs.names(folder))


def _lease_bytes(rooms: Rooms, lease_id: str) -> int:
    folder = os.path.join(rooms.leases.directory, lease_id)
    written = rooms.fs.tree_bytes(folder)
    try:
        announced = int(rooms.fs.read_file(os.path.join(folder, _ANNOUNCED), _NUMBER_BYTES))
    except (OSError, ValueError):  # none, or it is being written: then whoever writes it sees what we have announced
        return written
    return announced if announced > written and rooms.leases.has_live_owner(lease_id) else written


def _full(rooms: Rooms, limits: Limits, more_bytes: int, coming_bytes: int) -> StoreFull:
    if _short_of_disk(rooms, limits, coming_bytes):
        return StoreFull(
            "the free space that the store is to leave leaves no room for the entry",
            path=rooms.layout.root,
            expected=f"{limits.min_free_bytes} bytes left free",
            found=f"{rooms.fs.free_bytes(rooms.layout.root)[0]} bytes free, and {coming_bytes} more wanted",
            hint="Free space on the disk, or lower min_free_bytes.",
        )
    return StoreFull(
        "the store's cap leaves no room for the entry",
        path=rooms.layout.root,
        expected=f"at most {limits.max_bytes} bytes",
        found=f"{used_bytes(rooms)} bytes, and {more_bytes} more wanted",
    )
