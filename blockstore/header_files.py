"""Reading the header of a cache file, in a store or not."""

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import CorruptEntry
from .fs import FileSystem, NotRegular
from .header import MAX_JSON_BYTES, PREFIX_BYTES, Header, decode_header, header_bytes


def read_header(fs: FileSystem, path: str) -> Header:
    """The header of any .mlxkv file; its tensors are not read. Raises CorruptEntry, UnsupportedFormat, OSError."""
    with opened(fs, path) as (_, header):
        return header


@contextmanager
def opened(fs: FileSystem, path: str) -> Iterator[tuple[int, Header]]:
    """A cache file's descriptor and its header. Raises as read_header().

    What is read through the descriptor belongs to the header, even if another file takes the name meanwhile.
    """
    with opened_file(fs, path) as fd:
        yield fd, _header_in(fs, fd, path)


@contextmanager
def opened_file(fs: FileSystem, path: str) -> Iterator[int]:
    """The descriptor of a regular file. Raises CorruptEntry where something else stands there, OSError."""
    try:
        fd = fs.open_read(path)
    except NotRegular:
        raise CorruptEntry("not a regular file", path=path) from None
    try:
        yield fd
    finally:
        fs.close(fd)


def _header_in(fs: FileSystem, fd: int, path: str) -> Header:
    size = fs.size(fd)
    prefix = _head(fs, fd, PREFIX_BYTES)
    needed = header_bytes(prefix, path=path, file_size=size)
    return decode_header(_head(fs, fd, min(needed, PREFIX_BYTES + MAX_JSON_BYTES)), path=path, file_size=size)


def _head(fs: FileSystem, fd: int, count: int) -> bytes:
    buffer = bytearray(count)
    return bytes(buffer[: fs.read_into(fd, memoryview(buffer), 0)])
