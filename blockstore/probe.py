"""Walks an index in a process of its own: a damaged LMDB file may kill whoever maps it.

Run as `python -m blockstore.probe DIRECTORY`; prints what repair carries over as JSON: {entry id: [used, pinned]}.
"""

import json
import os
import subprocess
import sys
from typing import Any, Final

from .environment import TABLES, Environment, check_covered
from .errors import BlockstoreError
from .fs import FileSystem
from .index_rows import unpack_entry

_PATIENCE_S: Final = 600.0


def survey(directory: str) -> dict[str, tuple[int, bool]] | None:
    """Last use and pin of every entry in the index at `directory`, or None where walking it fails or kills."""
    command = [sys.executable, "-m", "blockstore.probe", directory]
    # What this process can import, the other one must, however sys.path came about.
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False, env=surroundings)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return {entry_id: (int(used), bool(pinned)) for entry_id, (used, pinned) in found.items()}


def _walk(directory: str) -> dict[str, list[object]]:
    fs = FileSystem()
    env = Environment(fs, directory, durable=False)
    check_covered(fs, env.path)
    found: dict[str, list[object]] = {}
    with env.read() as txn:
        for table in TABLES:
            for key, value in txn.items(table):
                if table == "entries":
                    row = unpack_entry(value)
                    found[key.hex()] = [row.used, row.pinned]
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(_walk(sys.argv[1])))
    except (BlockstoreError, OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
