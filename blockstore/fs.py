"""The one narrow door to the file system.

Every file of a store is reached through a `FileSystem`, so that tests can stand a double in its place: one that
records, one that fails at the k-th call, one that forgets what was never synced. What differs between platforms is
decided here, by capability: a stronger fsync where the kernel offers one, the name under which locks are taken.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from typing import Final

FILE_MODE: Final = 0o600
DIR_MODE: Final = 0o700
_MOST_BUFFERS: Final = 512  # of one call; every platform takes at least so many
_FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
# O_NONBLOCK: opening a FIFO that somebody put in a file's place must not hang; regular files ignore it.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotRegular(OSError):
    """Something other than a regular file stands under a file's name (a link, a directory, a FIFO)."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "not a regular file", path)


class FileSystem:
    """Plain calls on paths and descriptors. Raises OSError as the kernel does; never follows a link in a last name."""

    def open_read(self, path: str) -> int:
        """Open a regular file for reading; the caller closes the descriptor. Raises NotRegular for anything else."""
        try:
            fd = os.open(path, _READ)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
                raise NotRegular(path) from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotRegular(path)
        return fd

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` on; how many bytes there were (fewer only at the end of the file)."""
        done = 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def read_scattered(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers one after the other from the beginning of a file; how many bytes there were."""
        done = 0
        for first in range(0, len(buffers), _MOST_BUFFERS):
            batch = buffers[first : first + _MOST_BUFFERS]
            while batch:
                count = os.preadv(fd, batch, done)
                if count == 0:
                    return done
                done += count
                batch = _behind(batch, count)
        return done

    def read_file(self, path: str, limit: int) -> bytes:
        """The file's bytes, at most `limit` of them."""
        fd = self.open_read(path)
        try:
            size = min(os.fstat(fd).st_size, limit)
            buffer = bytearray(size)
            return bytes(buffer[: self.read_into(fd, memoryview(buffer), 0)])
        finally:
            os.close(fd)

    def size_of(self, path: str) -> int | None:
        """The size of a regular file, or None where none stands there."""
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def modified_ns(self, fd: int, path: str) -> int | None:
        """When the bytes of an open file were changed last, in nanoseconds; None where `path` names it no longer."""
        status = os.fstat(fd)
        try:
            return status.st_mtime_ns if os.path.samestat(status, os.lstat(path)) else None
        except FileNotFoundError:
            return None

    def extend(self, path: str, size: int) -> None:
        """Let a file reach to `size` bytes; what is new reads as zeros. Never shortens."""
        if os.stat(path).st_size < size:
            os.truncate(path, size)

    def reserve(self, path: str, offset: int, size: int) -> bool:
        """Take space for `size` bytes of a file from `offset` on; False where there is none, or no call for it."""
        if not hasattr(os, "posix_fallocate"):
            return False
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, offset, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return False
            raise
        finally:
            os.close(fd)
        return True

    def file_system_type(self, path: str) -> str | None:
        """The kind of file system that holds `path` or its nearest existing parent; None where nobody tells."""
        while not os.path.exists(path):
            path = os.path.dirname(path) or "/"
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
                lines = [line.split() for line in mounts]
        except OSError:
            return None
        return next((line[line.index("-") + 1] for line in lines if line[2] == wanted and "-" in line), None)

    def is_directory(self, path: str) -> bool | None:
        """Whether a directory itself, no link to one, stands there; None where nothing does."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def write_new(self, path: str, parts: Sequence[bytes | memoryview], *, sync: bool = False) -> None:
        """Create `path`, which must not exist, with the bytes of `parts`. A failure leaves no file behind."""
        fd = os.open(path, _CREATE, FILE_MODE)
        try:
            for part in parts:
                self.write_all(fd, memoryview(part))
            if sync:
                self.sync_fd(fd)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        os.close(fd)

    def create(self, path: str) -> int:
        """Create `path`, which must not exist, and open it for writing; the caller closes the descriptor."""
        return os.open(path, _CREATE, FILE_MODE)

    @contextlib.contextmanager
    def replacing(self, path: str, temporary: str, *, sync: bool) -> Iterator[int]:
        """A descriptor of a new file `temporary`, which gets the name `path` when the block ends well.

        Durably if `sync`. After a failure no temporary is left.
        """
        fd = self.create(temporary)
        try:
            yield fd
            if sync:
                self.sync_fd(fd)
            self.rename(temporary, path)
        except BaseException:
            self.unlink(temporary)
            raise
        finally:
            self.close(fd)
        if sync:
            self.sync_dir(os.path.dirname(os.path.abspath(path)))

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(fd, data, offset)
            data, offset = data[count:], offset + count

    def extend_fd(self, fd: int, size: int) -> None:
        """Let a file reach to at least `size` bytes; what is new reads as zeros."""
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)

    def write_all(self, fd: int, data: memoryview) -> None:
        while data:
            data = data[os.write(fd, data) :]

    def sync_fd(self, fd: int) -> None:
        """Make a file's bytes durable, through the drive's own cache where the platform has a call for that."""
        if _FULL_SYNC is not None:
            try:
                fcntl.fcntl(fd, _FULL_SYNC)
                return
            except OSError as error:  # not every file system takes it
                if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                    raise
        os.fsync(fd)

    def begin_writing(self, path: str) -> None:
        """Let the system begin to write a file that the caller is going to sync: the disk works meanwhile. A hint."""
        from .libc import begin_writing  # the light commands, which save nothing, are not to pay for ctypes

        fd = self.open_read(path)
        try:
            begin_writing(fd)
        finally:
            os.close(fd)

    def sync_file(self, path: str) -> None:
        fd = self.open_read(path)
        try:
            self.sync_fd(fd)
        finally:
            os.close(fd)

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync_fd(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> bool:
        """Remove a name; False where it was gone already."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def discard(self, path: str, aside: str) -> bool:
        """unlink(), but a directory that stands under the name is moved to `aside`; False where nothing stood there."""
        try:
            return self.unlink(path)
        except (IsADirectoryError, PermissionError):  # macOS says EPERM
            if not os.path.isdir(path) or os.path.islink(path):
                raise
            self.set_aside(path, aside)
            return True

    def set_aside(self, path: str, aside: str) -> None:
        """Move whatever stands at `path` into the folder `aside`, under a name that nobody has."""
        self.rename(path, os.path.join(aside, f"{secrets.token_hex(4)}-{os.path.basename(path)}"))

    def make_dir(self, path: str) -> bool:
        """Create a directory; False where it stands already."""
        try:
            os.mkdir(path, DIR_MODE)
        except FileExistsError:
            return False
        return True

    def make_own_dir(self, path: str, aside: str) -> bool:
        """make_dir(), but what stands under the name and is no directory, a link to one say, is moved to `aside`."""
        if self.make_dir(path):
            return True
        if self.is_directory(path):
            return False
        with contextlib.suppress(FileNotFoundError):  # somebody else moved it, or it was a directory that has gone
            self.set_aside(path, aside)
        return self.make_dir(path)

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory; one that is gone or not empty is left alone."""
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def names(self, path: str) -> Iterator[str]:
        """The names in a directory, unsorted; none where the directory does not exist."""
        try:
            entries = os.scandir(path)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                yield entry.name

    def open_lock(self, path: str) -> int:
        """Open a lock file, creating it; one that may not be written is opened for reading, which locks as well.

        Locks belong to the descriptor, so the process's death frees them.
        """
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not os.path.exists(path):
                raise
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def is_writable(self, path: str) -> bool:
        """Whether this process may create names in a directory, or write to a file."""
        return os.access(path, os.W_OK)

    def try_lock(self, fd: int, *, exclusive: bool) -> bool:
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def close(self, fd: int) -> None:
        os.close(fd)

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)

    def same_file(self, fd: int, path: str) -> bool:
        """True while `path` still names the file that `fd` has open."""
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(path))
        except FileNotFoundError:
            return False

    def allocated(self, path: str) -> int:
        """Bytes that a file or directory takes on the disk, as du counts them; 0 where nothing stands there."""
        try:
            return os.lstat(path).st_blocks * 512
        except FileNotFoundError:
            return 0

    def tree_bytes(self, path: str) -> int:
        """Bytes on the disk of a directory and all that is in it, as du counts them; follows no link."""
        total = self.allocated(path)
        try:
            entries = list(os.scandir(path))
        except (FileNotFoundError, NotADirectoryError):
            return total
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += self.tree_bytes(entry.path)
            else:
                total += self.allocated(entry.path)
        return total

    def free_bytes(self, path: str) -> tuple[int, int]:
        """(free, total) bytes of the file system that holds `path`, or its nearest existing parent."""
        while not os.path.exists(path):
            path = os.path.dirname(path) or "/"
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def allocation_unit(self, path: str) -> int:
        return os.statvfs(path).f_frsize or 4096


def is_full(error: OSError) -> bool:
    """True where an error means that no room is left, on the disk or in the user's quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _behind(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What of the buffers is left once the first `count` bytes are filled; mostly nothing."""
    if count >= sum(map(len, buffers)):
        return []
    left = list(buffers)
    while count >= len(left[0]):
        count -= len(left.pop(0))
    left[0] = left[0][count:]
    return left
