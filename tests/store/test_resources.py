"""Bounds on what a store takes of its process: files, threads, memory, addresses (CASES 19, 29; DESIGN 4)."""

import json
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvcodecs
from blockstore import BlockstoreError, Store, admission
from blockstore.rooms import MARGINS
from fs_doubles import FailingAt
from store.resource_roles import MANY_BLOCKS, OPEN_FILES
from store_kit import block_names, block_path
from token_caches import IDENTITY, extend, identity, plain, small_store

SCRIPT = Path(__file__).parent / "resource_roles.py"
LIMIT_BYTES = 64 << 20
OWN_FILES = Path("/proc/self/fd")
needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process this")


def run(part: str, root: Path) -> dict[str, Any]:
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), part, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=surroundings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_64_open_files_are_enough_for_an_entry_of_any_size(tmp_path: Path) -> None:
    found = run("files", tmp_path / "store")
    assert found["blocks"] >= MANY_BLOCKS > 20 * OPEN_FILES
    assert (found["clean"], found["damage"], found["collected"]) == (True, 0, found["blocks"])


@needs_proc
@pytest.mark.slow
def test_memory_beyond_the_arrays_is_bounded_for_save_and_load(tmp_path: Path) -> None:
    saved, loaded = run("save memory", tmp_path / "store"), run("load memory", tmp_path / "store")
    assert saved["written"] > saved["logical"] > 3 * LIMIT_BYTES
    assert loaded["logical"] == saved["logical"] <= loaded["arrays"] < 1.1 * loaded["logical"]
    assert 0 < saved["beyond"] <= LIMIT_BYTES
    assert 0 < loaded["beyond"] <= LIMIT_BYTES


@pytest.mark.parametrize("roomy", [True, False], ids=["written as digested", "made twice"])
def test_the_buffers_of_blocks_of_many_sizes_are_those_of_the_largest(tmp_path: Path, roomy: bool) -> None:
    """Views of a smaller buffer, or of one whose thread has ended, must not keep it."""
    tokens = list(range(256))
    caches = [extend(kvcodecs.KVCache(), tokens, dim=dim) for dim in range(520, 1001, 40)]
    largest = 2 * 4 * 1000 * len(tokens)
    with Store(tmp_path / "store", durability="none", span=256, block_bytes=1 << 20) as store:
        with mock.patch.object(admission, "announce", return_value=roomy):
            saved, beyond = traced(lambda: store.save(tokens, caches, IDENTITY))
        assert saved.blocks_written == len(caches)
        assert largest < beyond < (MARGINS.threads + 0.5) * largest
        for verify in (True, False):
            _, beyond = traced(lambda verify=verify: store.load(saved.entry_id, verify=verify))
            assert beyond < (MARGINS.threads + 0.5) * largest


def traced(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and the most memory that Python and numpy held for it; mlx's own is not seen."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@needs_proc
def test_a_store_opens_where_addresses_are_few(tmp_path: Path) -> None:
    found = run("address space", tmp_path / "store")
    assert 1 << 30 <= found["taken"] < 3 << 30


# ---- nothing is left behind


def open_files() -> list[str]:
    """What this process has open, without what only this look has."""
    found = []
    for name in os.listdir(OWN_FILES):
        try:
            found.append(os.readlink(OWN_FILES / name))
        except FileNotFoundError:
            continue
    return sorted(found)


def save(store: Store, fs: FailingAt) -> None:
    store.save(range(40), plain(range(40)), IDENTITY)


def load(store: Store, fs: FailingAt) -> None:
    assert store.restore([*range(30), 1], IDENTITY) is not None


def save_and_fail_early(store: Store, fs: FailingAt) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        fail_a_save(store, fs, 3)


def save_and_fail_late(store: Store, fs: FailingAt) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        fail_a_save(store, fs, 30)


def fail_a_save(store: Store, fs: FailingAt, k: int) -> None:
    fs.arm(k)
    try:
        store.save(range(100, 200), plain(range(100, 200)), IDENTITY)
    finally:
        assert fs.failed
        fs.disarm()


def load_and_fail(store: Store, fs: FailingAt) -> None:
    entry_id = store.save(range(50, 90), plain(range(50, 90)), identity("to fail")).entry_id
    for name in block_names(store):
        data = block_path(store, name).read_bytes()
        block_path(store, name).write_bytes(bytes(len(data)))
    with pytest.raises(BlockstoreError):
        store.load(entry_id)


def look(store: Store, fs: FailingAt) -> None:
    store.find(range(41), IDENTITY)
    store.stats()
    store.entries()


def collect_all(store: Store, fs: FailingAt) -> None:
    for entry in store.entries():
        store.remove(entry.entry_id)
    store.gc(full=True)


ACTS: list[Callable[[Store, FailingAt], None]] = [
    save, load, save_and_fail_early, save_and_fail_late, look, load_and_fail, collect_all,
]  # fmt: skip


@pytest.mark.skipif(not OWN_FILES.is_dir(), reason="only Linux tells a process its open files by name")
def test_no_thread_and_no_descriptor_outlives_a_call_and_none_the_store(tmp_path: Path) -> None:
    small_store(tmp_path / "other").close()  # what is opened once a process is open by now
    threads, closed = threading.enumerate(), open_files()
    fs = FailingAt()
    store = small_store(tmp_path / "store", fs=fs)
    save(store, fs)
    opened = open_files()
    assert len(opened) > len(closed)
    for act in ACTS:
        act(store, fs)
        assert threading.enumerate() == threads, act.__name__
        assert open_files() == opened, act.__name__
    store.close()
    assert open_files() == closed
    assert threading.enumerate() == threads
