"""The token-chain index: the longest stored prefix of a prompt, without opening a header.

Every entry has one row for each boundary, that is after every 64 tokens:

    h_i (16) | needed (1) | the next 64 tokens, big-endian, fewer at the end | entry id (16)   ->   entry length

h_0 is the scope, h_i the blake3 of h_{i-1} and the i-th 64 tokens. Rows under one boundary are sorted by what follows,
so the one that agrees longest with a prompt stands next to where the prompt itself would. `needed` says how many of
the following tokens must agree before the row is of any use: all of them at the end of an entry that does not shorten,
the way up to minimumReusableOffset, otherwise none. Rows of equal need stand together. Where nothing of the entry may
be reused from there, the row has need 255 and no tokens: it only says that an entry goes on, so that the deepest
boundary that a prompt shares with any entry is found by halving.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from blake3 import blake3

from .errors import InvalidInput
from .index_rows import EntryRow
from .transaction import Cursor

CHUNK_TOKENS: Final = 64
# After fewer than 64 tokens: no token id reaches it, so a row never agrees with a prompt beyond its own end.
_END: Final = b"\xff\xff\xff\xff"
_PASSES: Final = b"\xff"  # a need that no row can meet
MAX_TOKEN: Final = 0xFFFFFFFE
_HASH_BYTES: Final = 16
_ID_BYTES: Final = 16
_CHUNK_BYTES: Final = 4 * CHUNK_TOKENS
_LENGTH: Final = struct.Struct("<I")


class Found(msgspec.Struct, frozen=True):
    """The entry that shares most: how many tokens of the prompt it may serve, and how many it holds."""

    entry_id: str
    length: int
    entry_length: int


def pack_tokens(tokens: Sequence[int] | Any) -> bytes:
    """Token ids as little-endian u32; `tokens` is a sequence of ints or a one-dimensional integer array."""
    if isinstance(tokens, (str, bytes, bytearray, memoryview)):
        raise InvalidInput("tokens must be numbers", field="tokens", found=type(tokens).__name__)
    if hasattr(tokens, "dtype") and hasattr(tokens, "tolist"):
        tokens = _checked_array(tokens)
        if isinstance(tokens, bytes):
            return tokens
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidInput(
            f"tokens must be a flat sequence of integers from 0 to {MAX_TOKEN}", field="tokens", found=str(error)
        ) from error
    if packed and max(packed) > MAX_TOKEN:
        raise InvalidInput("a token id is too large", field="tokens", expected=f"≤ {MAX_TOKEN}", found=max(packed))
    return packed.tobytes()


def prefix_digest(packed: bytes, count: int) -> str:
    """What tells the first `count` tokens from any others."""
    return blake3(packed[: 4 * count]).hexdigest()


def unpack_tokens(packed: bytes) -> "array[int]":
    return array("I", packed)


def _checked_array(tokens: Any) -> Any:
    """The bytes of a numpy array of integers at once; any other array as a list."""
    if getattr(tokens, "ndim", 1) != 1:
        raise InvalidInput("tokens must be one-dimensional", field="tokens", found=f"shape {tuple(tokens.shape)}")
    if getattr(tokens.dtype, "kind", None) in ("i", "u") and hasattr(tokens, "astype"):
        if len(tokens) and (tokens.min() < 0 or tokens.max() > MAX_TOKEN):
            raise InvalidInput(
                "a token id is out of range", field="tokens", expected=f"0 to {MAX_TOKEN}",
                found=f"{tokens.min()} to {tokens.max()}",
            )  # fmt: skip
        return tokens.astype("<u4").tobytes()
    return tokens.tolist()


def chain(scope: str, packed: bytes, boundaries: int) -> list[bytes]:
    """h_0 … h_boundaries of the tokens in `packed`."""
    hashes = [bytes.fromhex(scope)]
    _extend(hashes, packed, boundaries)
    return hashes


def _extend(hashes: list[bytes], packed: bytes, boundary: int) -> None:
    """Go on with a chain up to a boundary."""
    last = hashes[-1]
    for start in range((len(hashes) - 1) * _CHUNK_BYTES, boundary * _CHUNK_BYTES, _CHUNK_BYTES):
        last = blake3(last + packed[start : start + _CHUNK_BYTES]).digest(_HASH_BYTES)
        hashes.append(last)


def rows(entry: EntryRow, entry_key: bytes, packed: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The chain rows of an entry over the tokens in `packed`: key and value."""
    total = len(packed) // 4
    last = total // CHUNK_TOKENS
    hashes, swapped = chain(entry.scope, packed, last), _big_endian(packed)
    value = _LENGTH.pack(total)
    least = entry.minimum_reusable if entry.shortens else total
    for i in range(last + 1):
        chunk = swapped[i * _CHUNK_BYTES : (i + 1) * _CHUNK_BYTES]
        needed = max(least - i * CHUNK_TOKENS, 0)
        # A row that needs all 64 would only repeat the next boundary's.
        if needed <= len(chunk) // 4 and needed < CHUNK_TOKENS:
            tail = chunk if len(chunk) == _CHUNK_BYTES else chunk + _END
            yield hashes[i] + bytes([needed]) + tail + entry_key, value
        else:
            yield hashes[i] + _PASSES + entry_key, value


