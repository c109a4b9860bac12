"""Leases: what an unfinished save holds, freed by the death of its process.

leases/<id>/lock is kernel-locked by the live owner; the folder holds the owner's temporaries. The id becomes the
entry's id: it is drawn once, never reused and never derived from contents.
"""

import contextlib
import os
import secrets
import weakref
from collections.abc import Iterator

from .fs import FileSystem, NotRegular

ID_HEX_DIGITS = 32
_LOCK = "lock"


class Lease:
    """A live lease of this process. Release it exactly once; its folder goes with it."""

    def __init__(self, fs: FileSystem, folder: str, fd: int, aside: str) -> None:
        self._fs = fs
        self._aside = aside
        self._fd: int | None = fd
        self.folder = folder
        self.id = os.path.basename(folder)
        _HELD.add(self)

    def temporary(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def release(self) -> None:
        """Remove the folder and let go of the lock, in this order: nobody else may reap a folder while it is held."""
        if self._fd is None:
            return
        try:
            self._remove_folder()
        finally:
            self._let_go()

    def __del__(self) -> None:
        # An interruption kept the save from releasing it. The folder is left to a collection: this may run anywhere.
        self._let_go()

    def _remove_folder(self) -> None:
        for name in list(self._fs.names(self.folder)):
            if name != _LOCK:
                self._fs.discard(os.path.join(self.folder, name), self._aside)
        self._fs.discard(os.path.join(self.folder, _LOCK), self._aside)
        self._fs.remove_dir(self.folder)

    def forget(self) -> None:
        """In a forked child: close the descriptor, which the parent still holds, and touch nothing."""
        self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._fs.close(fd)


class Leases:
    def __init__(self, fs: FileSystem, directory: str, aside: str) -> None:
        self._fs = fs
        self._aside = aside
        self.directory = directory

    def take(self) -> Lease:
        """A new lease under an id that nobody had before."""
        while True:
            folder = os.path.join(self.directory, secrets.token_hex(ID_HEX_DIGITS // 2))
            if self._fs.make_dir(folder):
                lease = self._lock(folder)
                if lease is not None:
                    return lease

    def ids(self) -> list[str]:
        """The leases there are. A link to a folder elsewhere is none, whatever its name."""
        names = filter(is_id, self._fs.names(self.directory))
        return [name for name in names if self._fs.is_directory(os.path.join(self.directory, name))]

    def claim_dead(self, lease_id: str) -> Lease | None:
        """The folder of a dead owner, locked by the caller; None while the owner lives. Releasing removes it.

        A folder that is gone is made again for the while, so that a row without a folder can be reaped, too. What is no
        lock in the lock's place is moved aside: nobody can hold it.
        """
        folder = os.path.join(self.directory, lease_id)
        self._fs.make_own_dir(folder, self._aside)
        lock = os.path.join(folder, _LOCK)
        if self._fs.exists(lock) and self._fs.size_of(lock) is None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.set_aside(lock, self._aside)
        return self._lock(folder)

    def has_live_owner(self, lease_id: str) -> bool:
        """True where the lease's lock is held at this moment. A look only; claim_dead decides."""
        path = os.path.join(self.directory, lease_id, _LOCK)
        try:
            fd = self._fs.open_read(path)  # creates nothing: the owner may be removing the folder right now
        except (FileNotFoundError, NotADirectoryError, NotRegular):
            return False
        try:
            return not self._fs.try_lock(fd, exclusive=True)
        finally:
            self._fs.close(fd)

    def temporaries(self, lease_id: str) -> Iterator[str]:
        folder = os.path.join(self.directory, lease_id)
        if not self._fs.is_directory(folder):
            return
        for name in self._fs.names(folder):
            yield os.path.join(folder, name)

    def _lock(self, folder: str) -> Lease | None:
        path = os.path.join(folder, _LOCK)
        try:
            fd = self._fs.open_lock(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        lease = Lease(self._fs, folder, fd, self._aside)
        # Between opening and locking a collector may have removed the folder: the lock must be the one that stands.
        if self._fs.try_lock(fd, exclusive=True) and self._fs.same_file(fd, path):
            return lease
        lease.forget()
        return None


def is_id(name: str) -> bool:
    """True for exactly 32 lower-case hex digits, the form of entry and lease ids."""
    return len(name) == ID_HEX_DIGITS and not set(name) - set("0123456789abcdef")


_HELD: "weakref.WeakSet[Lease]" = weakref.WeakSet()


def _forget_all() -> None:
    for lease in list(_HELD):
        lease.forget()


os.register_at_fork(after_in_child=_forget_all)
