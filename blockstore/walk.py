"""The process that walks an index for probe: `python -m blockstore.walk DIRECTORY`.

Reads every row of every table, and every page once more for a compacted copy that goes nowhere, which also follows
LMDB's own list of free pages. Prints what the index remembers as JSON: {entry id: [used, used at, pinned]}.
"""

import json
import os
import sys

from .environment import TABLES, Environment
from .errors import BlockstoreError
from .fs import FileSystem
from .index_rows import unpack_entry


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


if __name__ == "__main__":
    try:
        print(json.dumps(walk(sys.argv[1])))
    except (BlockstoreError, OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
