"""A disk that is full indeed, a quota, a folder that may not be written (CASES 10, 16, 22, 43).

The full disk is a small file system in memory, where mounting is allowed; test_faults has the doubles.
"""

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockstore import Store, StoreFull
from blockstore.fs import FileSystem
from fs_doubles import FailingAt
from kvcodecs import KVCache
from rootless import bound_by_permissions
from store_kit import all_facts, assert_clean, assert_exact, block_names, disk_bytes, lease_folders
from token_caches import IDENTITY, extend, identity, plain, small_store

DISK_BYTES = 12 << 20
CAP_BYTES = 1 << 30  # never what is in the way here


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of DISK_BYTES."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def wide(number: int, count: int = 256) -> tuple[list[int], list[Any]]:
    """Tokens and caches, 4 KiB a token, that share nothing with another number's."""
    tokens = [number] * count
    return tokens, [extend(KVCache(), tokens, dim=512)]


def fill_by_saves(store: Store) -> list[str]:
    """Save until no room is left; the ids of what was committed."""
    ids = []
    for number in range(1000):
        tokens, caches = wide(number)
        try:
            ids.append(store.save(tokens, caches, IDENTITY).entry_id)
        except StoreFull:
            return ids
    raise AssertionError("it is never full")


def take_what_is_left(folder: Path) -> Path:
    """Another program's file, to the last byte."""
    path = folder / "of another program"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(folder).f_bavail == 0
    return path


def assert_all_load(store: Store, ids: list[str]) -> None:
    for entry_id in ids:
        loaded = store.load(entry_id)
        assert all_facts(loaded.caches) == all_facts(wide(loaded.tokens[0], len(loaded.tokens))[1])


def assert_accounts(store: Store) -> None:
    """Nothing leaks: the numbers are those of the disk."""
    assert_exact(store)
    assert_clean(store)
    assert store.stats().physical_bytes == disk_bytes(store.root)


@pytest.mark.parametrize("durability", ["none", "full"])
def test_a_disk_filled_by_saves_loses_nothing_and_goes_on_after_a_removal(durability: str, disk: Path) -> None:
    with small_store(disk / "store", durability=durability, max_bytes=CAP_BYTES) as store:
        ids = fill_by_saves(store)
        assert len(ids) > 3
        assert {entry.entry_id for entry in store.entries()} == set(ids)
        assert_all_load(store, ids)
        for number in (2000, 2001):
            with pytest.raises(StoreFull):
                store.save(*wide(number, 2048), IDENTITY)
        assert_accounts(store)
        for entry_id in ids[:2]:
            store.remove(entry_id)
        assert store.gc().bytes > 0
        ids = [*ids[2:], store.save(*wide(2002), IDENTITY).entry_id]
        assert_all_load(store, ids)
        assert_accounts(store)


