"""How often and how a load reads, and what the platform is asked for beside it."""

import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcodecs
from blockstore import buffers, libc, memory
from blockstore.fs import FileSystem
from store_kit import block_names
from token_caches import IDENTITY, extend, small_store

TOKENS = list(range(256))


class Reading(FileSystem):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.read = 0

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.read += len(buffer)
        return super().read_into(fd, buffer, offset)

    def read_scattered(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self.read += sum(map(len, buffers))
        return super().read_scattered(fd, buffers)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("dim", [4, 512])
def test_a_load_reads_every_block_once(tmp_path: Path, verify: bool, dim: int) -> None:
    """Rows of 4 bytes are copied from a whole block; those of 512 are long enough to be read where they belong."""
    fs = Reading()
    with small_store(tmp_path / "s", span=16, fs=fs) as store:
        saved = store.save(TOKENS, [extend(kvcodecs.KVCache(), TOKENS, dim=dim)], IDENTITY)
        on_disk = sum(os.path.getsize(os.path.join(store.root, "blocks", name)) for name in block_names(store))
        header = os.path.getsize(saved.path)
        fs.read = 0
        store.load(saved.entry_id, verify=verify)
    assert on_disk <= fs.read <= on_disk + 2 * header


def test_what_is_left_of_buffers_after_a_short_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """preadv may stop anywhere, also between two buffers."""
    data = bytes(range(200))
    path = tmp_path / "data"
    path.write_bytes(data)
    real = os.preadv
    for most in (1, 3, 7, 10, 64, 1000):

        def short(fd: int, parts: Sequence[memoryview], at: int, most: int = most) -> int:
            return real(fd, _cut(parts, most), at)

        monkeypatch.setattr("blockstore.fs.os.preadv", short)
        into = [bytearray(size) for size in (10, 0, 3, 64, 123)]
        with open(path, "rb") as file:
            count = FileSystem().read_scattered(file.fileno(), [memoryview(part) for part in into])
        assert (count, b"".join(into)) == (200, data)


def _cut(parts: Sequence[memoryview], most: int) -> list[memoryview]:
    """So many bytes of the buffers, from the beginning."""
    taken = list[memoryview]()
    for part in parts:
        taken.append(part[:most])
        most -= len(taken[-1])
    return taken


@pytest.mark.parametrize(("durability", "begun"), [("full", True), ("none", False)])
def test_the_disk_begins_with_a_durable_block_at_once(tmp_path: Path, durability: Any, begun: bool) -> None:
    class Beginning(FileSystem):
        def begin_writing(self, path: str) -> None:
            paths.append(path)
            super().begin_writing(path)

    paths = list[str]()
    with small_store(tmp_path / "s", span=16, fs=Beginning(), durability=durability) as store:
        saved = store.save(TOKENS, [extend(kvcodecs.KVCache(), TOKENS, dim=4)], IDENTITY)
    assert len(paths) == (saved.blocks_written if begun else 0)


def test_beginning_to_write_is_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the call, and where it fails, nothing is said: the sync that follows is what counts."""
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    FileSystem().begin_writing(str(path))
    libc.begin_writing(-1)
    monkeypatch.setattr(libc, "library", lambda: None)
    FileSystem().begin_writing(str(path))
    assert path.read_bytes() == b"bytes"


def test_threads_take_turns_with_small_parts_alone() -> None:
    turns = buffers.Turns()
    assert isinstance(turns.copying(8, 8 << 20), nullcontext)
    with turns.copying(100, 1 << 20):
        second = threading.Thread(target=lambda: turns.copying(100, 1 << 20).__enter__(), daemon=True)
        second.start()
        second.join(0.05)
        assert second.is_alive()
    second.join(10)
    assert not second.is_alive()


@pytest.mark.parametrize(
    ("reporting", "asked"), [("4294967295\n", True), ("9\n", False), ("nonsense", True), (None, True)]
)
def test_huge_pages_where_free_memory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reporting: str | None, asked: bool
) -> None:
    """A host that takes back free memory does so in large pieces: 9 is the order from which it hears of them."""

    class Library:
        def madvise(self, *_: object) -> int:
            advised.append(_)
            return 0

        def mincore(self, *_: object) -> int:
            return 0

    advised = list[object]()
    setting = tmp_path / "order"
    if reporting is not None:
        setting.write_text(reporting)
    monkeypatch.setattr(memory, "_REPORTING", str(setting))
    monkeypatch.setattr(memory, "_ADVICE", 14)
    monkeypatch.setattr(memory, "library", Library)
    monkeypatch.setattr(memory, "_calls", memory._calls.__wrapped__)
    memory.ask_for_huge_pages(np.empty(8 << 20, np.uint8))
    assert bool(advised) == asked


@pytest.mark.parametrize("size", [buffers._SMALL_BYTES - 1, buffers._SMALL_BYTES, 4 * buffers._SMALL_BYTES])
def test_new_arrays_of_every_size_can_be_filled(size: int) -> None:
    """Small ones are made of zeros, large ones are not touched; both show what is written through their views."""
    arrays = buffers.unfilled([((size,), 1), ((3,), 1)])

    for view in buffers.writable_views(arrays):
        view.fill(7)
    assert [(array.size, int(array.min()), int(array.max())) for array in arrays] == [(size, 7, 7), (3, 7, 7)]
