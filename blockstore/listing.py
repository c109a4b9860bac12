"""What a store tells of itself: matches, entries, numbers."""

import msgspec

from .index_rows import EntryRow
from .rooms import Rooms


class Match(msgspec.Struct, frozen=True):
    """What find() found: `length` tokens of the prompt can be served from an entry of `entry_length` tokens.

    `limit` says why it is not more: "prompt" (its last token is always left to compute), "entry" (it ends there), or
    "tokens" (they differ from there on). `prefix` is a digest of the tokens; a load compares it, so that a damaged
    index never serves another prompt.
    """

    entry_id: str
    length: int
    entry_length: int
    prefix: str = ""
    limit: str = ""


class Entry(msgspec.Struct, frozen=True):
    """A committed entry as listings show it."""

    entry_id: str
    scope: str
    model_id: str | None
    ns: str | None
    token_count: int
    logical_bytes: int
    header_bytes: int
    created_at_ms: int
    shortens: bool
    minimum_reusable: int
    kinds: str
    pinned: bool


class Stats(msgspec.Struct, frozen=True):
    """Numbers of a store. logical_bytes: the tensors of all entries; physical_bytes: the whole directory, as du has it.

    block_bytes counts blocks and headers by the index, each rounded up to the allocation unit.
    """

    root: str
    entries: int
    tokens: int
    blocks: int
    dead_blocks: int
    unfinished_saves: int
    unfinished_removals: int
    logical_bytes: int
    block_bytes: int
    physical_bytes: int
    max_bytes: int
    free_bytes: int
    block_hash: str
    span: int
    durability: str


def entry_of(entry_id: str, row: EntryRow) -> Entry:
    names = [name for name in Entry.__struct_fields__ if name != "entry_id"]
    return Entry(entry_id, **{name: getattr(row, name) for name in names})


def stats_of(rooms: Rooms) -> Stats:
    index, layout = rooms.index, rooms.layout
    rows, counts = index.entries(), index.counts()
    return Stats(
        root=layout.root,
        entries=counts["entries"],
        tokens=sum(row.token_count for _, row in rows),
        blocks=counts["blocks"],
        dead_blocks=counts["dead"],
        unfinished_saves=counts["leases"],
        unfinished_removals=counts["doomed"],
        logical_bytes=sum(row.logical_bytes for _, row in rows),
        block_bytes=index.total_bytes(),
        physical_bytes=rooms.fs.tree_bytes(layout.root),
        max_bytes=index.max_bytes() or 0,
        free_bytes=rooms.fs.free_bytes(layout.root)[0],
        block_hash=layout.config.block_hash,
        span=layout.config.span,
        durability=layout.config.durability,
    )