def test_removal_and_collection_work_where_another_program_took_the_last_byte(disk: Path) -> None:
    with small_store(disk / "store", max_bytes=CAP_BYTES) as store:
        ids = fill_by_saves(store)
        other = take_what_is_left(disk)
        assert_all_load(store, ids)
        for entry_id in ids[: len(ids) // 2]:
            store.remove(entry_id)
        assert store.gc(full=True).count("block") > 0
        assert other.stat().st_size > 0
        assert os.statvfs(disk).f_bavail > 0
        left = [*ids[len(ids) // 2 :], store.save(*wide(2000), IDENTITY).entry_id]
        assert_all_load(store, left)
        assert_accounts(store)


def test_entries_of_very_many_blocks_can_be_removed_from_a_full_disk(disk: Path) -> None:
    """Such a removal changes most pages of the index, which writes each of them anew."""
    root = disk / "store"
    with small_store(root, max_bytes=CAP_BYTES) as store:
        lists = [[number] * 2800 for number in range(3)]
        ids = [store.save(tokens, plain(tokens), IDENTITY).entry_id for tokens in lists]
        assert store.stats().blocks == 2100
    take_what_is_left(disk)
    with small_store(root) as store:
        for entry_id in ids:
            store.remove(entry_id)
        assert store.gc().count("block") == 2100
        assert store.stats().entries == 0
        assert_accounts(store)


def test_a_store_opened_on_a_full_disk_serves_and_makes_room(disk: Path) -> None:
    root = disk / "store"
    with small_store(root, max_bytes=CAP_BYTES) as store:
        ids = fill_by_saves(store)
    take_what_is_left(disk)
    with small_store(root) as store:
        assert_all_load(store, ids)
        assert store.find([*wide(0)[0], 1], IDENTITY) is not None
        for entry_id in ids[:-1]:
            store.remove(entry_id)
        store.gc()
        assert_all_load(store, ids[-1:])
        assert_accounts(store)


class Unreserved(FileSystem):
    """As where no space can be kept for a file in advance."""

    def reserve(self, path: str, offset: int, size: int) -> bool:
        return False


def test_no_room_for_the_index_is_a_full_store_and_nothing_is_lost(disk: Path) -> None:
    with small_store(disk / "store", max_bytes=CAP_BYTES, fs=Unreserved()) as store:
        ids = [store.save(*wide(number), IDENTITY).entry_id for number in range(3)]
        store.save(*wide(3), IDENTITY)
        other = take_what_is_left(disk)
        for _ in range(3):
            for number in range(3):
                with pytest.raises(StoreFull, match="no space is left"):
                    store.save(*wide(number), identity("other"))
            assert_all_load(store, ids)
        assert_clean(store)
        other.unlink()
        store.gc()
        assert_accounts(store)
        ids += [store.save(*wide(number), identity("other")).entry_id for number in range(3)]
        assert_all_load(store, ids)
        assert_accounts(store)


def test_no_room_for_a_new_store_says_so(disk: Path) -> None:
    other = take_what_is_left(disk)
    with pytest.raises(StoreFull):
        small_store(disk / "store")
    other.unlink()
    with small_store(disk / "store", max_bytes=CAP_BYTES) as store:
        store.save(*wide(1), IDENTITY)
        assert_accounts(store)


def test_a_spent_quota_is_a_full_store_at_whatever_change(tmp_path: Path) -> None:
    fs = FailingAt(errno.EDQUOT)
    with small_store(tmp_path / "store", fs=fs) as store:
        for k in range(200):
            fs.arm(k, lasting=True)
            try:
                store.save(*wide(1, 8), IDENTITY)
            except StoreFull:
                fs.disarm()
                store.gc()
                assert store.entries() == []
                assert_exact(store)
                continue
            fs.disarm()
            break
        assert k > 5
        store.gc()
        assert_exact(store)
        [entry] = store.entries()
        assert_all_load(store, [entry.entry_id])


# ---- folders and files that may not be written or read


def refused(root: Path, part: str) -> dict[str, Any]:
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*bound_by_permissions(), sys.executable, __file__, part, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=surroundings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def try_to_save(store: Store) -> dict[str, object]:
    """A save and a collection where blocks/ may not be written; loads go on."""
    [entry] = store.entries()
    found = {"save": raised(lambda: store.save(*wide(5, 8), IDENTITY))}
    found["leases"] = len(lease_folders(store))
    assert_all_load(store, [entry.entry_id])
    store.remove(entry.entry_id)
    return {**found, "gc": raised(store.gc), "blocks": len(block_names(store)), "dead": store.stats().dead_blocks}


def try_to_load(store: Store) -> dict[str, object]:
    """A load where a block may not be read: that condemns no entry."""
    [entry] = store.entries()
    found = {"load": raised(lambda: store.load(entry.entry_id))}
    found["restore"] = raised(lambda: store.restore([*wide(1, 8)[0], 2], IDENTITY))
    return {**found, "entries": len(store.entries())}


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "")
    return "nothing"


def made(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with small_store(root) as store:
        store.save(*wide(1, 8), IDENTITY)
    return root


def test_a_blocks_folder_that_may_not_be_written_undoes_a_save_and_loses_nothing(tmp_path: Path) -> None:
    root = made(tmp_path)
    (root / "blocks").chmod(0o500)
    try:
        found = refused(root, "save")
    finally:
        (root / "blocks").chmod(0o700)
    assert (found["save"], found["gc"], found["leases"]) == ("EACCES", "EACCES", 0)
    assert found["blocks"] > 0
    assert found["dead"] >= found["blocks"]
    with small_store(root) as store:
        store.gc()
        assert block_names(store) == set()
        store.save(*wide(5, 8), IDENTITY)
        assert_exact(store)
        assert_clean(store)


def test_a_block_that_may_not_be_read_fails_a_load_and_condemns_nothing(tmp_path: Path) -> None:
    root = made(tmp_path)
    blocks = list((root / "blocks").iterdir())
    for block in blocks:
        block.chmod(0)
    assert refused(root, "load") == {"load": "EACCES", "restore": "EACCES", "entries": 1}
    for block in blocks:
        block.chmod(0o600)
    with small_store(root) as store:
        assert_all_load(store, [entry.entry_id for entry in store.entries()])


if __name__ == "__main__":
    with small_store(sys.argv[2]) as opened:
        print(json.dumps({"save": try_to_save, "load": try_to_load}[sys.argv[1]](opened)))