def longest(cursor: Cursor, scope: str, packed: bytes, exclude: frozenset[str]) -> Found | None:
    """The entry with the longest usable prefix of the prompt in `packed`, at most all but its last token."""
    usable = packed[:-4]
    hashes = _shared_boundaries(cursor, scope, usable)
    swapped = _big_endian(usable[: len(hashes) * _CHUNK_BYTES])
    best: Found | None = None
    for i in range(len(hashes) - 1, -1, -1):
        if best is not None and best.length >= (i + 1) * CHUNK_TOKENS:
            break
        probe = swapped[i * _CHUNK_BYTES : (i + 1) * _CHUNK_BYTES]
        for found in _under(cursor, hashes[i], probe, i * CHUNK_TOKENS, exclude):
            if found.length > (best.length if best else 0):
                best = found
    return best


def members(cursor: Cursor, scope: str) -> Iterator[str]:
    """The ids of all entries of one identity: each has one row under the first boundary, which is the scope itself."""
    first = bytes.fromhex(scope)
    standing = cursor.set_range(first)
    while standing and cursor.key().startswith(first):
        yield cursor.key()[-_ID_BYTES:].hex()
        standing = cursor.next()


def _shared_boundaries(cursor: Cursor, scope: str, packed: bytes) -> list[bytes]:
    """The hashes of the boundaries that the tokens share with any entry. If one is shared, so are all before it."""
    count = len(packed) // _CHUNK_BYTES + 1
    hashes = [bytes.fromhex(scope)]

    def is_shared(i: int) -> bool:
        _extend(hashes, packed, i)
        return cursor.set_range(hashes[i]) and cursor.key().startswith(hashes[i])

    # In growing steps, since a hash takes as long as a look: most of them are needed only by a prompt that shares much.
    step = 1
    while step < count and is_shared(step):
        step *= 2
    shared, beyond = step // 2, min(step, count)
    while beyond - shared > 1:
        middle = (shared + beyond) // 2
        shared, beyond = (middle, beyond) if is_shared(middle) else (shared, middle)
    return hashes[: shared + 1]


def _under(cursor: Cursor, boundary: bytes, probe: bytes, position: int, exclude: frozenset[str]) -> Iterator[Found]:
    """The nearest usable rows under one boundary, for each number of needed tokens that occurs there."""
    start = boundary
    while cursor.set_range(start):
        group = cursor.key()[: _HASH_BYTES + 1]
        if not group.startswith(boundary) or group.endswith(_PASSES):
            return
        needed = group[-1]
        for step in (cursor.next, cursor.prev):
            found = _nearest(cursor, group, probe, step, exclude)
            if found is not None and found.length >= needed:
                yield Found(found.entry_id, position + found.length, found.entry_length)
        start = boundary + bytes([needed + 1])


def _nearest(cursor: Cursor, group: bytes, probe: bytes, step: Any, exclude: frozenset[str]) -> Found | None:
    """From where the prompt would stand go `step` by `step` to the first row of the group that is not excluded."""
    standing = cursor.set_range(group + probe)
    if step == cursor.prev:
        standing = cursor.prev() if standing else cursor.last()
    while standing:
        key = cursor.key()
        if not key.startswith(group):
            return None
        entry_id = key[-_ID_BYTES:].hex()
        if entry_id not in exclude:
            return Found(entry_id, _agreement(key[len(group) : -_ID_BYTES], probe), *_LENGTH.unpack(cursor.value()))
        standing = step()
    return None


def _agreement(stored: bytes, probe: bytes) -> int:
    """How many leading tokens are equal."""
    size = min(len(stored), len(probe))
    different = int.from_bytes(stored[:size], "big") ^ int.from_bytes(probe[:size], "big")
    return (size - (different.bit_length() + 7) // 8) // 4


def _big_endian(packed: bytes) -> bytes:
    tokens = array("I", packed)
    tokens.byteswap()
    return tokens.tobytes()
