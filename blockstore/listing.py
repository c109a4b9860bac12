"""What a store tells of itself: matches, entries, numbers."""

import msgspec

from .identity import Identity
from .index import Index
from .index_rows import EntryRow
from .limits import Limits
from .prefixes import prefix_digest
from .records import scope_of
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
    """A committed entry as listings show it. `used_at_ms`: the last time that it was saved or loaded, by the clock."""

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
    used_at_ms: int


class ModelStats(msgspec.Struct, frozen=True):
    """The entries of one model. With a quota, held_bytes is what counts against it: its headers and blocks."""

    model_id: str | None
    entries: int
    tokens: int
    logical_bytes: int
    quota_bytes: int | None
    held_bytes: int | None


class Stats(msgspec.Struct, frozen=True):
    """Numbers of a store. logical_bytes: the tensors of all entries; physical_bytes: the whole directory, as du has it.

    block_bytes counts blocks and headers by the index, each rounded up to the allocation unit. Limits of 0 are none.
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
    min_free_bytes: int
    max_age_s: int
    models: tuple[ModelStats, ...]
    read_only: bool


def find(rooms: Rooms, identity: Identity, provider_id: str, packed: bytes, exclude: frozenset[str]) -> Match | None:
    """The entry with the longest usable prefix of a prompt; `packed` are its tokens."""
    found = rooms.index.find(_scope(identity, provider_id), packed, exclude)
    if found is None:
        return None
    limit = "prompt" if found.length == len(packed) // 4 - 1 else "tokens"
    if found.length == found.entry_length:
        limit = "entry"
    return Match(found.entry_id, found.length, found.entry_length, prefix_digest(packed, found.length), limit)


def entries_of(rooms: Rooms, identity: Identity, provider_id: str) -> list[Entry]:
    """The entries of one identity, the longest first; what others there are costs nothing."""
    rows = rooms.index.entries_of(_scope(identity, provider_id))
    return [entry_of(entry_id, row) for entry_id, row in rows]


def entry_of(entry_id: str, row: EntryRow) -> Entry:
    names = [name for name in Entry.__struct_fields__ if name not in ("entry_id", "used_at_ms")]
    facts = {name: getattr(row, name) for name in names}
    return Entry(entry_id, used_at_ms=row.last_used_ms, **facts)


def stats_of(rooms: Rooms) -> Stats:
    index, layout = rooms.index, rooms.layout
    rows, counts, limits = index.entries(), index.counts(), index.limits()
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
        max_bytes=limits.max_bytes,
        free_bytes=rooms.fs.free_bytes(layout.root)[0],
        block_hash=layout.config.block_hash,
        span=layout.config.span,
        durability=layout.config.durability,
        min_free_bytes=limits.min_free_bytes,
        max_age_s=limits.max_age_s,
        models=_models(index, limits, [row for _, row in rows]),
        read_only=index.read_only,
    )


def _models(index: Index, limits: Limits, rows: list[EntryRow]) -> tuple[ModelStats, ...]:
    """One for each model that has entries or a quota, the largest first."""
    grouped: dict[str | None, list[EntryRow]] = {model_id: [] for model_id in limits.quotas}
    for row in rows:
        grouped.setdefault(row.model_id, []).append(row)
    found = [
        ModelStats(
            model_id=model_id,
            entries=len(own),
            tokens=sum(row.token_count for row in own),
            logical_bytes=sum(row.logical_bytes for row in own),
            quota_bytes=limits.quotas.get(model_id) if model_id is not None else None,
            held_bytes=index.held_bytes(model_id) if model_id in limits.quotas and model_id is not None else None,
        )
        for model_id, own in grouped.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.logical_bytes))


def _scope(identity: Identity, provider_id: str) -> str:
    return scope_of(identity.model_id, identity.config_fingerprint, identity.tokenizer_hash, identity.ns, provider_id)
