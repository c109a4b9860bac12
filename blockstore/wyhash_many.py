"""The 64-bit hash of tensors in v3/v4 files, fast enough for gigabytes.

One hash is a chain of dependent multiplications, which numpy cannot help with; many of equal length go through numpy
in lockstep, one lane each. Where numba is importable it compiles the chain instead. Same results as wyhash64.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, Protocol

import numpy as np

from .wyhash import END_BYTES, advance, finish, initial, wyhash64

_SECRET: Final = np.array([0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3], np.uint64)
_START: Final = np.uint64(initial())
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_ROUND_BYTES: Final = 48
# Fewer lanes than this are slower than plain Python; more chunk bytes than this leave the processor's cache.
_LEAST_LANES: Final = 16
_CHUNK_BYTES: Final = 4 << 20
_CHAIN_BYTES: Final = _ROUND_BYTES * 20_000

Words = np.ndarray[Any, np.dtype[np.uint64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# Takes the three chains and whole rounds of words, and advances the chains in place.
Chain = Callable[[Words, Words], None]


class Hashable(Protocol):
    """A run of bytes that can be copied out piece by piece."""

    @property
    def nbytes(self) -> int: ...
    def copy_bytes(self, start: int, out: Bytes) -> None:
        """Fill `out` with the bytes from `start` on."""
        ...


def hash_all(tensors: Sequence[Hashable]) -> list[int]:
    """The hash of each of `tensors`, of which at most a few MiB are copied at a time."""
    found = [0] * len(tensors)
    by_size: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_size.setdefault(tensor.nbytes, []).append(number)
    for size, numbers in by_size.items():
        lanes = [tensors[number] for number in numbers]
        for number, value in zip(numbers, _hash_equal(lanes, size), strict=True):
            found[number] = value
    return found


def _hash_equal(lanes: Sequence[Hashable], size: int) -> list[int]:
    # Up to 16 bytes are hashed another way, and below 49 there is no whole round.
    rounds = max(size - 1, 0) // _ROUND_BYTES
    if not rounds:
        return [_whole(lane, size) for lane in lanes]
    compiled = _compiled()
    if compiled is None and len(lanes) >= _LEAST_LANES:
        states = _lockstep(lanes, rounds)
        return [_finish_one(lane, size, states[:, number]) for number, lane in enumerate(lanes)]
    chain = compiled or _plain
    return [_finish_one(lane, size, _run_chain(chain, lane, rounds)) for lane in lanes]


def _whole(lane: Hashable, size: int) -> int:
    data = np.empty(size, np.uint8)
    lane.copy_bytes(0, data)
    return wyhash64(data.data)


def _run_chain(chain: Chain, lane: Hashable, rounds: int) -> Words:
    """The three chains of one lane after all whole rounds."""
    state = np.full(3, _START, np.uint64)
    size = rounds * _ROUND_BYTES
    data = np.empty(min(size, _CHAIN_BYTES), np.uint8)
    for start in range(0, size, _CHAIN_BYTES):
        piece = data[: min(_CHAIN_BYTES, size - start)]
        lane.copy_bytes(start, piece)
        chain(state, piece.view("<u8"))
    return state


def _plain(state: Words, words: Words) -> None:
    first, second, third = (int(value) for value in state)
    state[:] = advance(words.data.cast("B"), (first, second, third))


def _finish_one(lane: Hashable, size: int, state: Words) -> int:
    """Fold the three chains after the whole rounds and hash what is left, at least one byte."""
    done = (size - 1) // _ROUND_BYTES * _ROUND_BYTES
    kept = min(END_BYTES, done)
    tail = np.empty(size - done + kept, np.uint8)
    lane.copy_bytes(done - kept, tail)
    first, second, third = (int(value) for value in state)
    return finish(bytes(tail), kept, first ^ second ^ third, size)


# ---- in lockstep


def _lockstep(lanes: Sequence[Hashable], rounds: int) -> Words:
    """The three chains of every lane after all whole rounds, as [3, lanes]."""
    state = np.full((3, len(lanes)), _START, np.uint64)
    step = max(_CHUNK_BYTES // (_ROUND_BYTES * len(lanes)), 1)
    for first in range(0, rounds, step):
        count = min(step, rounds - first)
        data = np.empty((len(lanes), count * _ROUND_BYTES), np.uint8)
        for row, lane in zip(data, lanes, strict=True):
            lane.copy_bytes(first * _ROUND_BYTES, row)
        words = np.ascontiguousarray(data.view("<u8").reshape(len(lanes), count, 3, 2).transpose(3, 1, 2, 0))
        _advance(state, words[0] ^ _SECRET[:, None], words[1])
    return state


def _advance(state: Words, left: Words, right: Words) -> None:
    """Mix `left` with `right` and the state, round by round: the 128-bit product's halves, one xor the other.

    The upper half by the schoolbook, in halves of 32 bits; every result goes into an array that is there already,
    since making one costs as much as filling it.
    """
    left_low, left_high = left & _LOW, left >> _HALF
    b, low, high, cross, carry, other = (np.empty_like(state) for _ in range(6))
    for number in range(len(left)):
        np.bitwise_xor(right[number], state, out=b)
        np.bitwise_and(b, _LOW, out=low)
        np.right_shift(b, _HALF, out=high)
        np.multiply(left_low[number], low, out=carry)
        np.right_shift(carry, _HALF, out=carry)
        np.multiply(left_low[number], high, out=cross)
        np.add(cross, carry, out=cross)
        np.bitwise_and(cross, _LOW, out=carry)
        np.multiply(left_high[number], low, out=other)
        np.add(other, carry, out=other)
        np.right_shift(cross, _HALF, out=cross)
        np.right_shift(other, _HALF, out=other)
        np.multiply(left_high[number], high, out=high)
        np.add(high, cross, out=high)
        np.add(high, other, out=high)
        np.multiply(left[number], b, out=b)
        np.bitwise_xor(high, b, out=state)


# ---- compiled


@cache
def _compiled() -> Chain | None:
    """The rounds as a numba function, or None where numba is not installed. Compiled once a process."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba  # optional: whoever verifies gigabytes of old files may install it

    @numba.njit("void(uint64[:], uint64[:])", nogil=True)  # type: ignore[untyped-decorator]  # numba has no types
    def rounds(state: Words, words: Words) -> None:
        low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
        for at in range(0, len(words), 6):
            for chain in range(3):
                a = words[at + 2 * chain] ^ _SECRET[chain]
                b = words[at + 2 * chain + 1] ^ state[chain]
                cross, other = (a & low) * (b >> half), (a >> half) * (b & low)
                carry = (((a & low) * (b & low)) >> half) + (cross & low) + (other & low)
                top = (a >> half) * (b >> half) + (cross >> half) + (other >> half) + (carry >> half)
                state[chain] = top ^ (a * b)

    found: Chain = rounds
    return found
