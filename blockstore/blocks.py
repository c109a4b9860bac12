"""The blocks/ directory: immutable files named by the digest of their bytes.

A published name is never opened for writing. A block arrives by rename from a lease's folder, which replaces whatever
stood there; losing that race to another writer of the same bytes is success.
"""

import os
from collections.abc import Iterable, Iterator, Sequence

from .digest import HASHERS, digest, is_digest
from .errors import CorruptEntry
from .fs import FileSystem, NotRegular

_CHUNK_BYTES = 1 << 20


class Blocks:
    """Files of one directory. Digests are 32 bytes, hex only in names. What is no file goes to `aside`, if given."""

    def __init__(self, fs: FileSystem, directory: str, hash_name: str, aside: str | None = None) -> None:
        self._fs = fs
        self._aside = aside
        self.directory = directory
        self.hash_name = hash_name

    def path(self, digest_: bytes) -> str:
        return os.path.join(self.directory, digest_.hex())

    def has(self, digest_: bytes, size: int) -> bool:
        """True where a regular file of exactly `size` bytes stands under the digest."""
        return self._fs.size_of(self.path(digest_)) == size

    def require(self, digest_: bytes, size: int) -> None:
        """Raise CorruptEntry unless has(); reads nothing."""
        found = self._fs.size_of(self.path(digest_))
        if found is None:
            raise self._corrupt("a block is missing", digest_)
        if found != size:
            raise self._corrupt("a block has the wrong size", digest_, size, found)

    def read(self, digest_: bytes, buffer: memoryview, *, verify: bool) -> None:
        """Fill `buffer` with a whole block. Raises CorruptEntry (missing, other size, other bytes) or OSError."""
        fd = self._open(digest_, len(buffer))
        try:
            count = self._fs.read_into(fd, buffer, 0)
        finally:
            self._fs.close(fd)
        if count != len(buffer):
            raise self._corrupt("the block ended early", digest_, len(buffer), count)
        if verify and digest(self.hash_name, buffer) != digest_:
            raise self._corrupt("the block does not have the bytes of its name", digest_)

    def read_scattered(self, digest_: bytes, size: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, `size` bytes in all, with a whole block, unverified. Raises CorruptEntry, OSError."""
        fd = self._open(digest_, size)
        try:
            count = self._fs.read_scattered(fd, buffers)
        finally:
            self._fs.close(fd)
        if count != size:
            raise self._corrupt("the block ended early", digest_, size, count)

    def stream(self, digest_: bytes, size: int, buffer: memoryview, *, verify: bool) -> Iterator[memoryview]:
        """The block in pieces that fit `buffer`, each valid until the next. A wrong digest is raised at the end."""
        fd = self._open(digest_, size)
        hasher = HASHERS[self.hash_name]()
        try:
            for offset in range(0, size, len(buffer)):
                piece = buffer[: min(len(buffer), size - offset)]
                if self._fs.read_into(fd, piece, offset) != len(piece):
                    raise self._corrupt("the block ended early", digest_, size)
                if verify:
                    hasher.update(piece)
                yield piece
        finally:
            self._fs.close(fd)
        if verify and hasher.digest() != digest_:
            raise self._corrupt("the block does not have the bytes of its name", digest_)

    def is_whole(self, digest_: bytes, size: int) -> bool:
        """True where the file has exactly the bytes of its name; reads all of it. OSError but ENOENT passes."""
        try:
            for _ in self.stream(digest_, size, memoryview(bytearray(_CHUNK_BYTES)), verify=True):
                pass
        except CorruptEntry:
            return False
        return True

    def publish(self, source: str, digest_: bytes) -> None:
        target = self.path(digest_)
        try:
            self._fs.rename(source, target)
        except IsADirectoryError:
            if self._aside is None:
                raise
            self._fs.set_aside(target, self._aside)
            self._fs.rename(source, target)

    def unlink(self, digest_: bytes) -> bool:
        path = self.path(digest_)
        return self._fs.unlink(path) if self._aside is None else self._fs.discard(path, self._aside)

    def sync(self) -> None:
        self._fs.sync_dir(self.directory)

    def names(self) -> Iterator[bytes]:
        """The digest of every file whose name is one; what else lies there is not ours."""
        for name in self._fs.names(self.directory):
            if is_digest(name):
                yield bytes.fromhex(name)

    def missing(self, sizes: Iterable[tuple[bytes, int]]) -> list[bytes]:
        return [digest_ for digest_, size in sizes if not self.has(digest_, size)]

    def _open(self, digest_: bytes, size: int) -> int:
        path = self.path(digest_)
        try:
            fd = self._fs.open_read(path)
        except FileNotFoundError:
            raise self._corrupt("a block is missing", digest_) from None
        except NotRegular:
            raise self._corrupt("something other than a file stands in a block's place", digest_) from None
        found = self._fs.size(fd)
        if found != size:
            self._fs.close(fd)
            raise self._corrupt("a block has the wrong size", digest_, size, found)
        return fd

    def _corrupt(
        self, message: str, digest_: bytes, expected: int | None = None, found: int | None = None
    ) -> CorruptEntry:
        return CorruptEntry(message, path=self.path(digest_), digest=digest_.hex(), expected=expected, found=found)
