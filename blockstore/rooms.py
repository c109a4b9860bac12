"""What every operation on an open store works with: its directory, its index, its limits."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .blocks import Blocks
from .fs import FileSystem
from .index import Index
from .layout import Layout
from .leases import Leases


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


MARGINS: Final = Margins()


class Rooms:
    """An open store's parts. Owned by Store; every function that takes it may be called from any thread."""

    def __init__(self, layout: Layout, index: Index) -> None:
        self.layout = layout
        self.index = index
        self.fs: FileSystem = layout.fs
        self.blocks: Blocks = layout.blocks
        self.leases: Leases = layout.leases

    def unlink_header(self, header: str) -> bool:
        """Remove a header by its path relative to the root, as lease rows name it."""
        return self.fs.discard(os.path.join(self.layout.root, header), self.layout.quarantine_folder)

    def relative_header(self, scope: str, entry_id: str) -> str:
        return os.path.relpath(self.layout.header_path(scope, entry_id), self.layout.root)

    def finish_doomed(self, doomed: Iterable[tuple[str, str]]) -> int:
        """Unlink the headers of doomed entries, (id, scope), and drop their rows; how many."""
        gone = []
        for entry_id, scope in doomed:
            self.fs.discard(self.layout.header_path(scope, entry_id), self.layout.quarantine_folder)
            gone.append(entry_id)
        if gone:
            self.index.forget_doomed(gone)
        return len(gone)


class Deadline:
    """True, when called, once `seconds` have passed since it was made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() >= self._end
