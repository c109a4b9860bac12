"""What a save must fit into: the store's cap, the space left free on the disk, its model's quota; and what goes for it.

Entries go by their last use, never by a clock. Pinned ones and what unfinished saves hold stay.
"""

import os
from collections.abc import Callable, Mapping

from . import collect
from .errors import StoreFull
from .limits import Limits
from .rooms import Rooms
from .space import named_blocks


def has_room(rooms: Rooms, more_bytes: int) -> bool:
    """True where so many bytes more may come, and nothing need go for them."""
    return not _is_short(rooms, rooms.index.limits(), more_bytes, more_bytes)


def make_room(rooms: Rooms, own_bytes: int, header_bytes: int, unwritten_bytes: int) -> None:
    """Evict the least recently used entries until a save that has reserved its blocks fits. Raises StoreFull.

    own_bytes: of its blocks, which the index counts already, and which go with nobody who is evicted.
    unwritten_bytes: those of them that are still to come to the disk.
    """
    limits, coming = rooms.index.limits(), header_bytes + unwritten_bytes
    if not _is_short(rooms, limits, header_bytes, coming):
        return
    # What no eviction would make fit must not cost everybody else's entries.
    evictable = rooms.index.total_bytes() - own_bytes
    over_cap = limits.max_bytes and _fixed_bytes(rooms) + own_bytes + header_bytes > limits.max_bytes
    if over_cap or _short_of_disk(rooms, limits, coming) > evictable:
        raise _full(rooms, limits, header_bytes, coming)
    rooms.index.flush()  # the uses say who goes
    # What dead savers and unfinished removals hold goes before anything that lives.
    collect.finish_doomed(rooms)
    collect.reap_leases(rooms)
    collect.delete_dead(rooms)
    while _is_short(rooms, limits, header_bytes, coming):
        oldest = rooms.index.oldest()
        if oldest is None:
            raise _full(rooms, limits, header_bytes, coming)
        collect.evict(rooms, oldest)


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
    return rooms.index.total_bytes() + _fixed_bytes(rooms) + _folder_bytes(rooms) + _unreserved_bytes(rooms)


def _is_short(rooms: Rooms, limits: Limits, more_bytes: int, coming_bytes: int) -> bool:
    """Whether something must go for more_bytes that nobody counts yet, or coming_bytes that are not on the disk yet."""
    over_cap = limits.max_bytes and used_bytes(rooms) + more_bytes > limits.max_bytes
    return bool(over_cap) or _short_of_disk(rooms, limits, coming_bytes) > 0


def _short_of_disk(rooms: Rooms, limits: Limits, coming_bytes: int) -> int:
    if not limits.min_free_bytes:
        return 0
    return max(limits.min_free_bytes + coming_bytes - rooms.fs.free_bytes(rooms.layout.root)[0], 0)


def _fixed_bytes(rooms: Rooms) -> int:
    """Bytes that no eviction gives back: the index, quarantine, the directories, the small files beside them."""
    fs, layout = rooms.fs, rooms.layout
    own = [layout.root, *layout.small_files, rooms.blocks.directory, layout.index_folder, rooms.leases.directory]
    plain = sum(map(fs.allocated, [*own, layout.entries_folder]))
    return plain + rooms.index.env.used_bytes() + fs.tree_bytes(layout.quarantine_folder)


def _folder_bytes(rooms: Rooms) -> int:
    """One folder for each identity that has entries; the last entry's removal takes it along."""
    folder = rooms.layout.entries_folder
    return sum(rooms.fs.allocated(os.path.join(folder, name)) for name in rooms.fs.names(folder))


def _unreserved_bytes(rooms: Rooms) -> int:
    """Temporaries of saves that have not reserved yet: the index does not count them, reserved ones it does."""
    reserved = set(rooms.index.leases())
    return sum(
        rooms.fs.tree_bytes(os.path.join(rooms.leases.directory, lease_id))
        for lease_id in rooms.leases.ids()
        if lease_id not in reserved
    )


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
