"""The header hash against fixed vectors and against a reference that is written for clearness."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.wyhash import wyhash64

VECTORS = json.loads((Path(__file__).parent.parent / "golden" / "bunhash.json").read_text())
SECRET = [0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3]


def pattern(size: int) -> bytes:
    return bytes((index * 31 + 7) & 255 for index in range(size))


def reference(data: bytes, seed: int) -> int:
    """The definition, step by step: three lanes of 16 bytes while more than 48 remain, then one."""
    at, state = 0, seed ^ mix(seed ^ SECRET[0], SECRET[1])
    if len(data) <= 16:
        a, b = short(data)
    else:
        lanes = [state, state, state]
        while len(data) - at > 48:
            for lane in range(3):
                lanes[lane] = mix(read(data, at, 8) ^ SECRET[lane + 1], read(data, at + 8, 8) ^ lanes[lane])
                at += 16
        state = lanes[0] ^ lanes[1] ^ lanes[2]
        while len(data) - at > 16:
            state = mix(read(data, at, 8) ^ SECRET[1], read(data, at + 8, 8) ^ state)
            at += 16
        a, b = read(data, len(data) - 16, 8), read(data, len(data) - 8, 8)
    product = (a ^ SECRET[1]) * (b ^ state)
    return mix(product % 2**64 ^ SECRET[0] ^ len(data), product >> 64 ^ SECRET[1])


def short(data: bytes) -> tuple[int, int]:
    if not data:
        return 0, 0
    if len(data) < 4:
        return data[0] << 16 | data[len(data) // 2] << 8 | data[-1], 0
    middle = len(data) // 8 * 4
    ends = [
        read(data, 0, 4),
        read(data, middle, 4),
        read(data, len(data) - 4, 4),
        read(data, len(data) - 4 - middle, 4),
    ]
    return ends[0] << 32 | ends[1], ends[2] << 32 | ends[3]


def mix(a: int, b: int) -> int:
    return a * b >> 64 ^ a * b % 2**64


def read(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def test_there_are_34_vectors() -> None:
    assert len(VECTORS) == 34


@pytest.mark.parametrize("size", VECTORS)
def test_vectors(size: str) -> None:
    assert f"{wyhash64(pattern(int(size))):016x}" == VECTORS[size]


def test_every_length_up_to_600_equals_the_reference() -> None:
    data = pattern(600)
    found = [wyhash64(data[:size]) for size in range(601)]
    assert found == [reference(data[:size], 0) for size in range(601)]


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_any_bytes_and_seed_equal_the_reference(data: bytes, seed: int) -> None:
    assert wyhash64(data, seed) == reference(data, seed)


@given(st.binary(min_size=1, max_size=600), st.integers(0, 17))
def test_views_at_any_address(data: bytes, offset: int) -> None:
    view = memoryview(bytes(offset) + data)[offset:]
    assert wyhash64(view) == wyhash64(data)


def test_lengths_around_a_chunk_of_the_loop() -> None:
    data = pattern(3 * 1024 * 48)
    for size in (49152, 49153, 49199, 49200, 49201, 98304, 98305, 98352, 98353):
        assert wyhash64(memoryview(data)[1 : size + 1]) == reference(data[1 : size + 1], 0)
