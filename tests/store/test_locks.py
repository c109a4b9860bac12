"""Lock files and stamps that are deleted while they are used, stores that are dropped, and what is no file in a lock's
place."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import lmdb
import pytest

from blockstore import StoreBroken, StoreBusy, check, environment, probe, stamp
from blockstore.fs import FileSystem
from blockstore.locks import HostLock
from store_kit import all_facts, assert_clean, assert_exact
from token_caches import IDENTITY, plain, small_store

TOKENS = list(range(20))


# ---- lock files that are deleted


def delete_locks(root: Path) -> None:
    for path in (root / "index").glob("lock*"):
        path.unlink()


def test_after_the_lock_files_were_deleted_all_lock_the_new_ones(tmp_path: Path, impatient: None) -> None:
    path = str(tmp_path / "lock")
    mine, other = HostLock(FileSystem(), path), HostLock(FileSystem(), path)
    with mine.shared():
        pass
    for use in (HostLock.shared, HostLock.exclusive):
        for name in ("lock", "lock.turn"):
            (tmp_path / name).unlink()
        with other.exclusive(), pytest.raises(StoreBusy), use(mine):
            pass
    with other.shared(), mine.shared():
        pass
    mine.close()
    other.close()


def share(lock: HostLock) -> None:
    with lock.shared():
        pass


def test_nobody_joins_a_reader_whose_lock_file_was_deleted(tmp_path: Path, impatient: None) -> None:
    mine, other = HostLock(FileSystem(), str(tmp_path / "lock")), HostLock(FileSystem(), str(tmp_path / "lock"))
    with ThreadPoolExecutor(1) as pool:
        with mine.shared():
            (tmp_path / "lock").unlink()
            with other.exclusive(), pytest.raises(StoreBusy):
                pool.submit(share, mine).result()
        pool.submit(share, mine).result()
    mine.close()
    other.close()


def test_a_transaction_whose_lock_file_was_deleted_commits_nothing(root: Path) -> None:
    with small_store(root) as store:
        [entry] = store.entries()

        def doom() -> None:
            with store.rooms.index.write() as books:
                delete_locks(root)
                books.doom(entry.entry_id)

        with pytest.raises(StoreBusy, match="deleted"):
            doom()
        assert store.entries() == [entry]
        store.remove(entry.entry_id)
        store.gc()
        assert_exact(store)
        assert_clean(store)


SAVE = """
import sys
from token_caches import IDENTITY, plain, small_store
with small_store(sys.argv[1]) as store:
    store.save([5, 6, 7], plain([5, 6, 7]), IDENTITY)
    print(len(store.entries()))
"""


def save_elsewhere(root: Path) -> int:
    """Save in another process; how many entries there are then."""
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(root)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=surroundings,
    )
    return int(done.stdout)


def test_a_transaction_beside_which_another_process_wrote_commits_nothing(root: Path) -> None:
    """The lock file is gone for a while: who looks only at its name sees nothing of it."""
    lock = root / "index" / "lock"
    with small_store(root) as store:
        [entry] = store.entries()

        def doom() -> None:
            with store.rooms.index.write() as books:
                lock.rename(root / "index" / "kept")
                (root / "index" / "lock.turn").unlink()
                assert save_elsewhere(root) == 2
                (root / "index" / "kept").rename(lock)
                books.doom(entry.entry_id)

        with pytest.raises(StoreBusy):
            doom()
        assert len(store.entries()) == 2
        assert_exact(store)
        assert_clean(store)


# ---- a stamp that is deleted


def test_a_stamp_that_was_deleted_is_made_again_by_the_next_writer(root: Path) -> None:
    with small_store(root) as store:
        store.entries()
        (root / stamp.NAME).unlink()
        store.save([5, 6, 7], plain([5, 6, 7]), IDENTITY)
        noted = stamp.Stamp(FileSystem(), str(root / "index"))
        assert noted.read() == store.rooms.index.env._state()
        noted.close()


def test_a_reader_follows_a_stamp_that_was_deleted_and_made_again(root: Path) -> None:
    with small_store(root) as store, mock.patch.object(probe, "survey", return_value={}) as survey:
        assert len(store.entries()) == 1
        (root / stamp.NAME).unlink()
        assert save_elsewhere(root) == 2
        for _ in range(3):
            assert len(store.entries()) == 2
        assert survey.call_count == 0


# ---- stores that are dropped, and what a repair replaced


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_store_that_was_dropped_gives_back_what_it_had_when_the_next_is_opened(tmp_path: Path) -> None:
    small_store(tmp_path / "0").close()
    before = open_files()
    for number in range(5):
        dropped = small_store(tmp_path / str(number))
        assert dropped.find([1, 2], IDENTITY) is None
        del dropped
    small_store(tmp_path / "0").close()
    assert open_files() == before
    assert environment._SHARED == {}


def test_a_store_can_be_dropped_inside_a_transaction_on_the_same_index(root: Path) -> None:
    dropped = small_store(root)
    with small_store(root) as store:
        with store.rooms.index.write():
            del dropped
        assert len(store.entries()) == 1
        small_store(root).close()
        assert len(store.entries()) == 1


def test_a_process_whose_broken_index_was_repaired_opens_it_though_it_closed_nothing(root: Path) -> None:
    store = small_store(root)
    layout = store._layout
    assert len(store.entries()) == 1
    os.truncate(root / "index" / "data.mdb", 8192)
    with pytest.raises(StoreBroken):
        store.entries()
    del store
    check.repair(layout, deep=True, progress=lambda done, total: None)
    with small_store(root) as store:
        [entry] = store.entries()
        assert all_facts(store.load(entry.entry_id).caches) == all_facts(plain(TOKENS))


@pytest.mark.parametrize("how", ["a bad page", "replaced"])
def test_who_opens_the_store_again_gets_a_map_that_works_and_so_does_who_had_it_open(root: Path, how: str) -> None:
    data = root / "index" / "data.mdb"
    with small_store(root) as store:
        entries = store.entries()
        if how == "replaced":
            data.with_name("new").write_bytes(data.read_bytes())
            data.with_name("new").rename(data)
        else:
            with pytest.raises(StoreBroken), store.rooms.index.env.read():
                raise lmdb.CorruptedError("a bad page")
        with pytest.raises(StoreBroken):
            store.entries()
        with mock.patch.object(probe, "survey", side_effect=probe.survey) as survey, small_store(root) as again:
            assert again.entries() == store.entries() == entries
            assert survey.call_count == 1, "what was met there may be met again, and end the process"
        store.save([5, 6, 7], plain([5, 6, 7]), IDENTITY)
        assert_clean(store)


# ---- what is no file


@pytest.mark.parametrize("what", ["directory", "link", "fifo"])
@pytest.mark.parametrize("name", ["lock", "lock.turn"])
def test_what_is_no_file_in_a_locks_place_is_a_broken_store_with_a_hint(tmp_path: Path, name: str, what: str) -> None:
    place, lock = tmp_path / name, HostLock(FileSystem(), str(tmp_path / "lock"))
    if what == "directory":
        place.mkdir()
    elif what == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(place)
    for use in (lock.shared, lock.exclusive):
        with pytest.raises(StoreBroken, match="check --repair"), use():
            pass
    lock.close()
    assert not (tmp_path / "elsewhere").exists()
