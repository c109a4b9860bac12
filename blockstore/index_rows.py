"""What the rows of the index hold, and how they are packed."""

import struct
from typing import Any, Final

import msgspec

from .digest import DIGEST_BYTES
from .errors import StoreBroken

ABSENT: Final = 0
WRITING: Final = 1
PRESENT: Final = 2
STATES: Final = ("absent", "writing", "present")

_BLOCK: Final = struct.Struct("<IBQ")


class BlockRow(msgspec.Struct):
    """One block: how many entries and leases refer to it, whether its file may be believed, its length in bytes."""

    refs: int
    state: int
    size: int

    def pack(self) -> bytes:
        return _BLOCK.pack(self.refs, self.state, self.size)


def unpack_block(value: bytes) -> BlockRow:
    """Raises StoreBroken for what pack() never made; so do the others."""
    try:
        return BlockRow(*_BLOCK.unpack(value))
    except struct.error as error:
        raise _broken(error) from error


class EntryRow(msgspec.Struct, frozen=True):
    """What the index knows of a committed entry, so that no listing and no search opens a header.

    `equal` names the identity and tokens (two entries never share it); `used` is the use counter's value at the last
    use, which eviction goes by; `used_at_ms` the clock's, for the age limit alone; bytes are logical (all tensors) and
    those of the header file.
    """

    scope: str
    equal: bytes
    token_count: int
    logical_bytes: int
    header_bytes: int
    created_at_ms: int
    shortens: bool
    minimum_reusable: int
    kinds: str
    model_id: str | None = None
    ns: str | None = None
    pinned: bool = False
    used: int = 0
    used_at_ms: int = 0

    @property
    def last_used_ms(self) -> int:
        """By the clock; an entry that was never loaded counts as used when it was made."""
        return self.used_at_ms or self.created_at_ms


class LeaseRow(msgspec.Struct, frozen=True):
    """What an unfinished save holds: the header it will publish and one reference for each of its digests."""

    header: str
    digests: bytes


_ENCODER = msgspec.msgpack.Encoder()
_ENTRY = msgspec.msgpack.Decoder(EntryRow)
_LEASE = msgspec.msgpack.Decoder(LeaseRow)


def pack(row: Any) -> bytes:
    return _ENCODER.encode(row)


def unpack_entry(value: bytes) -> EntryRow:
    try:
        return _ENTRY.decode(value)
    except msgspec.DecodeError as error:
        raise _broken(error) from error


def unpack_lease(value: bytes) -> LeaseRow:
    try:
        return _LEASE.decode(value)
    except msgspec.DecodeError as error:
        raise _broken(error) from error


def _broken(error: Exception) -> StoreBroken:
    return StoreBroken(f"a row of the index cannot be read: {error}")


def on_disk(size: int, allocation_unit: int) -> int:
    """`size` rounded up to the file system's allocation unit."""
    return -(-size // allocation_unit) * allocation_unit


def split_digests(joined: bytes) -> list[bytes]:
    return [joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES)]
