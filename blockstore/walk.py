"""What the process does that walks an index for probe: main(DIRECTORY).

Reads every row of every table, and every page once more for a compacted copy that goes nowhere, which also follows
LMDB's own list of free pages. Prints what the index remembers as JSON: {entry id: [used, used at, pinned]}.
"""

import errno
import json
import os
import sys
from typing import Final

import lmdb

from .environment import TABLES, Environment
from .errors import BlockstoreError, StoreBroken
from .fs import FileSystem
from .index_rows import unpack_entry
from .probe import FOUND_BAD, MAY_NOT_READ

# What says nothing of the index: somebody else's lock, or a lack of memory, descriptors or rights. A disk's errors too.
_PASSING: Final = (lmdb.MemoryError, lmdb.LockError, lmdb.ReadonlyError, lmdb.DiskError)
_PASSING_NUMBERS: Final = (
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EIO,
)  # fmt: skip


def walk(directory: str) -> dict[str, list[object]]:
    fs = FileSystem()
    env = Environment(fs, directory, durable=False, read_only=True, trusted=True)
    found: dict[str, list[object]] = {}
    with env.read() as txn:
        for table in TABLES:
            for key, value in txn.items(table):
                if table == "entries":
                    row = unpack_entry(value)
                    found[key.hex()] = [row.used, row.used_at_ms, row.pinned]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            env.copy(nowhere)
        finally:
            os.close(nowhere)
    return found


def main(directory: str) -> int:
    """Print what walk() found; the exit code says what became of it. Why it failed goes to standard error."""
    try:
        found = walk(directory)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FOUND_BAD if _is_damage(error) else MAY_NOT_READ if isinstance(error, PermissionError) else 1
    print(json.dumps(found))
    return 0


def _is_damage(error: Exception) -> bool:
    """True where an index that can be reached cannot be read."""
    cause = error.__cause__
    if isinstance(error, BlockstoreError) and isinstance(cause, lmdb.Error):
        # LMDB gives errors that it has no class for in the system's words.
        passing = isinstance(cause, _PASSING) or any(os.strerror(number) in str(cause) for number in _PASSING_NUMBERS)
        return not passing
    if isinstance(error, BlockstoreError):
        return isinstance(error, StoreBroken)
    return not isinstance(error, (OSError, MemoryError, ImportError))
