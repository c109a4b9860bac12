"""What test_faults leaves: failing reads, repair, eviction, pins and looks; every error number; short reads and writes.

A passing error condemns nothing: the call raises it, and everything that was committed is still there and loads.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from blockstore import CacheMiss, CorruptEntry, Store, StoreFull, admission, check, probe
from blockstore.environment import Environment
from blockstore.fs import FileSystem
from fs_doubles import REFUSABLE, FailingAt
from store_kit import (
    all_facts,
    assert_clean,
    assert_exact,
    block_names,
    block_path,
    disk_bytes,
    flip,
    header_paths,
    repeatable,
)
from token_caches import IDENTITY, identity, plain, small_store

FIRST, SECOND = tuple(range(12)), (*range(10), 90, 91, 92)
READS = ("open_read", "read_file", "read_into", "size_of", "try_lock", "open_lock")
PASSING = [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM]
FULL = [errno.ENOSPC, errno.EDQUOT]
NEVER = 800  # no scenario makes as many calls
UNLIMITED = 1 << 40
each_passing = pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The k-th call is the same one each time; no second process walks the index, which takes most of a second."""
    with repeatable(), mock.patch.object(probe, "survey", return_value={}):
        yield


def save(store: Store, tokens: Sequence[int], **options: Any) -> str:
    return store.save(tokens, plain(tokens), IDENTITY, **options).entry_id


def assert_loads(store: Store, entry_id: str, tokens: Sequence[int]) -> None:
    assert all_facts(store.load(entry_id).caches) == all_facts(plain(tokens))


def assert_sound(store: Store) -> None:
    store.gc()
    assert_exact(store)
    assert_clean(store)
    assert store.stats().physical_bytes == disk_bytes(store.root)


# ---- reads fail

LOOKS: dict[str, Callable[[Store, str], object]] = {
    "load": lambda store, entry_id: store.load(entry_id),
    "load without digests": lambda store, entry_id: store.load(entry_id, verify=False),
    "restore": lambda store, entry_id: store.restore([*FIRST, 1], IDENTITY),
    "find": lambda store, entry_id: store.find([*FIRST, 1], IDENTITY),
    "entries": lambda store, entry_id: (store.entries(), store.entry(entry_id)),
    "stats": lambda store, entry_id: store.stats(),
    "plan": lambda store, entry_id: store.gc(dry_run=True, full=True),
    "check": lambda store, entry_id: check.check(store._layout, store._rooms, deep=True, progress=nowhere),
    "collect fully": lambda store, entry_id: store.gc(full=True),
    "pin": lambda store, entry_id: store.pin(entry_id, pinned=False),
}


def nowhere(done: int, total: int) -> None:
    pass


@pytest.mark.parametrize(
    ("look", "number"), [(look, number) for look in LOOKS for number in (PASSING if look == "load" else PASSING[:1])]
)
def test_a_read_that_fails_for_a_passing_reason_condemns_nothing(look: str, number: int, tmp_path: Path) -> None:
    fs = FailingAt(number, names=READS)
    with small_store(tmp_path / "store", fs=fs) as store:
        first, second = save(store, FIRST), save(store, SECOND)
        for k in range(NEVER):
            fs.arm(k)
            error = raised_by(lambda: LOOKS[look](store, first))
            fs.disarm()
            assert is_apt(error, number)
            assert {entry.entry_id for entry in store.entries()} == {first, second}
            if not fs.failed:
                break
        assert k > 0
        assert_loads(store, first, FIRST)
        assert_loads(store, second, SECOND)
        assert store.save(FIRST, plain(FIRST), identity("other")).blocks_written == 0, (
            "a block is not believed any more"
        )
        assert_sound(store)


def raised_by(act: Callable[[], object]) -> OSError | StoreFull | None:
    try:
        act()
    except (OSError, StoreFull) as error:
        return error
    return None


def is_apt(error: OSError | StoreFull | None, number: int) -> bool:
    """None, or what a caller is to be told of an error of that number."""
    if number in FULL:
        return error is None or isinstance(error, StoreFull) or error.errno == number
    return error is None or (isinstance(error, OSError) and error.errno == number)


@each_passing
def test_a_bad_entry_is_a_miss_even_where_it_cannot_be_judged_again(number: int, tmp_path: Path) -> None:
    """Whatever fails after the damage was met, the next load drops the entry; what shares no bad block stays."""
    fs = FailingAt(number, names=(*READS, *REFUSABLE))
    with small_store(tmp_path / "store", fs=fs) as store:
        for k in range(NEVER):
            first, other = save(store, FIRST), save(store, range(50, 60))
            flip(block_path(store, min(block_names(store) - names_of(store, other))))
            fs.arm(k)
            with pytest.raises((CorruptEntry, OSError)):
                store.load(first)
            fs.disarm()
            with pytest.raises(CacheMiss):
                store.load(first)
            assert_loads(store, other, range(50, 60))
            assert_sound(store)
            if not fs.failed:
                return
    raise AssertionError("it never got through")


def names_of(store: Store, entry_id: str) -> set[str]:
    return {name.hex() for name in store._rooms.index.digests(entry_id)}


# ---- the disk fails during what else changes it


@dataclass(frozen=True)
class Deed:
    """`act` is interrupted; then the entries are one of `leaves`."""

    act: Callable[[Store], object]
    leaves: tuple[set[tuple[int, ...]], ...]


