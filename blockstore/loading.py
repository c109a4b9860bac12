"""Load: from a committed entry to new cache objects (DESIGN 4, Load)."""

import contextlib
from typing import Any

from kvcodecs.algebra import CodecProvider

from . import entries, history
from .errors import BlockstoreError, CorruptEntry, EntryGone
from .index_rows import EntryRow
from .prefixes import pack_tokens, prefix_digest
from .records import Header
from .restoring import Loaded, Restore
from .rooms import Rooms
from .sources import BlockSource


def load(
    rooms: Rooms,
    provider: CodecProvider,
    entry_id: str,
    length: int | None,
    model: Any,
    *,
    verify: bool = True,
    prefix: str = "",
) -> Loaded:
    """The caches of an entry, cut to `length` tokens (None: all). See Store.load for what is raised.

    prefix: prefixes.prefix_digest of those tokens, where the caller knows them.
    """
    row = rooms.index.entry(entry_id)
    if row is None:
        raise EntryGone("there is no such entry", entry_id=entry_id)
    try:
        header = entries.read_known(rooms, entry_id, row)
        _check_prefix(header, length, prefix, entry_id)
        restore = Restore(header, provider, model, length, entry_id=entry_id)
        source = BlockSource(rooms.blocks, header, restore.targets)
        source.check()
        restore.allocate()
        source.fill(verify=verify)
    except CorruptEntry as error:
        if not entries.is_row_sound(rooms, entry_id, row):
            hint = "Run `blockstore check --repair`."
            raise EntryGone("the index is wrong about the entry", entry_id=entry_id, hint=hint) from error
        _condemn(rooms, entry_id, row, error)
        raise
    rooms.index.touch(entry_id)
    rooms.lost.discard(entry_id)
    loaded = restore.loaded(entry_id)
    history.remember(loaded.caches, history.of_header(rooms.layout.root, entry_id, header, loaded.token_count))
    return loaded


def _check_prefix(header: Header, length: int | None, prefix: str, entry_id: str) -> None:
    """Raise EntryGone where the entry does not begin with the tokens that it was found for. That condemns no entry."""
    count = len(header.tokens) if length is None else length
    if prefix and prefix_digest(pack_tokens(header.tokens), count) != prefix:
        hint = "The index is wrong; run `blockstore check --repair`."
        raise EntryGone("the entry does not begin with these tokens", entry_id=entry_id, hint=hint)


def _condemn(rooms: Rooms, entry_id: str, row: EntryRow, error: CorruptEntry) -> None:
    """Drop an entry that cannot load, unless it is found whole again, or replaced, inside the transaction."""
    name = bytes.fromhex(str(error.digest)) if error.digest is not None else None

    def still_bad() -> bool:
        try:
            header = entries.read_known(rooms, entry_id, row)
        except CorruptEntry:
            return True
        if name is None:
            return False
        return not rooms.blocks.is_whole(name, entries.block_sizes(header)[name])

    # A store that cannot take the change now (full, busy, not ours to write) is still a miss, and judged next time.
    with contextlib.suppress(BlockstoreError, OSError):
        if rooms.index.condemn(entry_id, row, name, still_bad):
            rooms.finish_doomed([(entry_id, row.scope)])
