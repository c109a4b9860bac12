"""The LMDB environment of one index: opened once a process and root, mapped only after its file was looked at.

LMDB's own locks are off (they hang other writers after a kill on some platforms, and fail between containers with
equal process ids); HostLock stands in for them. A page that is missing from a mapped file kills the process with
SIGBUS, so before each transaction plain reads check that the file covers what its meta pages name.
"""

import os
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, cast

import lmdb

from .errors import BlockstoreError, StoreBroken, StoreFull
from .fs import FileSystem, is_full
from .locks import HostLock

DATA_NAME: Final = "data.mdb"  # the name that LMDB gives it
LOCK_NAME: Final = "lock"
TABLES: Final = (
    "meta",
    "blocks",
    "dead",
    "entries",
    "digests",
    "tokens",
    "equal",
    "chains",
    "uses",
    "leases",
    "doomed",
)
_MAP_BYTES: Final = 64 << 30
_LEAST_MAP_BYTES: Final = 1 << 30
_MARGIN_BYTES: Final = 16 << 20
_RESERVE_BYTES: Final = 256 << 10
_FULL_BELOW_BYTES: Final = 64 << 10
_META_MAGIC: Final = 0xBEEFC0DE
# A page begins with 16 bytes; then the meta: magic, version, address, map size, two 48-byte tables, last page, txn id.
_META: Final = struct.Struct("<II16x I44x 48x QQ")
_PAGE_HEAD: Final = 16


class Broken(StoreBroken):
    """The index file cannot be mapped as it is."""


