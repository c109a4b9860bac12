"""The entries/ directory: header files, and the index row that each of them implies.

The headers are the truth; this is the one place that says what the index must hold for one.
"""

import os
from collections.abc import Iterator, Sequence
from hashlib import sha256

import msgspec

from kvcodecs import geometry
from kvcodecs.entry import HeaderEntry, leaves

from .errors import CorruptEntry, EntryGone
from .header_files import read_header
from .index_rows import EntryRow
from .layout import HEADER_SUFFIX
from .leases import is_id
from .prefixes import MAX_TOKEN, pack_tokens
from .records import Header, blocks_of, scope_of, slots_of
from .rooms import Rooms


class Implied(msgspec.Struct, frozen=True):
    """What the index must hold for a header: its row, its tokens (u32 LE), and the size of each block it names."""

    row: EntryRow
    tokens: bytes
    sizes: dict[bytes, int]


def files(rooms: Rooms) -> Iterator[tuple[str, str]]:
    """(entry id, scope) of every file under entries/ that has the name of a header."""
    folder = rooms.layout.entries_folder
    for scope in rooms.fs.names(folder):
        if is_id(scope) and rooms.fs.is_directory(os.path.join(folder, scope)):
            for name in rooms.fs.names(os.path.join(folder, scope)):
                stem = name.removesuffix(HEADER_SUFFIX)
                if stem != name and is_id(stem):
                    yield stem, scope


def read(rooms: Rooms, entry_id: str, scope: str) -> Header:
    """The header of an entry, checked to belong where it stands. Raises CorruptEntry, UnsupportedFormat, OSError."""
    path = rooms.layout.header_path(scope, entry_id)
    try:
        header = read_header(rooms.fs, path)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptEntry("the header is missing", path=path, entry_id=entry_id) from None
    found = header_scope(header)
    if found != scope:
        raise CorruptEntry("the header is of another identity", path=path, expected=scope, found=found)
    if max(header.tokens, default=0) > MAX_TOKEN:
        raise CorruptEntry("a token that no store takes", path=path, field="tokens", expected=f"at most {MAX_TOKEN}")
    hash_name = header.block_hash or "sha256"
    if hash_name != rooms.blocks.hash_name:
        raise CorruptEntry("blocks of another hash", path=path, expected=rooms.blocks.hash_name, found=hash_name)
    return header


def read_known(rooms: Rooms, entry_id: str, row: EntryRow) -> Header:
    """The header of an entry that the index knows, checked to be that entry's."""
    header = read(rooms, entry_id, row.scope)
    if equal_key(row.scope, pack_tokens(header.tokens)) != row.equal:
        path = rooms.layout.header_path(row.scope, entry_id)
        raise CorruptEntry("the header is another entry's", path=path, entry_id=entry_id)
    return header


def is_row_sound(rooms: Rooms, entry_id: str, row: EntryRow) -> bool:
    """Whether what the index has of an entry agrees with itself; where it does not, no header is to blame."""
    return equal_key(row.scope, rooms.index.tokens(entry_id)) == row.equal


def read_standing(rooms: Rooms, entry_id: str) -> Header:
    """The header of an entry by its id. Raises EntryGone, CorruptEntry, UnsupportedFormat, OSError."""
    row = rooms.index.entry(entry_id)
    if row is None:
        raise EntryGone("there is no such entry", entry_id=entry_id)
    return read_known(rooms, entry_id, row)


def examine(rooms: Rooms, entry_id: str, scope: str) -> Implied:
    """Read a header and say what the index must hold for it. Raises as read()."""
    header = read(rooms, entry_id, scope)
    size = rooms.fs.size_of(rooms.layout.header_path(scope, entry_id)) or 0
    return Implied(implied_row(header, size), pack_tokens(header.tokens), block_sizes(header))


def implied_row(header: Header, header_bytes: int, *, pinned: bool = False, used_at_ms: int = 0) -> EntryRow:
    scope = header_scope(header)
    return EntryRow(
        scope=scope,
        equal=equal_key(scope, pack_tokens(header.tokens)),
        token_count=len(header.tokens),
        logical_bytes=sum(slot.bytes for slot in slots_of(header)),
        header_bytes=header_bytes,
        created_at_ms=header.created_at,
        shortens=geometry.list_shortens(header.caches) and not header.attachments,
        minimum_reusable=max(map(geometry.minimum_reusable, header.caches), default=0),
        kinds=kinds_of(header.caches),
        model_id=header.model_id,
        ns=header.ns,
        pinned=pinned,
        used_at_ms=used_at_ms,
    )


def header_scope(header: Header) -> str:
    return scope_of(header.model_id, header.config_fingerprint, header.tokenizer_hash, header.ns, header.codec_provider)


def equal_key(scope: str, packed: bytes) -> bytes:
    """What two entries of equal identity and tokens share, and no others."""
    return sha256(bytes.fromhex(scope) + packed).digest()[:16]


def kinds_of(caches: Sequence[HeaderEntry]) -> str:
    """The kinds of the leaves with their numbers, as listings show them: "kv×4, arrays×12"."""
    counts: dict[str, int] = {}
    for entry in leaves(caches):
        counts[entry.kind] = counts.get(entry.kind, 0) + 1
    return ", ".join(f"{kind}×{count}" for kind, count in counts.items())


def block_sizes(header: Header) -> dict[bytes, int]:
    """Every block that the header names, once, in order, with its size in bytes."""
    return {bytes.fromhex(name): size for name, size in blocks_of(header)}
