"""Where restored bytes come from: blocks named by their digest, or one file that holds header and tensors."""

import os
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from . import placing
from .blocks import Blocks
from .buffers import ByteArray, Scratch
from .errors import Cancelled, CorruptEntry
from .fs import FileSystem
from .header import PREFIX_BYTES, data_start_in
from .records import Header, slots_of
from .rooms import MARGINS
from .workers import spread
from .wyhash_many import hash_all

_PIECE_BYTES: Final = 4 << 20


class BlockSource:
    """The blocks that `targets` need. fill() may run on any thread, and uses a few of its own."""

    def __init__(self, blocks: Blocks, header: Header, targets: Sequence[Sequence[placing.Target]]) -> None:
        self._blocks = blocks
        self._targets = [target for own in targets for target in own]
        self._reads = list(placing.reads(header, targets))
        sizes = (read.size if read.whole else min(read.size, _PIECE_BYTES) for read in self._reads)
        self._largest = max(sizes, default=0)
        self._scratch = Scratch(self._largest)

    def check(self) -> None:
        """Look at the size of every block before anything is allocated. Raises CorruptEntry."""
        for read in self._reads:
            self._blocks.require(read.digest, read.size)

    def fill(self, *, verify: bool, stop: threading.Event | None = None) -> None:
        """Read every block into the targets, which are allocated by now. Raises CorruptEntry, OSError.

        Once `stop` is set it raises Cancelled, soon.
        """

        def read_one(read: placing.Read) -> None:
            _check_running(stop)
            self._read(read, verify)

        spread(self._reads, read_one, MARGINS.threads_for(self._largest))
        _blank(self._targets)

    def _read(self, read: placing.Read, verify: bool) -> None:
        rows = read.rows() if read.rows is not None and not verify else None
        if rows is not None:
            self._blocks.read_scattered(read.digest, read.size, rows)
        elif read.whole:
            data = self._scratch.take(read.size)
            self._blocks.read(read.digest, data.data, verify=verify)
            read.place(data, 0)
        else:
            self._stream(read, verify)

    def _stream(self, read: placing.Read, verify: bool) -> None:
        data = self._scratch.take(min(read.size, _PIECE_BYTES))
        at = 0
        for piece in self._blocks.stream(read.digest, read.size, data.data, verify=verify):
            read.place(data[: len(piece)], at)
            at += len(piece)


class FileSource:
    """The tensors of a v3/v4 file, open as `fd`, from which `header` was read; `path` is for errors alone.

    fill() may run on any thread, and uses a few of its own.
    """

    def __init__(
        self, fs: FileSystem, fd: int, path: str, header: Header, targets: Sequence[Sequence[placing.Target]]
    ) -> None:
        self._fs = fs
        self._fd = fd
        self._path = path
        self._header = header
        self._targets = [target for own in targets for target in own]
        self._reads = list(placing.pieces(header, targets, _PIECE_BYTES))
        self._scratch = Scratch(max((read.size for read in self._reads), default=0))
        self._stop: threading.Event | None = None
        self._start = 0
        prefix = np.empty(PREFIX_BYTES, np.uint8)
        self._read_at(0, prefix)
        self._start = data_start_in(prefix.tobytes())

    def fill(self, *, verify: bool, stop: threading.Event | None = None) -> None:
        """Read every tensor into the targets; `verify` first compares each with its hash. CorruptEntry, OSError.

        Once `stop` is set it raises Cancelled, soon.
        """
        self._stop = stop
        if verify:
            self._verify()
        spread(self._reads, self._read, MARGINS.threads)
        _blank(self._targets)

    def _read(self, read: placing.FileRead) -> None:
        data = self._scratch.take(read.size)
        self._read_at(read.offset, data)
        read.place(data, 0)

    def _read_at(self, offset: int, out: ByteArray) -> None:
        _check_running(self._stop)
        if self._fs.read_into(self._fd, out.data, self._start + offset) != len(out):
            raise CorruptEntry("the file ended early", path=self._path)

    def _verify(self) -> None:
        slots = list(slots_of(self._header))
        found = hash_all([_Stored(self, slot.off, slot.bytes) for slot in slots])
        for number, (slot, value) in enumerate(zip(slots, found, strict=True)):
            if f"{value:016x}" != slot.hash:
                raise CorruptEntry(
                    "a tensor does not have the bytes of its hash",
                    path=self._path,
                    field=f"tensor {number}",
                    expected=slot.hash,
                    found=f"{value:016x}",
                )


def _blank(targets: Sequence[placing.Target]) -> None:
    """Last: most of the pages that hold what lies beyond the live tokens have been touched by then, by all threads."""
    spread(targets, placing.Target.blank, MARGINS.threads)


def _check_running(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Cancelled("reading was cancelled")


class _Stored:
    """One tensor's bytes in the file, for hashing."""

    def __init__(self, source: FileSource, offset: int, size: int) -> None:
        self._source = source
        self._offset = offset
        self.nbytes = size

    def copy_bytes(self, start: int, out: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        self._source._read_at(self._offset + start, out)


def beside(path: str) -> str:
    """The blocks directory of a v5 file outside of a store."""
    return os.path.join(os.path.dirname(os.path.abspath(path)), "blocks")
