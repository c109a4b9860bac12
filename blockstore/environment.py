"""The LMDB environment of one index: opened once a process and root, mapped only after its file was looked at.

LMDB's own locks are off (they hang other writers after a kill on some platforms, and fail between containers with
equal process ids); HostLock stands in for them. A page that is missing from a mapped file kills the process with
SIGBUS, so before each transaction plain reads check that the file covers what its meta pages name, and that nobody but
its own writers changed it (stamp).
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import lmdb

from . import probe
from .errors import BlockstoreError, NotPermitted, StoreBusy, StoreFull
from .fs import FileSystem, is_full
from .locks import HostLock
from .stamp import Broken, Stamp, State, last_transaction
from .transaction import Transaction

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
    "shares",
)
_MAP_BYTES: Final = 64 << 30
_LEAST_MAP_BYTES: Final = 1 << 30
_MARGIN_BYTES: Final = 16 << 20
_LEAST_RESERVE_BYTES: Final = 256 << 10
_FULL_BELOW_BYTES: Final = 64 << 10
# Each time that an index is walked somebody else may have changed it meanwhile; more often is no coincidence.
_WALKS: Final = 5


class Environment:
    """Transactions on one index directory. Safe between threads; a forked child opens its own map.

    read_only: map for reading, write nothing. trusted: map whatever stands there, for the process that walks it.
    """

    def __init__(
        self, fs: FileSystem, directory: str, *, durable: bool, read_only: bool = False, trusted: bool = False
    ) -> None:
        self.directory = directory
        self.path = os.path.join(directory, DATA_NAME)
        self.read_only = read_only
        self._fs = fs
        self._durable = durable
        self._trusted = trusted
        self._lock = HostLock(fs, os.path.join(directory, LOCK_NAME))
        self._stamp = Stamp(fs, directory)
        self._env: lmdb.Environment | None = None
        self._tables: dict[str, Any] = {}
        self._fd: int | None = None
        self._broken = ""
        self._reserved = 0
        self._vouched: State | None = None
        self.users = 0
        _LIVE.add(self)

    @contextmanager
    def read(self) -> Iterator["Transaction"]:
        """A consistent view of the index. Values are copies; keep the block short, writers wait for it."""
        with self._entered(self._lock.shared) as env, env.begin() as txn:
            yield Transaction(txn, self._tables)

    @contextmanager
    def write(self) -> Iterator["Transaction"]:
        """One atomic change. An exception inside undoes all of it. Raises StoreFull, StoreBroken, StoreBusy."""
        if self.read_only:
            raise NotPermitted("the store is open for reading only", path=self.directory)
        with self._entered(self._lock.exclusive) as env, self._stamped():
            self._cover(env)
            with env.begin(write=True) as txn:
                yield Transaction(txn, self._tables)

    def create(self) -> None:
        """Make the empty tables of a new index."""
        with self._lock.exclusive(), self._translated():
            self._open(create=True)

    def allow_writes(self) -> None:
        """Map anew for writing, at the next transaction."""
        self._lock.hold_threads()
        try:
            self._unmap()
            self.read_only = False
        finally:
            self._lock.release_threads()

    def used_bytes(self) -> int:
        return self._fs.allocated(self.path) if self._fs.exists(self.path) else 0

    def copy(self, fd: int) -> None:
        """Write a compacted copy to an open file; inside a transaction, so that nobody changes the index meanwhile."""
        assert self._env is not None, "a transaction is open"
        self._env.copyfd(fd, compact=True)

    def close(self) -> None:
        self._lock.hold_threads()
        try:
            self._unmap()
            self._stamp.close()
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

    @contextmanager
    def _entered(self, lock: Callable[[], AbstractContextManager[None]]) -> Iterator[lmdb.Environment]:
        """Hold the lock, with the index mapped and known to be as its writers left it."""
        for _ in range(_WALKS):
            self._ensure_open()
            with lock(), self._translated():
                env = self._checked()
                sound = self._is_as_left()
                if sound:
                    yield env
            if sound:
                return
            self._have_it_walked()
        raise _changing(self.path)

    @contextmanager
    def _stamped(self) -> Iterator[None]:
        """Note what the index is like after the change inside, whether or not that succeeded."""
        try:
            yield
        finally:
            if self._fs.exists(self.path):
                self._vouch(self._state())

    def _ensure_open(self) -> None:
        for _ in range(_WALKS):
            if self._env is not None or self._try_open():
                return
            self._have_it_walked()
        raise _changing(self.path)

    def _try_open(self) -> bool:
        """Map the index, alone, since LMDB opens its tables with a write transaction; False where it must be walked."""
        with self._lock.exclusive(), self._translated():
            if self._env is None:
                if self._broken:
                    raise Broken(self._broken, path=self.path)
                if self._fs.size_of(self.path) is None:
                    raise Broken("the index is gone, or something else stands in its place", path=self.path)
                if not self._is_as_left():
                    return False
                self._open(create=False)
        return True

    def _is_as_left(self) -> bool:
        """True where the index is as its last writer left it, or as it was walked. Call with the lock held."""
        if self._trusted:
            return self._state() is not None
        noted = self._stamp.read()
        modified = self._fs.modified_ns(self._fd, self.path) if self._fd is not None else None
        # Most of the time nothing happened since this process looked: then its meta pages need not be read again.
        if noted is not None and noted == self._vouched and modified == noted[1]:
            return True
        found = self._state()
        if noted is not None and found[0] < noted[0]:
            raise self._break("an older copy stands in the index's place", expected=noted[0], found=found[0])
        if found == noted:
            self._vouched = found
        return found == self._vouched

    def _have_it_walked(self) -> None:
        """Let another process walk the index, and vouch for it if that went well. Call without the lock."""
        with self._lock.shared():
            before = self._state()
        if probe.survey(self.directory) is None:
            raise self._break("the index is damaged")
        with self._lock.exclusive():
            if self._state() == before:
                self._stamp.close()  # it may have been deleted, and must be where the others look
                self._vouch(before)

    def _vouch(self, state: State) -> None:
        """Remember that the index is sound in this state; tell others, too, where that is possible."""
        self._vouched = state
        if not self.read_only:
            self._stamp.write(state)

    def _state(self) -> State:
        """The index file as it is. Raises StoreBroken where that is not the mapped one, or looks damaged."""
        fd = self._fs.open_read(self.path) if self._fd is None else self._fd
        try:
            modified = self._fs.modified_ns(fd, self.path)
            if modified is None:
                raise Broken("the index was replaced or deleted while it was open", path=self.path)
            return last_transaction(self._fs, fd, self.path), modified
        finally:
            if fd != self._fd:
                self._fs.close(fd)

    def _break(self, message: str, **facts: Any) -> Broken:
        """The error for an index that must not be used again."""
        self._broken = message
        return Broken(message, path=self.path, **facts)

    def _checked(self) -> lmdb.Environment:
        if self._broken:
            raise Broken(self._broken, path=self.path)
        if self._env is None or self._fd is None:
            raise Broken("the index was closed", path=self.path, hint="Open the store again.")
        return self._env

    def _open(self, *, create: bool) -> None:
        env = self._map()
        try:
            self._tables = {name: env.open_db(name.encode(), create=create) for name in TABLES}
            self._fd = self._fs.open_read(self.path)
            if not self.read_only:
                with self._stamped():
                    self._cover(env)
        except BaseException:
            self._env = env
            self._unmap()
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
                    readonly=self.read_only,
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
        # A removal writes to the index before it frees anything, at worst most of its pages anew: space is kept for
        # that on a full disk.
        kept = min(max(needed, _LEAST_RESERVE_BYTES), _MARGIN_BYTES)
        if self._reserved < needed + kept // 2 and self._fs.reserve(self.path, needed, kept):
            self._reserved = needed + kept

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
            raise self._break(f"the index cannot be used: {error}") from error
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
        self._stamp.close()
        self._lock.forget()


def _changing(path: str) -> StoreBusy:
    return StoreBusy("the index is being changed by a program that leaves no stamp", path=path)


_LIVE: "weakref.WeakSet[Environment]" = weakref.WeakSet()
_SHARED: dict[str, Environment] = {}
_SHARED_LOCK = threading.Lock()


def acquire(fs: FileSystem, directory: str, *, durable: bool, read_only: bool = False) -> Environment:
    """The process's one environment for `directory`, mapped for writing if anybody wants that; to be released."""
    path = os.path.realpath(directory)
    with _SHARED_LOCK:
        env = _SHARED.get(path)
        if env is None:
            env = _SHARED[path] = Environment(fs, path, durable=durable, read_only=read_only)
        elif env.read_only and not read_only:
            env.allow_writes()
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
