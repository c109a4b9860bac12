"""How the file of an index is mapped, kept long enough for its map, and given space that a removal can count on."""

from typing import Final

import lmdb

from .errors import BlockstoreError
from .fs import FileSystem, is_full

_MAP_BYTES: Final = 64 << 30
_LEAST_MAP_BYTES: Final = 1 << 30
_MARGIN_BYTES: Final = 16 << 20
_LEAST_RESERVE_BYTES: Final = 256 << 10
_FULL_BELOW_BYTES: Final = 64 << 10


def open_map(directory: str, tables: int, *, read_only: bool, durable: bool) -> lmdb.Environment:
    size = _MAP_BYTES
    while True:
        try:
            return lmdb.open(
                directory,
                map_size=size,
                max_dbs=tables,
                lock=False,
                readonly=read_only,
                sync=durable,
                metasync=durable,
                mode=0o600,
                readahead=False,
            )
        except (lmdb.MemoryError, MemoryError):
            # A limited address space carries a smaller index.
            size //= 2
            if size < _LEAST_MAP_BYTES:
                raise


def cover(fs: FileSystem, env: lmdb.Environment, path: str, reserved: int) -> int:
    """Let the file reach well past its last page; up to where space is reserved, as it was up to `reserved` before.

    LMDB counts pages that it took and gave back inside one transaction, but never writes them: without the margin the
    file of a sound index can be shorter than its meta pages say. The margin is a hole and takes no space.
    """
    page_bytes = env.stat()["psize"]
    needed = (env.info()["last_pgno"] + 1) * page_bytes
    if (fs.size_of(path) or 0) < needed + _MARGIN_BYTES // 4:
        fs.extend(path, needed + _MARGIN_BYTES)
    # A removal writes to the index before it frees anything, at worst most of its pages anew: space is kept for that on
    # a full disk.
    kept = min(max(needed, _LEAST_RESERVE_BYTES), _MARGIN_BYTES)
    if reserved < needed + kept // 2 and fs.reserve(path, needed, kept):
        return needed + kept
    return reserved


def why_full(error: BaseException, fs: FileSystem, directory: str) -> str:
    """What there is no room for, where that is what an error of LMDB or of the disk means; otherwise empty."""
    if isinstance(error, lmdb.MapFullError):
        return "the index has used up its address space"
    if isinstance(error, lmdb.DiskError):
        return f"the index could not be written: {error}"
    # A commit that is cut short by a full disk is an input/output error to LMDB.
    if isinstance(error, lmdb.Error) and fs.free_bytes(directory)[0] < _FULL_BELOW_BYTES:
        return f"no space is left for the index: {error}"
    if isinstance(error, OSError) and not isinstance(error, BlockstoreError) and is_full(error):
        return "no space is left for the index"
    return ""
