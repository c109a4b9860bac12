"""Hashing many tensors gives what hashing each by itself gives, on each of the three ways that it is done."""

import importlib.util
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore import wyhash_many
from blockstore.wyhash import wyhash64
from blockstore.wyhash_many import hash_all

HAS_NUMBA = importlib.util.find_spec("numba") is not None
NO_NUMBA = pytest.mark.skipif(not HAS_NUMBA, reason="numba, which is optional, is not installed")
# Lengths at which something changes: short inputs, whole rounds of 48 bytes and the one before, the longest piece.
PIECE = wyhash_many._CHAIN_BYTES
EDGES = [0, 1, 3, 4, 16, 17, 47, 48, 49, 64, 65, 96, 97, 144, 145]


class Tensor:
    """Bytes that are copied out in pieces; keeps a record of how many at a time."""

    def __init__(self, data: bytes) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.nbytes = len(data)
        self.asked: list[int] = []

    def copy_bytes(self, start: int, out: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        assert start + len(out) <= self.nbytes
        self.asked.append(len(out))
        out[:] = self.data[start : start + len(out)]


@pytest.fixture(params=["without numba", pytest.param("with numba", marks=NO_NUMBA)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "without numba":
        monkeypatch.setattr(wyhash_many, "_compiled", lambda: None)
    return str(request.param)


def random_bytes(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def assert_equal(data: Sequence[bytes]) -> None:
    assert hash_all([Tensor(one) for one in data]) == [wyhash64(one) for one in data]


def test_no_tensors_have_no_hashes(way: str) -> None:
    assert hash_all([]) == []


def test_every_length_up_to_600(way: str) -> None:
    """All lengths at once, mixed: each must find its own place again."""
    for lanes in (1, 20):
        data = [random_bytes(size, 1000 * lane + size) for lane in range(lanes) for size in range(601)]
        random.Random(lanes).shuffle(data)
        assert_equal(data)


def test_any_number_of_lanes(way: str) -> None:
    for lanes in range(1, 41):
        assert_equal([random_bytes(size, 100 * size + lane) for lane in range(lanes) for size in EDGES])


def test_longer_than_one_piece(way: str) -> None:
    for more in (-1, 0, 1, 47, 48, 49):
        assert_equal([random_bytes(PIECE + more, 3)])


def test_longer_than_one_chunk_of_many_lanes(way: str) -> None:
    lanes = 17
    chunk = wyhash_many._CHUNK_BYTES // (48 * lanes) * 48
    for more in (-1, 0, 1, 47, 48, 49):
        assert_equal([random_bytes(chunk + more, lane) for lane in range(lanes)])


def test_bytes_that_make_the_products_extreme(way: str) -> None:
    for value in (0, 255):
        assert_equal([bytes([value]) * size for size in [*EDGES, 4800, 4801] for _ in range(18)])


@given(st.lists(st.binary(max_size=300), max_size=40))
@settings(max_examples=40)
def test_any_bytes(data: list[bytes]) -> None:
    assert_equal(data)


def test_only_a_few_mib_are_copied_at_a_time(way: str) -> None:
    for lanes in (1, 20):
        tensors = [Tensor(bytes((8 << 20) // lanes)) for _ in range(lanes)]
        hash_all(tensors)
        at_once = lanes if way == "without numba" else 1
        assert max(size for tensor in tensors for size in tensor.asked) * at_once <= 4 << 20


@NO_NUMBA
def test_numba_is_used_where_it_is_installed(numba_calls: list[int]) -> None:
    hash_all([Tensor(bytes(100))])
    assert numba_calls == [96]


@pytest.fixture
def numba_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call of the compiled function was given."""
    compiled: Callable[..., None] | None = wyhash_many._compiled()
    assert compiled is not None
    calls: list[int] = []

    def recorded(state: Any, words: Any) -> None:
        calls.append(words.nbytes)
        compiled(state, words)

    monkeypatch.setattr(wyhash_many, "_compiled", lambda: recorded)
    return calls
