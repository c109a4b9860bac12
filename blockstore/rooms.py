"""What every operation on an open store works with: its directory, its index, its limits."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .blocks import Blocks
from .fs import FileSystem
from .index import Index
from .layout import HEADER_SUFFIX, Layout
from .leases import Leases, is_id


@dataclass(frozen=True)
class Margins:
    """Limits that keep a rare case from growing without bound, each with its reason."""

    # One write transaction of a collection: long enough to be cheap, short enough not to hold up a saver.
    collect_batch: int = 16
    collect_batch_s: float = 0.005
    # Savers and loaders beyond two threads gain nothing where memory or the disk is the limit.
    threads: int = min(4, max(2, os.cpu_count() or 2))
    # A restore that keeps meeting entries that do not fit gives up when a prefill would have been faster.
    restore_s: float = 10.0
    # A save that waits for another one to end, which has something to write; where that is stopped, long enough.
    turn_s: float = 60.0
    # Every thread has a buffer for one block; all of them together stay well below what a save or a load may take.
    buffers_bytes: int = 48 << 20

    def threads_for(self, largest_block: int) -> int:
        """How many threads may pack or read blocks of up to so many bytes at once."""
        return max(1, min(self.threads, self.buffers_bytes // max(largest_block, 1)))


MARGINS: Final = Margins()


class Rooms:
    """An open store's parts. Owned by Store; every function that takes it may be called from any thread."""

    def __init__(self, layout: Layout, index: Index) -> None:
        self.layout = layout
        self.index = index
        self.fs: FileSystem = layout.fs
        self.blocks: Blocks = layout.blocks
        self.leases: Leases = layout.leases
        # Entries of which a commit missed blocks that it was to take over; the next prepare is to look at everything.
        self.lost: set[str] = set()

    def unlink_header(self, header: str) -> bool:
        """Remove a header by its path relative to the root, as lease rows name it; no other file."""
        scope, name = os.path.split(os.path.relpath(header, "entries"))
        gone = self._discard_header(scope, name.removesuffix(HEADER_SUFFIX))
        self._keep_gone([scope] if gone else [])
        return gone

    def relative_header(self, scope: str, entry_id: str) -> str:
        return os.path.relpath(self.layout.header_path(scope, entry_id), self.layout.root)

    def finish_doomed(self, doomed: Iterable[tuple[str, str]]) -> int:
        """Unlink the headers of doomed entries, (id, scope), and drop their rows; how many."""
        gone = []
        scopes = set()
        for entry_id, scope in doomed:
            if self._discard_header(scope, entry_id):
                # If it was the last of its identity.
                self.fs.remove_dir(os.path.join(self.layout.entries_folder, scope))
            gone.append(entry_id)
            scopes.add(scope)
        self._keep_gone(scopes)
        if gone:
            self.index.forget_doomed(gone)
        return len(gone)

    def _keep_gone(self, scopes: Iterable[str]) -> None:
        """Make removals of headers durable before the index forgets them: what was removed must not come back."""
        for scope in scopes if self.layout.durable else ():
            try:
                self.fs.sync_dir(os.path.join(self.layout.entries_folder, scope))
            except (FileNotFoundError, NotADirectoryError):
                self.fs.sync_dir(self.layout.entries_folder)

    def _discard_header(self, scope: str, entry_id: str) -> bool:
        """Unlink a header, if it stands; False where its path leads out of the store.

        That is so where a row is damaged, or a link to somewhere else stands in a folder's place.
        """
        path = self.layout.header_path(scope, entry_id)
        if not (is_id(scope) and is_id(entry_id) and self.fs.is_directory(os.path.dirname(path))):
            return False
        self.fs.discard(path, self.layout.quarantine_folder)
        return True


class Deadline:
    """True, when called, once `seconds` have passed since it was made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() >= self._end
