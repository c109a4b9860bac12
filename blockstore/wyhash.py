"""The 64-bit hash of a header's JSON (FORMAT 1): wyhash, final version 4, with the older secret.

Plain Python, about 50 MB/s: enough for headers. It finds damage; it is no protection against intent.
"""

import struct
import sys
from collections.abc import Iterator

_MASK = (1 << 64) - 1
_SECRET = (0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3)
_ROUND_BYTES = 48
# Words are unpacked into Python integers a chunk at a time, so that 32 MiB never become four million objects at once.
_CHUNK_BYTES = 1024 * _ROUND_BYTES
END_BYTES = 16
Lanes = tuple[int, int, int]


def initial(seed: int = 0) -> int:
    """The state before the first byte."""
    return seed ^ _mix(seed ^ _SECRET[0], _SECRET[1])


def wyhash64(data: bytes | memoryview, seed: int = 0) -> int:
    """Hash contiguous bytes at any address; `seed` is an unsigned 64-bit integer. Nothing is copied but the tail."""
    view = memoryview(data).cast("B")
    size = len(view)
    state = initial(seed)
    if size <= 16:
        return _finish(*_short_words(bytes(view)), state, size)
    # The loop leaves at least one byte, so a length that is a multiple of 48 ends in three steps of 16.
    rounds_end = (size - 1) // _ROUND_BYTES * _ROUND_BYTES
    if rounds_end:
        first, second, third = advance(view[:rounds_end], (state, state, state))
        state = first ^ second ^ third
    kept = min(rounds_end, END_BYTES)
    return finish(bytes(view[rounds_end - kept :]), kept, state, size)


def finish(tail: bytes, kept: int, state: int, size: int) -> int:
    """The hash of `size` > 16 bytes after its whole rounds left `state`.

    `tail` is what is left, behind the last `kept` bytes of the rounds: the very end is read 16 bytes back.
    """
    for start in range(kept, len(tail) - 16, 16):
        state = _mix(_word(tail, start) ^ _SECRET[1], _word(tail, start + 8) ^ state)
    return _finish(_word(tail, len(tail) - 16), _word(tail, len(tail) - 8), state, size)


def _mix(a: int, b: int) -> int:
    product = a * b
    return (product >> 64) ^ (product & _MASK)


def _word(data: bytes, start: int) -> int:
    return int.from_bytes(data[start : start + 8], "little")


def _short_words(data: bytes) -> tuple[int, int]:
    """Two words that together read every byte of at most 16, some of them twice."""
    size = len(data)
    if size >= 4:
        step = size >> 3 << 2
        return _halves(data, 0, step), _halves(data, size - 4, size - 4 - step)
    if size:
        return data[0] << 16 | data[size >> 1] << 8 | data[size - 1], 0
    return 0, 0


def _halves(data: bytes, high: int, low: int) -> int:
    return int.from_bytes(data[high : high + 4], "little") << 32 | int.from_bytes(data[low : low + 4], "little")


def advance(view: memoryview, state: Lanes) -> Lanes:
    """The three lanes, which run side by side, after `view`, a whole number of 48-byte rounds."""
    _, s1, s2, s3 = _SECRET
    mask = _MASK
    x, y, z = state
    for a, b, c, d, e, f in _six_words(view):
        p = (a ^ s1) * (b ^ x)
        x = (p >> 64) ^ (p & mask)
        q = (c ^ s2) * (d ^ y)
        y = (q >> 64) ^ (q & mask)
        r = (e ^ s3) * (f ^ z)
        z = (r >> 64) ^ (r & mask)
    return x, y, z


def _six_words(view: memoryview) -> Iterator[tuple[int, int, int, int, int, int]]:
    for start in range(0, len(view), _CHUNK_BYTES):
        words = iter(_little_endian_words(view[start : start + _CHUNK_BYTES]))
        yield from zip(words, words, words, words, words, words, strict=True)


def _finish(a: int, b: int, state: int, size: int) -> int:
    product = (a ^ _SECRET[1]) * (b ^ state)
    return _mix((product & _MASK) ^ _SECRET[0] ^ size, (product >> 64) ^ _SECRET[1])


def _little_endian_words(view: memoryview) -> list[int]:
    if sys.byteorder == "little":
        return view.cast("Q").tolist()
    return list(struct.unpack(f"<{len(view) // 8}Q", view))
