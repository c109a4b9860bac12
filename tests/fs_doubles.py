"""Doubles of the file system: one that records, one that fails at the k-th change, one that dies there.

They pass everything on to the real file system. A *change* is a call that alters the disk, or that lets go of a lock:
between two changes nothing happens that another process could see.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import lmdb

from blockstore import Store, environment
from blockstore.fs import FileSystem

CHANGES = (
    "write_new", "create", "write_at", "write_all", "extend_fd", "sync_fd", "sync_file", "sync_dir", "rename",
    "unlink", "make_dir", "remove_dir", "open_lock", "extend", "unlock",
)  # fmt: skip
# Which of those a broken or full disk refuses. What only lets go (a lock, a descriptor) cannot fail.
REFUSABLE = tuple(name for name in CHANGES if name != "unlock")
_LOOKS = ("open_read", "read_file", "read_into", "try_lock", "close", "size_of")


class Call(NamedTuple):
    """One call: its name, the path it was about ("" where only a descriptor is known), and a rename's target."""

    name: str
    path: str
    target: str = ""

    def within(self, folder: str) -> bool:
        """True where the call was about a name in the folder called `folder`, or brought one there."""
        return folder in (os.path.basename(os.path.dirname(self.path)), os.path.basename(os.path.dirname(self.target)))

    @property
    def places_block(self) -> bool:
        return self.name == "rename" and os.path.basename(os.path.dirname(self.target)) == "blocks"

    @property
    def places_header(self) -> bool:
        return self.name == "rename" and self.target.endswith(".mlxkv")


class Recording(FileSystem):
    """Keeps a list of the calls, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._paths: dict[int, str] = {}
        self._lock = threading.RLock()

    def clear(self) -> None:
        self.calls.clear()

    def named(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call.name in names]

    def about_to(self, name: str, args: Sequence[Any]) -> None:
        """Called before each call, outside of every lock."""

    def entered(self, name: str, args: Sequence[Any]) -> None:
        """Called right before each call goes on to the real file system; by one thread at a time."""
        self.calls.append(self.described(name, args))

    def described(self, name: str, args: Sequence[Any]) -> Call:
        paths = [arg if isinstance(arg, str) else self._paths.get(arg, "") for arg in args[:2] if _names_file(arg)]
        return Call(name, paths[0] if paths else "", paths[1] if name == "rename" else "")

    def passed(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Called after each call that succeeded."""
        if name in ("open_read", "open_lock", "create"):
            self._paths[result] = args[0]


def _names_file(arg: object) -> bool:
    return isinstance(arg, str) or type(arg) is int


def _hooked(name: str) -> Callable[..., Any]:
    def call(self: Recording, *args: Any, **options: Any) -> Any:
        self.about_to(name, args)
        with self._lock:
            self.entered(name, args)
        result = getattr(FileSystem, name)(self, *args, **options)
        with self._lock:
            self.passed(name, args, result)
        return result

    return call


for _name in (*CHANGES, *_LOOKS):
    setattr(Recording, _name, _hooked(_name))


class Watching(Recording):
    """Lets a test look, or interfere, right before a call. What the test itself calls is not watched."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[Call], None] | None = None

    def about_to(self, name: str, args: Sequence[Any]) -> None:
        if self.before is not None:
            look, self.before = self.before, None
            try:
                look(self.described(name, args))
            finally:
                self.before = look

    def once(self, matches: Callable[[Call], bool], act: Callable[[], object]) -> None:
        """Act right before the first call that matches."""
        done: list[Call] = []

        def look(call: Call) -> None:
            if not done and matches(call):
                done.append(call)
                act()

        self.before = look


class FailingAt(Recording):
    """Raises at the k-th change, or call of `names`, after arm(k): once, or from then on until it is disarmed."""

    def __init__(self, error_number: int = errno.EIO, names: Sequence[str] = REFUSABLE) -> None:
        super().__init__()
        self.error_number = error_number
        self._names = frozenset(names)
        self._left: int | None = None
        self._lasting = False
        self.failed = False

    def arm(self, k: int, *, lasting: bool = False) -> None:
        self._left, self._lasting, self.failed = k, lasting, False

    def disarm(self) -> None:
        self._left = None

    def entered(self, name: str, args: Sequence[Any]) -> None:
        super().entered(name, args)
        if self._left is None or name not in self._names:
            return
        self._left -= 1
        if self._left < 0 and (self._lasting or not self.failed):
            self.failed = True
            raise OSError(self.error_number, os.strerror(self.error_number), self.calls[-1].path)


class Killed(BaseException):
    """What stands for SIGKILL: no handler of ours may catch it and go on."""


class Crash(Recording):
    """Dies at the k-th change after arm(k): that call and every later one raises, as if the process were gone.

    A new file is left half written. bury() then does what the kernel does: descriptors are closed, locks are free.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left: int | None = None
        self._held: set[int] = set()  # descriptors: locks, and files being written
        self.dead = False

    def arm(self, k: int) -> None:
        self._left = k

    def disarm(self) -> None:
        self._left = None

    def entered(self, name: str, args: Sequence[Any]) -> None:
        super().entered(name, args)
        if self.dead:
            if name == "close" and args[0] not in self._held:
                os.close(args[0])  # of a file that was only read; the others stay open until all threads are gone
            raise Killed
        if self._left is None or name not in CHANGES:
            return
        self._left -= 1
        if self._left < 0:
            self.dead = True
            if name == "write_new":
                _write_half(args[0], args[1])
            raise Killed

    def passed(self, name: str, args: Sequence[Any], result: Any) -> None:
        super().passed(name, args, result)
        if name in ("open_lock", "create"):
            self._held.add(result)
        elif name == "close":
            self._held.discard(args[0])

    def bury(self, store: Store | None = None) -> None:
        """Let go of everything that the dead process held, of its store too; that object is of no use any more."""
        if store is not None:
            env, store._lock_fd = store._env, None
            if environment._SHARED.get(env.directory) is env:
                del environment._SHARED[env.directory]
            if env._env is not None:
                env._env.close()
            if env._fd is not None:
                self._held.add(env._fd)
        else:
            self.dead, self._left = False, None
        for fd in self._held:
            with contextlib.suppress(OSError):  # the last thread may have got as far as closing it
                os.close(fd)
        self._held.clear()


def _write_half(path: str, parts: Iterable[bytes | memoryview]) -> None:
    data = b"".join(parts)
    with open(path, "xb") as file:
        file.write(data[: len(data) // 2])


@contextlib.contextmanager
def separate_environments() -> Iterator[None]:
    """Each store that is opened inside has an environment of its own, as each process has.

    Only the LMDB handle is shared, since a process may map an index but once.
    """
    with contextlib.ExitStack() as stack:
        open_one, handles, acquire = lmdb.open, dict[str, lmdb.Environment](), environment.acquire

        def open_shared(directory: str, **options: Any) -> Any:
            if directory not in handles:
                handles[directory] = open_one(directory, **options)
                stack.callback(handles[directory].close)
            return _Handle(handles[directory])

        def acquire_own(*args: Any, **options: Any) -> environment.Environment:
            with mock.patch.object(environment, "_SHARED", {}):
                return acquire(*args, **options)

        stack.enter_context(mock.patch.object(lmdb, "open", open_shared))
        stack.enter_context(mock.patch.object(environment, "acquire", acquire_own))
        yield


class _Handle:
    """A process's view of an LMDB handle: closing it leaves it to the others."""

    def __init__(self, real: lmdb.Environment) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def close(self) -> None:
        pass