THIRD = tuple(range(50, 62))
DEEDS = {
    "evict": Deed(lambda store: save(store, THIRD), ({FIRST, SECOND}, {SECOND}, {SECOND, THIRD})),
    "pin": Deed(lambda store: store.pin(store.entries()[0].entry_id), ({FIRST, SECOND},)),
    "use": Deed(lambda store: (store.load(store.entries()[0].entry_id), store.gc()), ({FIRST, SECOND},)),
}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_change_that_fails_leaves_nothing_behind(deed: str, number: int, tmp_path: Path) -> None:
    # An eviction is long: where its reads fail, a save's do.
    fs = FailingAt(number, names=REFUSABLE if deed == "evict" else (*REFUSABLE, *READS))
    with small_store(tmp_path / "store", fs=fs) as store, mock.patch.object(Environment, "used_bytes", return_value=0):
        for k in range(NEVER):
            begin_again(store, capped=deed == "evict")
            fs.arm(k)
            error = raised_by(lambda: DEEDS[deed].act(store))
            fs.disarm()
            assert is_apt(error, number)
            store.gc()
            assert whole_entries(store) in DEEDS[deed].leaves
            DEEDS[deed].act(store)
            assert_sound(store)
            if not fs.failed:
                assert k > 0
                return
    raise AssertionError("it never got through")


def begin_again(store: Store, *, capped: bool) -> None:
    """FIRST and SECOND, and perhaps room for two files more, which is half of what THIRD needs."""
    store.set_limits(max_bytes=UNLIMITED)
    for entry in store.entries():
        store.remove(entry.entry_id)
    store.gc()
    save(store, FIRST)
    save(store, SECOND)
    if capped:
        two_files = 2 * store._rooms.index.on_disk(1)
        store.set_limits(max_bytes=admission.used_bytes(store._rooms) + two_files)


def whole_entries(store: Store) -> set[tuple[int, ...]]:
    found = set()
    for entry in store.entries():
        loaded = store.load(entry.entry_id)
        assert all_facts(loaded.caches) == all_facts(plain(loaded.tokens))
        found.add(tuple(loaded.tokens))
    return found


@pytest.mark.parametrize("number", FULL, ids=errno.errorcode.get)
def test_a_full_disk_and_a_full_quota_are_the_same(number: int, tmp_path: Path) -> None:
    fs = FailingAt(number)
    with small_store(tmp_path / "store", fs=fs) as store:
        first = save(store, FIRST)
        for k in range(NEVER):
            fs.arm(k, lasting=True)
            error = raised_by(lambda: save(store, SECOND))
            fs.disarm()
            if not fs.failed:
                return
            assert isinstance(error, StoreFull) or error is None
            assert_loads(store, first, FIRST)
            store.gc()
            assert store.stats().physical_bytes == disk_bytes(store.root)
    raise AssertionError("it never got through")


# ---- repair fails


@pytest.mark.parametrize(
    ("number", "names"),
    [(errno.EIO, REFUSABLE), (errno.ENOSPC, REFUSABLE), (errno.EIO, READS)],
    ids=["EIO", "ENOSPC", "EIO reading"],
)
@pytest.mark.slow
def test_a_repair_that_fails_anywhere_can_be_repeated_and_loses_nothing(
    number: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    fs = FailingAt(number, names=names)
    with small_store(root, fs=fs) as store:
        layout = store._layout
    for k in range(NEVER):
        with small_store(root) as store:
            begin_again(store, capped=False)
            lost = save(store, THIRD)
            header_paths(store)[lost].write_bytes(b"no header")
        if k % 2:
            Path(root, "index", "data.mdb").write_bytes(b"no index")
        fs.arm(k)
        error = raised_by(lambda: check.repair(layout, deep=True, progress=nowhere))
        fs.disarm()
        assert is_apt(error, number)
        check.repair(layout, deep=True, progress=nowhere)
        with small_store(root) as store:
            assert whole_entries(store) == {FIRST, SECOND}
            assert_sound(store)
        if not fs.failed:
            assert k > 0
            return
    raise AssertionError("it never got through")


# ---- the kernel does part of what it was asked to


def test_reads_and_writes_that_do_less_than_was_asked_are_gone_on_with(tmp_path: Path) -> None:
    preadv, write = os.preadv, os.write
    with (
        mock.patch.object(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset)),
        mock.patch.object(os, "write", lambda fd, data: write(fd, data[:5])),
        small_store(tmp_path / "store") as store,
    ):
        first, second = save(store, FIRST), save(store, SECOND)
        assert_loads(store, first, FIRST)
        assert_loads(store, second, SECOND)
        assert_sound(store)


class Short(FileSystem):
    """The k-th read of a block after arm(k) ends early, as if the file did."""

    def __init__(self) -> None:
        self.left: int | None = None

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if self.left is not None and "/blocks/" in os.readlink(f"/proc/self/fd/{fd}"):
            self.left -= 1
            if self.left == -1:
                return super().read_into(fd, buffer[: len(buffer) // 2], offset)
        return super().read_into(fd, buffer, offset)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names of descriptors are asked of /proc")
@pytest.mark.parametrize("verify", [True, False])
def test_a_block_that_seems_to_end_early_is_a_miss_and_is_judged_again(verify: bool, tmp_path: Path) -> None:
    fs = Short()
    with small_store(tmp_path / "store", fs=fs) as store:
        first = save(store, FIRST)
        for k in range(NEVER):
            fs.left = k
            try:
                store.load(first, verify=verify)
            except CorruptEntry:
                fs.left = None
                assert_loads(store, first, FIRST)
            else:
                break
        fs.left = None
        assert k == len(block_names(store))
        assert_sound(store)
