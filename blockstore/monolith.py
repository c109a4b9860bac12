"""v3/v4 files: header and tensors in one file, written as a stream (FORMAT 3).

The header is sized first, with placeholders of fixed width for the hashes; tensors follow one piece at a time, and the
real header goes in last. The file appears under its name only when it is whole.
"""

import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import numpy as np

from kvcodecs.entry import Slot, leaves, replace_leaves

from .buffers import ByteArray, flat_views
from .errors import Cancelled
from .fs import FileSystem
from .header import PREFIX_BYTES, data_start, encode_header
from .packing import Prepared, header_of, placed
from .records import Header
from .wyhash_many import hash_all

_CACHES_ONLY: Final = 3
_WITH_ATTACHMENTS: Final = 4
_PLACEHOLDER: Final = "0" * 16
_PIECE_ELEMENTS: Final = 1 << 20
_NAMED_CHARACTERS: Final = 32


def write(fs: FileSystem, path: str, prepared: Prepared, *, sync: bool, stop: threading.Event) -> int:
    """Write a v3 file, or v4 where there are attachments; its size in bytes. Replaces what stood at `path`.

    Memory beyond the arrays: a few MiB. Raises InvalidInput, Cancelled, OSError, and leaves nothing then.
    """
    refs, slots = zip(*placed(prepared), strict=True)
    header = _header(prepared, [msgspec.structs.replace(slot, hash=_PLACEHOLDER) for slot in slots])
    start = data_start(header.format_version, len(encode_header(header)) - PREFIX_BYTES)
    hashes = hash_all([_View(prepared.views[ref], stop) for ref in refs])
    hashed = [msgspec.structs.replace(slot, hash=f"{value:016x}") for slot, value in zip(slots, hashes, strict=True)]
    with new_file(fs, path, sync=sync) as fd:
        for ref, slot in zip(refs, slots, strict=True):
            _write_tensor(fs, fd, start + slot.off, prepared.views[ref], stop)
        fs.write_at(fd, memoryview(encode_header(_header(prepared, hashed))), 0)
        # A file of nothing but empty tensors still reaches to where they begin.
        fs.extend_fd(fd, start)
    return start + max((slot.off + slot.bytes for slot in slots if slot.bytes), default=0)


@contextmanager
def new_file(fs: FileSystem, path: str, *, sync: bool, beside: str | None = None) -> Iterator[int]:
    """A descriptor of a file that gets its name when the block ends well, durably if `sync`; otherwise none is left.

    The temporary stands in the folder `beside`, by default the file's own.
    """
    folder, name = os.path.split(os.path.abspath(path))
    # The name says whose it is, in part: it may be as long as the file system allows.
    temporary = os.path.join(beside or folder, f".{name[:_NAMED_CHARACTERS]}.{secrets.token_hex(6)}.tmp")
    with fs.replacing(path, temporary, sync=sync) as fd:
        yield fd


def _header(prepared: Prepared, slots: Sequence[Slot]) -> Header:
    remaining = iter(slots)
    new = (
        msgspec.structs.replace(entry, tensors=tuple(next(remaining) for _ in entry.tensors))
        for entry in leaves(prepared.caches)
    )
    caches = replace_leaves(prepared.caches, new)
    attachments = tuple(
        msgspec.structs.replace(one, tensors=tuple(next(remaining) for _ in one.tensors))
        for one in prepared.attachments
    )
    version = _WITH_ATTACHMENTS if attachments else _CACHES_ONLY
    return header_of(prepared, version, caches, attachments, created_at_ms=time.time_ns() // 1_000_000)


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise Cancelled("writing was cancelled")


def _write_tensor(fs: FileSystem, fd: int, offset: int, view: ByteArray, stop: threading.Event) -> None:
    """Write a tensor's C-order bytes; contiguous parts go out without a copy."""
    for start in range(0, view.size, _PIECE_ELEMENTS):
        _check(stop)
        for part in flat_views(view, start, min(start + _PIECE_ELEMENTS, view.size)):
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            fs.write_at(fd, data.data, offset)
            offset += len(data)


class _View:
    """A tensor's C-order bytes, for hashing. Pieces begin at multiples of eight bytes, so of any item."""

    def __init__(self, view: ByteArray, stop: threading.Event) -> None:
        self._view = view
        self._stop = stop
        self.nbytes = view.nbytes

    def copy_bytes(self, start: int, out: ByteArray) -> None:
        _check(self._stop)
        size = self._view.itemsize
        at = 0
        for part in flat_views(self._view, start // size, (start + len(out)) // size):
            np.copyto(out[at : at + part.nbytes].view(part.dtype).reshape(part.shape), part)
            at += part.nbytes
