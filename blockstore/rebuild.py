"""check --repair: the index is rebuilt from the headers, beside the old one, and takes its place in one step.

Whatever kills it, and wherever: the old index or the new one stands, whole, and the next repair has from it what only
an index knows (pins, the order of uses).
"""

import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from . import entries, environment, full_mark, probe
from .errors import CacheMiss, StoreBroken
from .findings import MISSING, BlockFaults, Problem, Report, unread
from .fs import FileSystem
from .index import Index, now_ms
from .layout import HEADER_SUFFIX, Layout, is_something_else
from .rooms import Rooms
from .stamp import SUFFIX, Broken, Stamp, last_transaction

Progress = Callable[[int, int], None]
Carried = Mapping[str, probe.Remembered]
BUILDING: Final = ".new"  # behind the name of the index's folder
_WHOLE: Final = "whole"  # stands beside a new index that is finished
_SET_ASIDE: Final = re.compile(rf"[0-9a-f]{{8}}-([0-9a-f]{{32}}){re.escape(HEADER_SUFFIX)}")


class Rebuild:
    """One repair of a store that nobody has open."""

    def __init__(self, layout: Layout, *, deep: bool, progress: Progress) -> None:
        self.layout = layout
        self.fs: FileSystem = layout.fs
        self.deep = deep
        self.progress = progress
        self.repairs: list[str] = []
        self.problems: list[Problem] = []
        self._building = layout.index_folder + BUILDING
        self._may_sweep = True
        self._older = False  # the index is one that was put back: what it misses may have been removed since
        self._reported: set[str] = set()  # blocks

    def run(self) -> Report:
        self._mend_places()
        self._older = self._is_older_copy()
        carried = self._carried()
        headers, blocks = self._build(carried or {})
        self._prepare_place(sound=carried is not None)
        self._put_in_place()
        return Report(headers, blocks, tuple(self.problems), tuple(self.repairs))

    # ---- before

    def _mend_places(self) -> None:
        for path in self.layout.folders:
            if self.fs.make_dir(path):
                self.repairs.append(f"folder {os.path.basename(path)}: it was missing; made")
        for path in self.layout.lock_paths:
            self.repairs += mend_lock(self.layout, path)

    def _carried(self) -> Carried | None:
        """What is remembered of every entry; None where no index can be read any more."""
        carried = self._surveyed(self.layout.index_folder)
        if carried is None and self.fs.exists(os.path.join(self._building, _WHOLE)):
            carried = self._surveyed(self._building)
            if carried is not None:
                self._set_damaged_aside()
                self._put_in_place()
                self._older = False
                self.repairs.append("index: taken from a repair that was cut short")
        return carried

    def _is_older_copy(self) -> bool:
        """Whether the index has fewer transactions than its last writer noted."""
        if self.fs.size_of(self.layout.data_path) is None:
            return False
        stamp, fd = Stamp(self.fs, self.layout.index_folder), self.fs.open_read(self.layout.data_path)
        try:
            noted = stamp.read()
            return noted is not None and last_transaction(self.fs, fd, self.layout.data_path) < noted[0]
        except Broken:
            return False
        finally:
            stamp.close()
            self.fs.close(fd)

    def _surveyed(self, folder: str) -> Carried | None:
        stands = self.fs.size_of(os.path.join(folder, environment.DATA_NAME)) is not None
        return probe.survey(folder) if stands else None

    # ---- the new index

    def _build(self, carried: Carried) -> tuple[int, int]:
        """Make the new index beside the old one, which stays as it is until that is whole; what was looked at."""
        self._clear_building()
        self.fs.make_dir(self._building)
        try:
            counts = self._fill(carried)
        except Exception:
            with suppress(OSError):
                self._clear_building()  # on a full disk it takes what is left
            raise
        self.fs.write_new(os.path.join(self._building, _WHOLE), [], sync=self.layout.durable)
        return counts

    def _fill(self, carried: Carried) -> tuple[int, int]:
        env = environment.acquire(self.fs, self._building, durable=self.layout.durable)
        try:
            env.create()
            rooms = Rooms(self.layout, Index(env, self.fs.allocation_unit(self.layout.root)))
            rooms.index.set_limits(msgspec.structs.asdict(self.layout.config.limits))
            counts = self._enter_all(rooms, carried)
            self._clear_leases(rooms)
            self._sweep(rooms)
            rooms.finish_doomed(rooms.index.doomed())
        finally:
            environment.release(env)
        return counts

    def _clear_building(self) -> None:
        """Take away what is left of a new index, of an earlier attempt too."""
        if self.fs.is_directory(self._building) is False:
            self.fs.set_aside(self._building, self.layout.quarantine_folder)
        for name in list(self.fs.names(self._building)):
            self.fs.discard(os.path.join(self._building, name), self.layout.quarantine_folder)
        self.fs.remove_dir(self._building)
        self.fs.discard(self._building + SUFFIX, self.layout.quarantine_folder)

    def _enter_all(self, rooms: Rooms, carried: Carried) -> tuple[int, int]:
        """Enter every whole header, the least recently used first; how many headers and blocks were looked at."""
        found: list[tuple[tuple[int, int], str, entries.Implied]] = []
        standing, faults = list(entries.files(rooms)), BlockFaults(rooms, deep=self.deep)
        # Whatever uses an entry whose last use is lost, it must not seem unused since it was saved.
        unknown = probe.Remembered(used_at_ms=now_ms())
        for number, (entry_id, scope) in enumerate(standing):
            self.progress(number, len(standing))
            implied = self._examine(rooms, faults, entry_id, scope)
            if implied is not None:
                known = carried.get(entry_id, unknown)
                row = msgspec.structs.replace(implied.row, pinned=known.pinned, used_at_ms=known.used_at_ms)
                found.append(((known.used, row.created_at_ms), entry_id, msgspec.structs.replace(implied, row=row)))
        for _, entry_id, implied in sorted(found, key=lambda item: item[:2]):
            self._enter(rooms, entry_id, implied)
        if not self._older:
            self._miss(carried.keys() - {entry_id for entry_id, _ in standing})
        return len(standing), len(faults)

    def _examine(self, rooms: Rooms, faults: BlockFaults, entry_id: str, scope: str) -> entries.Implied | None:
        """What a header implies; None where it is not to be entered. What is damaged goes to quarantine."""
        path = rooms.layout.header_path(scope, entry_id)
        try:
            implied = entries.examine(rooms, entry_id, scope)
        except CacheMiss as error:
            self._quarantine(path, Problem("damage", "header", entry_id, error.message))
            return None
        except OSError as error:
            self.problems.append(unread("header", entry_id, error))
            self._may_sweep = False  # it may name any block
            return None
        found = [fault for digest, size in implied.sizes.items() if (fault := faults.of(digest, size)) is not None]
        for fault in found:
            if fault.name not in self._reported and fault.why != MISSING:
                self._report_block(rooms, fault)
        bad = [fault.name for fault in found if fault.severity == "damage"]
        if bad:
            why = f"dropped: {len(bad)} of its {len(implied.sizes)} blocks are missing or damaged, {bad[0]} first"
            self._quarantine(path, Problem("damage", "entry", entry_id, why))
            return None
        return implied

    def _report_block(self, rooms: Rooms, fault: Problem) -> None:
        self._reported.add(fault.name)
        if fault.severity == "damage":
            self._quarantine(rooms.blocks.path(bytes.fromhex(fault.name)), fault)
        else:
            self.problems.append(fault)

    def _enter(self, rooms: Rooms, entry_id: str, implied: entries.Implied) -> None:
        with rooms.index.write() as books:
            older = books.equal(implied.row.equal)
            row = implied.row
            if older is not None:
                row = books.succeed(older, row)
                self.repairs.append(f"entry {older}: superseded by {entry_id}")
            books.adopt(entry_id, row, implied.tokens, implied.sizes)

    def _miss(self, lost: set[str]) -> None:
        """Report entries that had a header once. Where it may come back, from a backup, its blocks must be there."""
        names = map(_SET_ASIDE.fullmatch, self.fs.names(self.layout.quarantine_folder))
        aside = {name[1] for name in names if name is not None}
        for entry_id in sorted(lost):
            where = "in quarantine/, since an earlier repair" if entry_id in aside else "gone"
            self.problems.append(Problem("damage", "entry", entry_id, f"its header is {where}"))
        self._may_sweep = self._may_sweep and lost <= aside

    def _clear_leases(self, rooms: Rooms) -> None:
        """Nobody has the store open, so every lease's owner is dead."""
        for lease_id in rooms.leases.ids():
            claimed = rooms.leases.claim_dead(lease_id)
            if claimed is None:
                raise StoreBroken("a lease is locked while nobody has the store open", path=rooms.leases.directory)
            claimed.release()
            self.repairs.append(f"lease {lease_id}: cleared")

    def _sweep(self, rooms: Rooms) -> None:
        if self._may_sweep:
            done = full_mark.mark(rooms, lambda done, total: None)
            self.repairs += [f"{mark.what} {mark.name}: {mark.why}" for mark in done]
        elif left := len(full_mark.orphans(rooms)):
            self.repairs.append(f"blocks: {left} that nothing names are left for `blockstore gc --full`")

    # ---- its place

    def _prepare_place(self, *, sound: bool) -> None:
        """Say what becomes of the old index: one that could be read has given all it had, and is replaced."""
        if sound and self._older:
            why = "last uses and pins are those of an older copy, which stood in its place"
            self.repairs.append(f"index: rebuilt from the headers; {why}")
        elif sound:
            self.repairs.append("index: rebuilt from the headers; last uses and pins are kept")
        elif self._set_damaged_aside():
            why = "last uses and pins are lost; the damaged one is in quarantine/"
            self.repairs.append(f"index: rebuilt from the headers; {why}")
        else:
            self.repairs.append("index: it was gone; rebuilt from the headers; last uses and pins are lost")

    def _set_damaged_aside(self) -> bool:
        """Move what stands in the index's place to quarantine/, when a whole one is about to take it."""
        if not self.fs.exists(self.layout.data_path):
            return False
        self._make_durable(self._building, self.layout.root)
        self.fs.rename(self.layout.data_path, self._quarantined("index.mdb"))
        return True

    def _put_in_place(self) -> None:
        """Let the new index take the old one's place. A crash in between costs a walk, or the repair once more."""
        stamp = self.layout.index_folder + SUFFIX
        self.fs.discard(stamp, self.layout.quarantine_folder)
        self.fs.rename(os.path.join(self._building, environment.DATA_NAME), self.layout.data_path)
        if self.fs.exists(self._building + SUFFIX):
            self.fs.rename(self._building + SUFFIX, stamp)
        self._clear_building()
        self._make_durable(self.layout.index_folder, self.layout.root)

    def _make_durable(self, *folders: str) -> None:
        for folder in folders if self.layout.durable else ():
            self.fs.sync_dir(folder)

    def _quarantine(self, path: str, problem: Problem) -> None:
        self.problems.append(problem)
        if self.fs.exists(path):
            self.fs.rename(path, self._quarantined(os.path.basename(path)))
            self.repairs.append(f"{problem.what} {problem.name}: moved to quarantine/ ({problem.why})")

    def _quarantined(self, name: str) -> str:
        return os.path.join(self.layout.quarantine_folder, f"{secrets.token_hex(4)}-{name}")


def mend_lock(layout: Layout, path: str) -> list[str]:
    """Move to quarantine/ what stands in a lock's place and is no file; what was done."""
    if not is_something_else(layout.fs, path):
        return []
    layout.fs.set_aside(path, layout.quarantine_folder)
    return [f"lock {os.path.relpath(path, layout.root)}: what stood in its place is in quarantine/"]
