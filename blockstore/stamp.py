"""Says whether the index file is as its last writer left it.

After each commit, still under the exclusive lock, the writer notes the file's transaction number and its time of
modification. Who finds them different knows that the file was changed by something else (or that a writer died in
between) and has it walked in a process of its own before mapping it: a damaged LMDB file may kill whoever maps it.
"""

import struct
import threading
from contextlib import suppress
from typing import Final

from .errors import StoreBroken
from .fs import FileSystem

SUFFIX: Final = ".stamp"
NAME: Final = "index" + SUFFIX
_MAGIC: Final = b"bsstamp1"
_FORM: Final = struct.Struct("<8sQQ")

# A page begins with 16 bytes; then the meta: magic, version, address, map size, two 48-byte tables, last page, txn id.
_META_MAGIC: Final = 0xBEEFC0DE
_META: Final = struct.Struct("<II16x I44x 48x QQ")
_PAGE_HEAD: Final = 16

State = tuple[int, int]  # transaction number; nanoseconds, compared for equality only, so that no clock matters


class Broken(StoreBroken):
    """The index file cannot be mapped as it is."""


class Stamp:
    """The file index.stamp beside the directory of an index, so that a backup of the one does not bring the other.

    The index's lock is held around it: shared to read, exclusive to write or to close.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._path = directory + SUFFIX
        self._fd: int | None = None
        self._mutex = threading.RLock()  # readers share the descriptor

    def read(self) -> State | None:
        """What the last writer noted; None where nothing readable stands there."""
        buffer = bytearray(_FORM.size)
        try:
            with self._mutex:
                count = self._fs.read_into(self._descriptor(), memoryview(buffer), 0)
        except OSError:
            return None
        if count != len(buffer):
            return None
        magic, transaction, modified = _FORM.unpack(buffer)
        return (transaction, modified) if magic == _MAGIC else None

    def write(self, state: State) -> None:
        """Note the state. Where that fails the next user walks the index: the transaction stands all the same."""
        with suppress(OSError):
            self.is_another()
            self._fs.write_at(self._descriptor(), memoryview(_FORM.pack(_MAGIC, *state)), 0)

    def is_another(self) -> bool:
        """True where another file stands there now, or none. The next call opens that, or makes one."""
        with self._mutex:
            another = self._fd is not None and not self._fs.same_file(self._fd, self._path)
            if another:
                self.close()
            return another

    def close(self) -> None:
        if self._fd is not None:
            self._fs.close(self._fd)
            self._fd = None

    def _descriptor(self) -> int:
        if self._fd is None:
            self._fd = self._fs.open_lock(self._path)
        return self._fd


def last_transaction(fs: FileSystem, fd: int, path: str) -> int:
    """The number of the last transaction in an index file, by plain reads.

    Raises StoreBroken unless the file has meta pages and covers what they name.
    """
    size = fs.size(fd)
    first = _meta_at(fs, fd, _PAGE_HEAD)
    page_bytes = first[0] if first else 0
    second = _meta_at(fs, fd, page_bytes + _PAGE_HEAD) if page_bytes else None
    if first is None or second is None or not 512 <= page_bytes <= 65536:
        raise Broken("the index has no readable meta pages", path=path, found=f"{size} bytes")
    _, last_page, transaction = max((first, second), key=lambda meta: meta[2])
    if size < (last_page + 1) * page_bytes:
        raise Broken("the index is truncated", path=path, expected=(last_page + 1) * page_bytes, found=size)
    return transaction


def _meta_at(fs: FileSystem, fd: int, offset: int) -> tuple[int, int, int] | None:
    """(page size, last page, transaction id) of the meta page whose content begins at `offset`."""
    buffer = bytearray(_META.size)
    if fs.read_into(fd, memoryview(buffer), offset) < len(buffer):
        return None
    magic, _, page_bytes, last_page, txn_id = _META.unpack(buffer)
    return (page_bytes, last_page, txn_id) if magic == _META_MAGIC else None
