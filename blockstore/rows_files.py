"""v5 files outside of a store: a header, and its blocks in a directory beside it, as mlx-bun writes and collects them.

Blocks are named by SHA-256 and cut by rows. mlx-bun's collector deletes what no header there names, so temporaries
stand beside the header, never in blocks/.
"""

import os
import threading
import time
from typing import Final

from .blocks import Blocks
from .digest import digest
from .errors import Cancelled, InvalidInput
from .fs import FileSystem
from .header import encode_header
from .layout import CONFIG_NAME
from .monolith import new_file
from .packing import Packer, Prepared
from .rooms import MARGINS
from .sources import beside
from .workers import spread

_HASH: Final = "sha256"
# How deep a store keeps its own headers: entries/<scope>/.
_STORE_DEPTH: Final = 3


def write(fs: FileSystem, path: str, prepared: Prepared, *, sync: bool, stop: threading.Event) -> int:
    """Write a v5 header to `path` and its blocks to blocks/ beside it; bytes that were written.

    Blocks that stand there whole are kept; each is read to see that. A block that was written before a failure stays:
    it is whole, and named by what it holds. Raises InvalidInput, Cancelled, OSError.
    """
    blocks = Blocks(fs, beside(path), _HASH)
    _check_place(fs, path, blocks.directory)
    packer = Packer(prepared)
    digests = [b""] * len(packer)
    written = [0] * len(packer)
    # A header that cannot be written is found out before any block is.
    encode_header(packer.header([bytes(32)] * len(packer), block_hash=None, created_at_ms=0, ours=False))
    fs.make_dir(blocks.directory)
    taken: set[bytes] = set()
    lock = threading.Lock()

    def place(number: int) -> None:
        if stop.is_set():
            raise Cancelled("writing was cancelled")
        data = packer.pack(number)
        digests[number] = name = digest(_HASH, data)
        with lock:  # equal blocks are one file: who comes first writes it
            if name in taken:
                return
            taken.add(name)
        # A damaged block of the right size would be believed for good, by every later file that names it.
        if not blocks.is_whole(name, len(data)):
            with new_file(fs, blocks.path(name), sync=sync, beside=os.path.dirname(blocks.directory)) as fd:
                fs.write_all(fd, data)
            written[number] = len(data)

    spread(range(len(packer)), place, MARGINS.threads_for(packer.largest))
    if sync:
        fs.sync_dir(os.path.dirname(blocks.directory))
    now_ms = time.time_ns() // 1_000_000
    header = encode_header(packer.header(digests, block_hash=None, created_at_ms=now_ms, ours=False))
    with new_file(fs, path, sync=sync) as fd:
        fs.write_all(fd, memoryview(header))
    return sum(written) + len(header)


def _check_place(fs: FileSystem, path: str, blocks: str) -> None:
    """Refuse a file without a name, a blocks directory that is a link, and the inside of a store.

    A store's collector deletes blocks that its index does not know, as mlx-bun's deletes those that no header of its
    own kind names: the two must not share a directory.
    """
    if not os.path.basename(path):
        raise InvalidInput("the path of a file is wanted", field="path", found=path)
    if os.path.islink(blocks):
        raise InvalidInput("blocks/ is a symbolic link", path=blocks, hint="Put the file where blocks/ is a directory.")
    folder = os.path.dirname(os.path.abspath(path))
    for _ in range(_STORE_DEPTH):
        if fs.exists(os.path.join(folder, CONFIG_NAME)):
            raise InvalidInput(
                "rows cannot be written into a store", path=path, found=folder, hint="Name another directory."
            )
        folder = os.path.dirname(folder)
