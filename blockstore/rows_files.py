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
from .fs import FileSystem
from .header import encode_header
from .monolith import Cancelled, new_file
from .packing import Packer, Prepared
from .rooms import MARGINS
from .sources import beside
from .workers import spread

_HASH: Final = "sha256"


def write(fs: FileSystem, path: str, prepared: Prepared, *, sync: bool, stop: threading.Event) -> int:
    """Write a v5 header to `path` and its blocks to blocks/ beside it; bytes that were written.

    Blocks that stand there with the right size are kept. Raises InvalidInput, Cancelled, OSError; a block that was
    written before a failure stays: it is whole, and named by what it holds.
    """
    blocks = Blocks(fs, beside(path), _HASH)
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
        if not blocks.has(name, len(data)):
            with new_file(fs, blocks.path(name), sync=sync, beside=os.path.dirname(blocks.directory)) as fd:
                fs.write_all(fd, data)
            written[number] = len(data)

    spread(range(len(packer)), place, MARGINS.threads)
    if sync:
        fs.sync_dir(os.path.dirname(blocks.directory))
    now_ms = time.time_ns() // 1_000_000
    header = encode_header(packer.header(digests, block_hash=None, created_at_ms=now_ms, ours=False))
    with new_file(fs, path, sync=sync) as fd:
        fs.write_all(fd, memoryview(header))
    return sum(written) + len(header)
