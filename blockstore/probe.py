"""Has an index walked by a process of its own, since a damaged LMDB file may kill whoever maps it."""

import json
import os
import subprocess
import sys
from typing import Any, Final

import msgspec

_PATIENCE_S: Final = 600.0


class Remembered(msgspec.Struct, frozen=True):
    """What only the index knows of an entry: its place in the order of uses, when that was, its pin."""

    used: int = 0
    used_at_ms: int = 0
    pinned: bool = False


def survey(directory: str) -> dict[str, Remembered] | None:
    """What the index at `directory` remembers of every entry, or None where walking it fails or kills."""
    command = [sys.executable, "-m", "blockstore.walk", directory]
    # What this process can import, the other one must, however sys.path came about.
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False, env=surroundings)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return {entry_id: Remembered(*facts) for entry_id, facts in found.items()}
