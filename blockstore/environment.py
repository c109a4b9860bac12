"""The LMDB environment of one index: opened once a process and root, mapped only after its file was looked at.

LMDB's own locks are off (they hang other writers after a kill on some platforms, and fail between containers with
equal process ids); HostLock stands in for them. A page that is missing from a mapped file kills the process with
SIGBUS, so before each transaction plain reads check that the file covers what its meta pages name, and that nobody but
its own writers changed it (stamp).
"""

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, TypeVar

import lmdb

from . import mapping, probe
from .errors import NotPermitted, StoreBusy, StoreFull
from .fs import FileSystem
from .locks import Hold, HostLock
from .stamp import Broken, Stamp, State, last_transaction
from .transaction import Access, Transaction, abort

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
# Each time that an index is walked somebody else may have changed it meanwhile; more often is no coincidence.
_WALKS: Final = 5

T = TypeVar("T")


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
        self.lock = HostLock(fs, os.path.join(directory, LOCK_NAME))
        self._stamp = Stamp(fs, directory)
        self._env: lmdb.Environment | None = None
        self.tables: dict[str, Any] = {}
        self._fd: int | None = None
        self._broken = ""
        self._reserved = 0
        self._vouched: State | None = None
        self._suspect = False  # to be walked whatever the stamp says
        self._writing: lmdb.Transaction | None = None
        self._changed = False  # by whoever holds the lock
        self._fork: Hold | None = None
        self.closed = False
        self.users = 0
        _LIVE.add(self)

    def read(self) -> AbstractContextManager[Transaction]:
        """A consistent view of the index. Values are copies; keep the block short, writers wait for it."""
        return Access(self, lambda txn: txn, write=False)

    def write(self, made: Callable[[Transaction], T]) -> AbstractContextManager[T]:
        """One atomic change, through what is made of the transaction. An exception inside undoes all of it.

        Raises StoreFull, StoreBroken, StoreBusy.
        """
        if self.read_only:
            raise NotPermitted("the store is open for reading only", path=self.directory)
        return Access(self, made, write=True)

    def create(self) -> None:
        """Make the empty tables of a new index."""
        with self.lock.exclusive(), self._translated():
            self._open(create=True)

    def allow_writes(self) -> None:
        """Map anew for writing, at the next transaction."""
        with self.lock.threads():
            self._unmap()
            self.read_only = False

    def is_stale(self) -> bool:
        """True where this process can use the index no longer: it met damage, or another file took its place."""
        return bool(self._broken) or (self._fd is not None and not self._fs.same_file(self._fd, self.path))

    def renew(self) -> None:
        """Map anew what stands there now, at the next transaction; after damage it is walked before."""
        with self.lock.threads():
            self._let_go()
            self._suspect, self._broken = bool(self._broken), ""
            self._vouched, self._reserved = None, 0

    def used_bytes(self) -> int:
        return self._fs.allocated(self.path) if self._fs.exists(self.path) else 0

    def copy(self, fd: int) -> None:
        """Write a compacted copy to an open file; inside a transaction, so that nobody changes the index meanwhile."""
        assert self._env is not None, "a transaction is open"
        self._env.copyfd(fd, compact=True)

    def close(self) -> None:
        with self.lock.threads():
            self.closed = True
            self._let_go()

    def _let_go(self) -> None:
        self._unmap()
        self._stamp.close()
        self.lock.close()

    def _unmap(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
        if self._fd is not None:
            self._fs.close(self._fd)
            self._fd = None

    # ---- the steps of a transaction, for Access

    def begin(self, hold: Hold, *, write: bool) -> lmdb.Transaction:
        """Begin one under the lock, with the index mapped and known to be as its writers left it."""
        for _ in range(_WALKS):
            self._ensure_open()
            (self.lock.exclude if write else self.lock.share)(hold)
            env = self._checked()
            if env is not None and self._is_as_left():
                return self._begin_write(env) if write else env.begin()
            self.lock.leave(hold)
            if env is not None:
                self._have_it_walked()
        raise _changing(self.path)

    def _begin_write(self, env: lmdb.Environment) -> lmdb.Transaction:
        if self._writing is not None:
            abort(self._writing)  # an interruption left it, whose exception somebody keeps
        self._changed = True
        self._cover(env)
        self._writing = txn = env.begin(write=True)
        return txn

    def commit(self, txn: lmdb.Transaction) -> None:
        """Raises StoreBusy where others may have written meanwhile, since they lock another file."""
        env = self._env
        if env is None or not self.lock.stands() or env.info()["last_txnid"] + 1 != txn.id():
            hint = "Nothing was changed: try again. Never delete the files index/lock and index/lock.turn."
            raise StoreBusy("the lock of the index was deleted while it was held", path=self.path, hint=hint)
        txn.commit()

    def end(self, hold: Hold) -> None:
        """After a change, whether or not that succeeded, note what the index is like now."""
        if self._changed and self.lock.excludes(hold):
            self._note()
            self._writing, self._changed = None, False

    def _note(self) -> None:
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
        with self.lock.exclusive(), self._translated():
            if self._checked() is None:
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
        if self._suspect:
            return False
        noted = self._stamp.read()
        modified = self._fs.modified_ns(self._fd, self.path) if self._fd is not None else None
        # Most of the time nothing happened since this process looked: then its meta pages need not be read again.
        if noted is not None and noted == self._vouched and modified == noted[1]:
            return True
        found = self._state()
        if found != noted and self._stamp.is_another():
            noted = self._stamp.read()
        if noted is not None and found[0] < noted[0]:
            raise self._break("an older copy stands in the index's place", expected=noted[0], found=found[0])
        if found == noted:
            self._vouched = found
        return found == self._vouched

    def _have_it_walked(self) -> None:
        """Let another process walk the index, and vouch for it if that went well. Call without the lock."""
        with self.lock.shared():
            before = self._state()
        if probe.survey(self.directory) is None:
            raise self._break("the index is damaged")
        with self.lock.exclusive():
            if self._state() == before:
                self._suspect = False
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

    def _checked(self) -> lmdb.Environment | None:
        """The map; None where it is to be made. Raises StoreBroken where it must not be."""
        if self._broken:
            raise Broken(self._broken, path=self.path)
        if self.closed:
            raise Broken("the index was closed", path=self.path, hint="Open the store again.")
        return self._env

    def _open(self, *, create: bool) -> None:
        env = mapping.open_map(self.directory, len(TABLES), read_only=self.read_only, durable=self._durable)
        try:
            self.tables = {name: env.open_db(name.encode(), create=create) for name in TABLES}
            self._fd = self._fs.open_read(self.path)
            if not self.read_only:
                try:
                    self._cover(env)
                finally:
                    self._note()
        except BaseException:
            self._env = env
            self._unmap()
            raise
        self._env = env

    def _cover(self, env: lmdb.Environment) -> None:
        self._reserved = mapping.cover(self._fs, env, self.path, self._reserved)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.translate(error)
            raise

    def translate(self, error: BaseException) -> None:
        """Raise what an error of LMDB or of the disk means to a caller, if that is something else."""
        full = mapping.why_full(error, self._fs, self.directory)
        if full:
            raise StoreFull(full, path=self.path) from error
        if isinstance(error, lmdb.Error):
            # Going on after LMDB met a bad page can end in its own assertions, which end the process.
            raise self._break(f"the index cannot be used: {error}") from error

    def _before_fork(self) -> None:
        self._fork = Hold(self, self.lock, sys._getframe())
        with suppress(StoreBusy):  # beside a transaction that takes too long, or inside one: the child opens its own
            self.lock.exclude_threads(self._fork)

    def _after_fork_in_parent(self) -> None:
        if self._fork is not None:
            self.lock.leave(self._fork)
            self._fork = None

    def _after_fork_in_child(self) -> None:
        # The map is the parent's: closing it here would be safe, using it would not. The lock is never unlocked.
        self._env = self._writing = self._fork = None
        if self._fd is not None:
            self._fs.close(self._fd)
            self._fd = None
        self._stamp.close()
        self._stamp = Stamp(self._fs, self.directory)
        self.lock.forget()


def _changing(path: str) -> StoreBusy:
    return StoreBusy("the index is being changed by a program that leaves no stamp", path=path)


_LIVE: "weakref.WeakSet[Environment]" = weakref.WeakSet()
_SHARED: dict[str, Environment] = {}
_SHARED_LOCK = threading.RLock()
# Released, but not let go of yet: each use of _SHARED sees to that.
_RELEASED: deque[Environment] = deque()


def acquire(fs: FileSystem, directory: str, *, durable: bool, read_only: bool = False) -> Environment:
    """The process's one environment for `directory`, mapped for writing if anybody wants that; to be released."""
    path = os.path.realpath(directory)
    with _SHARED_LOCK:
        _settle()
        env = _SHARED.get(path)
        if env is None or env.closed:
            env = _SHARED[path] = Environment(fs, path, durable=durable, read_only=read_only)
        elif env.is_stale():
            env.renew()
        if env.read_only and not read_only:
            env.allow_writes()
        env.users += 1
        return env


def release(env: Environment) -> None:
    release_later(env)
    with _SHARED_LOCK:
        _settle()


def release_later(env: Environment | None) -> None:
    """Release it, if any, at the next opportunity: the garbage collector runs inside anybody's transaction."""
    if env is not None:
        _RELEASED.append(env)


def _settle() -> None:
    """Let go of what was released; of one that is in use, by a thread or by the caller itself, another time."""
    for _ in range(len(_RELEASED)):
        env = _RELEASED.popleft()
        if env.users == 1:
            try:
                env.close()
            except StoreBusy:
                _RELEASED.append(env)
                continue
            if _SHARED.get(env.directory) is env:
                del _SHARED[env.directory]
        env.users -= 1


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
