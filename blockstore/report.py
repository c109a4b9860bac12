"""What can be said of an entry or a file without loading it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvcodecs import geometry
from kvcodecs.entry import DTYPES, HeaderEntry, Slot

from . import entries
from .errors import EntryGone
from .header import Header, blocks_of, slots_of
from .rooms import Rooms


class Tensor(msgspec.Struct, frozen=True):
    """One tensor: its name in the format document, its dtype, shape and length in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Cache(msgspec.Struct, frozen=True):
    """One cache of the list; `fields` is its geometry beside the offset, in the words of the header."""

    kind: str
    offset: int
    fields: dict[str, Any]
    tensors: tuple[Tensor, ...]
    children: tuple["Cache", ...]
    minimum_reusable_offset: int | None


class Companion(msgspec.Struct, frozen=True):
    """An attachment: its schema and tensors."""

    schema: str
    tensors: tuple[Tensor, ...]


class Segments(msgspec.Struct, frozen=True):
    """A group of tensors that are cut together: tokens a block, how many tensors, how many blocks."""

    span: int
    tensors: int
    blocks: int


class Description(msgspec.Struct, frozen=True):
    """What a header says. `blocks` counts distinct ones; `block_bytes` is their sum; bytes are logical elsewhere."""

    path: str
    format_version: int
    created_at_ms: int
    model_id: str | None
    config_fingerprint: str | None
    tokenizer_hash: str | None
    ns: str | None
    codec_provider: str | None
    made_with: dict[str, str] | None
    block_hash: str | None
    token_count: int
    shortens: bool
    minimum_reusable: int
    kinds: str
    logical_bytes: int
    blocks: int
    block_bytes: int
    has_generation_checkpoint: bool
    caches: tuple[Cache, ...]
    attachments: tuple[Companion, ...]
    groups: tuple[Segments, ...]


def read_entry(rooms: Rooms, entry_id: str) -> tuple[str, Header]:
    """Path and header of an entry. Raises EntryGone, CorruptEntry, UnsupportedFormat, OSError."""
    row = rooms.index.entry(entry_id)
    if row is None:
        raise EntryGone("there is no such entry", entry_id=entry_id)
    return rooms.layout.header_path(row.scope, entry_id), entries.read_known(rooms, entry_id, row)


def describe(header: Header, path: str) -> Description:
    """Put a header into the words of a listing."""
    sizes = dict(blocks_of(header))
    return Description(
        path=path,
        format_version=header.format_version,
        created_at_ms=header.created_at,
        model_id=header.model_id,
        config_fingerprint=header.config_fingerprint,
        tokenizer_hash=header.tokenizer_hash,
        ns=header.ns,
        codec_provider=header.codec_provider,
        made_with=header.made_with,
        block_hash=_block_hash(header),
        token_count=len(header.tokens),
        shortens=geometry.list_shortens(header.caches) and not header.attachments,
        minimum_reusable=max(map(geometry.minimum_reusable, header.caches), default=0),
        kinds=entries.kinds_of(header.caches),
        logical_bytes=sum(slot.bytes for slot in slots_of(header)),
        blocks=len(sizes),
        block_bytes=sum(sizes.values()),
        has_generation_checkpoint=header.generation_checkpoint is not None,
        caches=tuple(map(_cache, header.caches)),
        attachments=tuple(Companion(a.schema, _tensors(a.tensors, ())) for a in header.attachments),
        groups=tuple(Segments(g.span, len(g.tensors), len(g.digests())) for g in header.segments or ()),
    )


def _block_hash(header: Header) -> str | None:
    """None where the tensors stand in the file itself."""
    cut = header.segments is not None or any(slot.blocks for slot in slots_of(header))
    return (header.block_hash or "sha256") if cut else None


def _cache(entry: HeaderEntry) -> Cache:
    known = geometry.KINDS.get(entry.kind)
    return Cache(
        kind=entry.kind,
        offset=entry.offset,
        fields=dict(entry.fields),
        tensors=_tensors(entry.tensors, (known.names_of(entry) if known is not None else None) or ()),
        children=tuple(map(_cache, entry.children)),
        minimum_reusable_offset=entry.minimum_reusable_offset,
    )


def _tensors(slots: Sequence[Slot], names: Sequence[str]) -> tuple[Tensor, ...]:
    """Tensors under the names that their kind gives them, or under their numbers."""
    named = names if len(names) == len(slots) else [str(number) for number in range(len(slots))]
    return tuple(
        Tensor(name, DTYPES[slot.dtype][0], slot.shape, slot.bytes) for name, slot in zip(named, slots, strict=True)
    )