class Environment:
    """Transactions on one index directory. Safe between threads; a forked child opens its own map."""

    def __init__(self, fs: FileSystem, directory: str, *, durable: bool) -> None:
        self.directory = directory
        self.path = os.path.join(directory, DATA_NAME)
        self._fs = fs
        self._durable = durable
        self._lock = HostLock(fs, os.path.join(directory, LOCK_NAME))
        self._env: lmdb.Environment | None = None
        self._tables: dict[str, Any] = {}
        self._fd: int | None = None
        self._broken = ""
        self._reserved = 0
        self.users = 0
        _LIVE.add(self)

    @contextmanager
    def read(self) -> Iterator["Transaction"]:
        """A consistent view of the index. Values are copies; keep the block short, writers wait for it."""
        self._ensure_open()
        with self._lock.shared(), self._translated():
            env = self._checked()
            with env.begin() as txn:
                yield Transaction(txn, self._tables)

    @contextmanager
    def write(self) -> Iterator["Transaction"]:
        """One atomic change. An exception inside undoes all of it. Raises StoreFull, StoreBroken, StoreBusy."""
        self._ensure_open()
        with self._lock.exclusive(), self._translated():
            env = self._checked()
            self._cover(env)
            with env.begin(write=True) as txn:
                yield Transaction(txn, self._tables)

    def create(self) -> None:
        """Make the empty tables of a new index."""
        with self._lock.exclusive(), self._translated():
            self._open(create=True)

    def used_bytes(self) -> int:
        return self._fs.allocated(self.path) if self._fs.exists(self.path) else 0

    def close(self) -> None:
        self._lock.hold_threads()
        try:
            self._unmap()
            self._lock.close()
        finally:
            self._lock.release_threads()

    def _unmap(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
        if self._fd is not None:
            self._fs.close(self._fd)
            self._fd = None

    def _ensure_open(self) -> None:
        """Map the index if this process has not yet; alone, since LMDB opens its tables with a write transaction."""
        if self._env is not None:
            return
        with self._lock.exclusive(), self._translated():
            if self._env is None:
                if not self._fs.exists(self.path):
                    raise Broken("the index is gone", path=self.path)
                check_covered(self._fs, self.path)
                self._open(create=False)

    def _checked(self) -> lmdb.Environment:
        if self._broken:
            raise Broken(self._broken, path=self.path)
        if self._env is None or self._fd is None:
            raise Broken("the index was closed", path=self.path, hint="Open the store again.")
        if not self._fs.same_file(self._fd, self.path):
            raise Broken("the index was replaced or deleted while it was open", path=self.path)
        _check_meta(self._fs, self._fd, self.path)
        return self._env

    def _open(self, *, create: bool) -> None:
        env = self._map()
        try:
            self._tables = {name: env.open_db(name.encode(), create=create) for name in TABLES}
            self._cover(env)
            self._fd = self._fs.open_read(self.path)
        except BaseException:
            env.close()
            raise
        self._env = env

    def _map(self) -> lmdb.Environment:
        size = _MAP_BYTES
        while True:
            try:
                return lmdb.open(
                    self.directory,
                    map_size=size,
                    max_dbs=len(TABLES),
                    lock=False,
                    sync=self._durable,
                    metasync=self._durable,
                    mode=0o600,
                    readahead=False,
                )
            except (lmdb.MemoryError, MemoryError):
                # A limited address space carries a smaller index.
                size //= 2
                if size < _LEAST_MAP_BYTES:
                    raise

    def _cover(self, env: lmdb.Environment) -> None:
        """Let the file reach well past its last page.

        LMDB counts pages that it took and gave back inside one transaction, but never writes them: without the margin
        the file of a sound index can be shorter than its meta pages say. The margin is a hole and takes no space.
        """
        page_bytes = env.stat()["psize"]
        needed = (env.info()["last_pgno"] + 1) * page_bytes
        if (self._fs.size_of(self.path) or 0) < needed + _MARGIN_BYTES // 4:
            self._fs.extend(self.path, needed + _MARGIN_BYTES)
        # A removal writes to the index before it frees anything: some space is kept for it on a full disk.
        if self._reserved < needed + _RESERVE_BYTES // 2 and self._fs.reserve(self.path, needed, _RESERVE_BYTES):
            self._reserved = needed + _RESERVE_BYTES

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreFull("the index has used up its address space", path=self.path) from error
        except lmdb.DiskError as error:
            raise StoreFull(f"the index could not be written: {error}", path=self.path) from error
        except lmdb.Error as error:
            if self._fs.free_bytes(self.directory)[0] < _FULL_BELOW_BYTES:
                # A commit that is cut short by a full disk is an input/output error to LMDB.
                raise StoreFull(f"no space is left for the index: {error}", path=self.path) from error
            # Going on after LMDB met a bad page can end in its own assertions, which end the process.
            self._broken = f"the index cannot be used: {error}"
            raise Broken(self._broken, path=self.path) from error
        except OSError as error:
            if isinstance(error, BlockstoreError) or not is_full(error):
                raise
            raise StoreFull("no space is left for the index", path=self.path) from error

    def _before_fork(self) -> None:
        self._lock.hold_threads()

    def _after_fork_in_parent(self) -> None:
        self._lock.release_threads()

    def _after_fork_in_child(self) -> None:
        # The map is the parent's: closing it here would be safe, using it would not. The lock is never unlocked.
        self._env = None
        if self._fd is not None:
            self._fs.close(self._fd)
            self._fd = None
        self._lock.forget()


class Cursor(Protocol):
    """The part of an LMDB cursor that walks; keys and values are copies."""

    def set_range(self, key: bytes, /) -> bool: ...
    def next(self) -> bool: ...
    def prev(self) -> bool: ...
    def last(self) -> bool: ...
    def key(self) -> bytes: ...
    def value(self) -> bytes: ...


class Transaction:
    """Get, put and walk the named tables inside one LMDB transaction."""

    def __init__(self, txn: lmdb.Transaction, tables: dict[str, Any]) -> None:
        self._txn = txn
        self._tables = tables

    def get(self, table: str, key: bytes) -> bytes | None:
        return cast(bytes | None, self._txn.get(key, db=self._tables[table]))

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._tables[table])

    def delete(self, table: str, key: bytes) -> bool:
        return bool(self._txn.delete(key, db=self._tables[table]))

    def count(self, table: str) -> int:
        return int(self._txn.stat(self._tables[table])["entries"])

    def items(self, table: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Rows in key order from the first key ≥ `start`. Change the table only after the walk."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            if cursor.set_range(start) if start else cursor.first():
                yield from cast(Iterator[tuple[bytes, bytes]], cursor)

    def cursor(self, table: str) -> AbstractContextManager["Cursor"]:
        return cast(AbstractContextManager[Cursor], self._txn.cursor(db=self._tables[table]))


def check_covered(fs: FileSystem, path: str) -> None:
    """Raise StoreBroken unless the index file at `path` looks whole to plain reads. Maps nothing."""
    fd = fs.open_read(path)
    try:
        _check_meta(fs, fd, path)
    finally:
        fs.close(fd)


def _check_meta(fs: FileSystem, fd: int, path: str) -> None:
    size = fs.size(fd)
    first = _meta_at(fs, fd, _PAGE_HEAD)
    page_bytes = first[0] if first else 0
    second = _meta_at(fs, fd, page_bytes + _PAGE_HEAD) if page_bytes else None
    if first is None or second is None or not 512 <= page_bytes <= 65536:
        raise Broken("the index has no readable meta pages", path=path, found=f"{size} bytes")
    last_page = max((first, second), key=lambda meta: meta[2])[1]
    if size < (last_page + 1) * page_bytes:
        raise Broken("the index is truncated", path=path, expected=(last_page + 1) * page_bytes, found=size)


def _meta_at(fs: FileSystem, fd: int, offset: int) -> tuple[int, int, int] | None:
    """(page size, last page, transaction id) of the meta page whose content begins at `offset`."""
    buffer = bytearray(_META.size)
    if fs.read_into(fd, memoryview(buffer), offset) < len(buffer):
        return None
    magic, _, page_bytes, last_page, txn_id = _META.unpack(buffer)
    return (page_bytes, last_page, txn_id) if magic == _META_MAGIC else None


_LIVE: "weakref.WeakSet[Environment]" = weakref.WeakSet()
_SHARED: dict[str, Environment] = {}
_SHARED_LOCK = threading.Lock()


def acquire(fs: FileSystem, directory: str, *, durable: bool) -> Environment:
    """The process's one environment for `directory`; give it back with release()."""
    key = os.path.realpath(directory)
    with _SHARED_LOCK:
        env = _SHARED.get(key)
        if env is None:
            env = _SHARED[key] = Environment(fs, key, durable=durable)
        env.users += 1
        return env


def release(env: Environment) -> None:
    with _SHARED_LOCK:
        env.users -= 1
        if env.users == 0:
            _SHARED.pop(env.directory, None)
            env.close()


def _before_fork() -> None:
    _SHARED_LOCK.acquire()
    for env in list(_LIVE):
        env._before_fork()


def _after_fork_in_parent() -> None:
    for env in list(_LIVE):
        env._after_fork_in_parent()
    _SHARED_LOCK.release()


def _after_fork_in_child() -> None:
    for env in list(_LIVE):
        env._after_fork_in_child()
    _SHARED_LOCK.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
