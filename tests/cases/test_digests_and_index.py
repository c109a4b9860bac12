"""Cases 42 and 43: digests that are the same everywhere, and an index that kills nobody and locks nobody out."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from blockstore import Store, StoreFull, mapping
from blockstore.digest import digest
from cases.kit import BIG, TOKENS, assert_loads, assert_served, assert_sound, python, save, surroundings
from fs_doubles import FailingAt
from store_kit import block_names, header_paths
from token_caches import IDENTITY, plain, small_store

# ---- 42

NAMES = """
import sys
from cases.kit import TOKENS, save
from store_kit import block_names, header_paths, header_paths
from token_caches import IDENTITY, small_store
with small_store(sys.argv[1]) as store:
    found = store.restore([*TOKENS, 1], IDENTITY)
    saved = save(store)
    print(*sorted(block_names(store)), *[path.parent.name for path in header_paths(store).values()])
    print(found is not None and found.token_count, saved.blocks_written)
"""


def test_case_42_processes_of_other_hash_seeds_find_what_one_of_them_has_saved(tmp_path: Path) -> None:
    """The second one shares the store of the first; this process has one of its own, and gives the same names."""
    first, second = (
        python(NAMES, tmp_path / "shared", env=surroundings(PYTHONHASHSEED=seed)).splitlines() for seed in "12"
    )
    with small_store(tmp_path / "own") as store:
        written = save(store).blocks_written
        names = " ".join([*sorted(block_names(store)), *(path.parent.name for path in header_paths(store).values())])
    assert first == [names, f"False {written}"]
    assert second == [names, f"{len(TOKENS)} 0"]


# The published digests of nothing and of "abc".
PUBLISHED = {
    ("blake3", b""): "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    ("blake3", b"abc"): "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85",
    ("sha256", b""): "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ("sha256", b"abc"): "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
}


@pytest.mark.parametrize(("name", "data"), PUBLISHED)
def test_case_42_digests_are_the_published_ones(name: str, data: bytes) -> None:
    assert digest(name, data).hex() == PUBLISHED[name, data]


@pytest.mark.parametrize("name", ["blake3", "sha256"])
def test_case_42_a_block_is_named_by_the_digest_of_exactly_its_bytes(name: str, tmp_path: Path) -> None:
    hashers: dict[str, Callable[[bytes], Any]] = {"blake3": blake3, "sha256": hashlib.sha256}
    caches = plain(TOKENS)
    with small_store(tmp_path / "store", hash=name, span=64, block_bytes=1 << 20) as store:
        store.save(TOKENS, caches, IDENTITY)
        live = [
            np.ascontiguousarray(np.array(side)[:, :, : len(TOKENS)]) for side in (caches[0].keys, caches[0].values)
        ]
        assert block_names(store) == {hashers[name](b"".join(side.tobytes() for side in live)).hexdigest()}


# ---- 43


def test_case_43_the_index_is_neither_mapped_for_writing_nor_locked_by_lmdb(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        save(store)
        env: Any = store.rooms.index.env._env
        flags = env.flags()
        assert (flags["writemap"], flags["lock"], flags["map_async"]) == (False, False, False)
    assert not (tmp_path / "store" / "index" / "lock.mdb").exists()


READERS = """
import os, signal, sys
from blockstore import Store
root, number = sys.argv[1], int(sys.argv[2])
with Store(root) as store:
    for _ in range(number):
        child = os.fork()
        if not child:
            with store.rooms.index.env.read() as txn:
                assert txn.count("entries") == 1
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    print(len(store.entries()))
"""


def test_case_43_readers_that_are_killed_in_the_middle_take_no_slots_and_block_nobody(tmp_path: Path) -> None:
    """More than the 126 that LMDB has slots for."""
    with small_store(tmp_path / "store") as store:
        save(store)
        assert python(READERS, store.root, 140) == "1\n"
        assert_served(store)
        assert_loads(store, save(store, [4, 5, 6]).entry_id, [4, 5, 6])


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
def test_case_43_an_index_that_cannot_grow_is_a_full_store_and_serves_what_it_has(
    error_number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_MARGIN_BYTES", 1 << 14)  # so that it grows with every few saves

    class NoGrowth(FailingAt):
        def extend(self, path: str, size: int) -> None:
            if self._left is not None:
                raise OSError(self.error_number, os.strerror(self.error_number), path)
            super().extend(path, size)

        def reserve(self, path: str, offset: int, size: int) -> bool:
            return False

    fs = NoGrowth(error_number)
    with small_store(tmp_path / "store", fs=fs) as store:
        saved = save(store)
        fs.arm(10**9)
        with pytest.raises(StoreFull):
            save_until_it_fails(store)
        assert_loads(store, saved.entry_id)
        fs.disarm()
        assert_sound(store)


def save_until_it_fails(store: Store) -> None:
    for n in range(200):
        save(store, [n, *BIG], f"ns-{n}")


# A file system of its own that is as full as can be, gone with the process.
FULL_DISK = """
import os, sys
from blockstore import StoreFull
from cases.kit import BIG, TOKENS, assert_loads, assert_sound, save
from token_caches import small_store
with small_store(sys.argv[1] + "/store", max_bytes=1 << 40) as store:
    first = save(store).entry_id
    committed = []
    try:
        for n in range(10_000):
            committed.append((save(store, [n, *BIG], f"ns-{n}").entry_id, [n, *BIG]))
    except StoreFull:
        pass
    with open(sys.argv[1] + "/rest", "wb", 0) as file:
        try:
            while file.write(bytes(1024)):
                pass
        except OSError:
            pass
    assert os.statvfs(sys.argv[1]).f_bavail == 0
    for entry_id, tokens in [(first, TOKENS), *committed]:
        assert_loads(store, entry_id, tokens)
    try:
        save(store, [9, *BIG])
        raise SystemExit("a save went through on a full disk")
    except StoreFull:
        pass
    for entry_id, _ in committed:
        store.remove(entry_id)
    store.gc()
    assert_loads(store, save(store, [9, *BIG]).entry_id, [9, *BIG])
    assert_sound(store)
    print(len(committed) > 3)
"""


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
    return subprocess.run(trial, check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small file system")
def test_case_43_on_a_full_disk_nobody_dies_and_everything_committed_loads(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "full.py").write_text(FULL_DISK)
    line = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$2" "$3" "$1"'
    command_line = ["unshare", "-m", "sh", "-c", line, "sh", str(tmp_path / "disk"), sys.executable]
    done = subprocess.run(
        [*command_line, str(tmp_path / "full.py")],
        check=False, capture_output=True, text=True, env=surroundings(), timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
