"""Has an index walked by a process of its own, since a damaged LMDB file may kill whoever maps it."""

import json
import os
import signal
import subprocess
import sys
from typing import Any, Final

import msgspec

from .errors import NotPermitted, StoreBusy

# How the other process ends that could look. Every other end says nothing of the index.
FOUND_BAD: Final = 86
MAY_NOT_READ: Final = 87
# What a damaged map does to whoever reads it, and what LMDB's own assertions do.
_DEADLY: Final = frozenset(
    -number for number in (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
)
_PATIENCE_S: Final = 600.0
_NEEDED: Final = ("blockstore", "lmdb", "msgspec", "blake3")
_PROGRAM: Final = """
import sys, json
sys.path[:] = json.loads(sys.argv[1])
from blockstore.walk import main
sys.exit(main(sys.argv[2]))
"""
_HINT: Final = "Nothing is known of the index, and nothing was done to it: try again."


class Remembered(msgspec.Struct, frozen=True):
    """What only the index knows of an entry: its place in the order of uses, when that was, its pin."""

    used: int = 0
    used_at_ms: int = 0
    pinned: bool = False


def survey(directory: str) -> dict[str, Remembered] | None:
    """What the index at `directory` remembers of every entry, or None where walking it finds damage, or kills.

    Raises StoreBusy where nobody could look (the process was ended, say, or has no memory), NotPermitted where this
    user may not.
    """
    # -P, and a path of its own: whatever lies in the working directory is never imported.
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(_import_path()), directory]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S, check=False,
            start_new_session=True,  # an interruption from the terminal is not meant for it
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unknown(directory, str(error)) from error
    if done.returncode == FOUND_BAD or done.returncode in _DEADLY:
        return None
    said = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    if done.returncode == MAY_NOT_READ:
        hint = "Ask the owner of the directory for the right to read there."
        raise NotPermitted("the index may not be read", path=directory, found=said, hint=hint)
    if done.returncode != 0:
        raise _unknown(directory, said or _ended_by(done.returncode))
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise _unknown(directory, "the process that walks it ended early") from error
    return {entry_id: Remembered(*facts) for entry_id, facts in found.items()}


def _import_path() -> list[str]:
    """Where the other process finds what this one has imported: not in the working directory of the moment."""
    known = [entry for entry in sys.path if os.path.isabs(entry)]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _NEEDED]
    homes = [os.path.dirname(os.path.dirname(os.path.abspath(file))) for file in files if file]
    return [*known, *(home for home in homes if home not in known)]


def _ended_by(code: int) -> str:
    return f"signal {-code} ended the process that walks it" if code < 0 else f"exit code {code}"


def _unknown(directory: str, why: str) -> StoreBusy:
    return StoreBusy("the index could not be looked at", path=directory, found=why, hint=_HINT)
