"""What a check or a repair finds: problems, the report of them, and how a block is judged."""

import os
from collections.abc import Iterator
from typing import Final

import msgspec

from .layout import Layout, misplaced
from .rooms import Rooms

SEVERITIES: Final = ("damage", "unreadable", "drift", "leftover")
MISSING: Final = "it is missing"


class Problem(msgspec.Struct, frozen=True):
    """One finding.

    severity: `damage` (bytes are lost), `unreadable` (the system refused to read it: nothing is known), `drift` (the
    index is wrong), `leftover` (gc takes it).
    """

    severity: str
    what: str
    name: str
    why: str


class Report(msgspec.Struct, frozen=True):
    """What a check looked at and found; after a repair, what that did."""

    headers: int
    blocks: int
    problems: tuple[Problem, ...]
    repairs: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """True where all could be read, nothing is damaged, the index is right. Leftovers of a crash are no fault."""
        return all(problem.severity == "leftover" for problem in self.problems)


class BlockFaults:
    """What is wrong with each block that was asked for; each is looked at once. `deep` reads its bytes, too."""

    def __init__(self, rooms: Rooms, *, deep: bool) -> None:
        self._rooms = rooms
        self._deep = deep
        self._found: dict[bytes, Problem | None] = {}

    def __len__(self) -> int:
        return len(self._found)

    def of(self, digest: bytes, size: int) -> Problem | None:
        if digest not in self._found:
            self._found[digest] = self._judged(digest, size)
        return self._found[digest]

    def _judged(self, digest: bytes, size: int) -> Problem | None:
        try:
            fault = self._fault(digest, size)
        except OSError as error:
            return unread("block", digest.hex(), error)
        return Problem("damage", "block", digest.hex(), fault) if fault is not None else None

    def _fault(self, digest: bytes, size: int) -> str | None:
        blocks = self._rooms.blocks
        found = self._rooms.fs.size_of(blocks.path(digest))
        if found is None:
            return MISSING
        if found != size:
            return f"it has {found} bytes instead of {size}"
        if self._deep and not blocks.is_whole(digest, size):
            return "its bytes are not those of its name"
        return None


def unread(what: str, name: str, error: OSError) -> Problem:
    """The finding where the system refused to read something."""
    return Problem("unreadable", what, name, f"could not be read: {error.strerror or error}")


def places(layout: Layout) -> Iterator[Problem]:
    """Folders that are missing, and things in the place of a lock."""
    for path, why in misplaced(layout):
        yield Problem("damage", "place", os.path.relpath(path, layout.root), why)
