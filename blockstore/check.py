"""Check every header, block, row, reference, lease and total; repair: rebuild the index from the headers."""

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from . import entries, environment, full_mark, ledger, prefixes, probe, quotas
from .errors import CacheMiss, StoreBroken, StoreBusy
from .fs import FileSystem
from .index import Index
from .index_rows import EntryRow, split_digests, unpack_block, unpack_entry, unpack_lease
from .layout import Layout
from .ledger import split_doomed
from .rooms import Rooms
from .stamp import SUFFIX
from .transaction import Transaction

Progress = Callable[[int, int], None]
_SEVERITY: Final = ("damage", "drift", "leftover")


class Problem(msgspec.Struct, frozen=True):
    """One finding. severity: `damage` (bytes are lost), `drift` (the index is wrong), `leftover` (gc takes it)."""

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
        """True where nothing is damaged and the index is right; leftovers of a crash are not a fault."""
        return all(problem.severity == "leftover" for problem in self.problems)


def check(layout: Layout, rooms: Rooms | None, *, deep: bool, progress: Progress) -> Report:
    """Look at everything, change nothing. `deep` reads every block and compares its digest. Beside running servers.

    `rooms` is None where the index cannot be opened: then that is the one finding, since what is live follows from it.
    """
    if rooms is None or probe.survey(layout.index_folder) is None:
        problem = Problem("damage", "index", layout.index_folder, "it cannot be read; check --repair rebuilds it")
        return Report(0, 0, (problem,))
    problems = list(_check_rows(rooms))
    known = dict(_entry_digests(rooms))
    verified: dict[bytes, str | None] = {}
    for number, (entry_id, row) in enumerate(rooms.index.entries()):
        progress(number, len(known))
        problems += _check_entry(rooms, entry_id, row.scope, known.get(entry_id), deep, verified)
    problems += [Problem(_severity_of(mark), *_named(mark)) for mark in full_mark.survey(rooms)]
    problems += [
        Problem("leftover", "lease", lease_id, "its owner is dead")
        for lease_id in rooms.leases.ids()
        if not rooms.leases.has_live_owner(lease_id)
    ]
    return Report(len(known), len(verified), tuple(sorted(problems, key=lambda p: _SEVERITY.index(p.severity))))


def repair(layout: Layout, *, deep: bool, progress: Progress) -> Report:
    """Rebuild the index from the headers and move what is damaged to quarantine/. Needs the store to itself.

    Raises StoreBusy while any process has the store open.
    """
    fd = layout.fs.open_lock(layout.lock_path)
    try:
        if not layout.fs.try_lock(fd, exclusive=True):
            raise StoreBusy(
                "other processes have the store open", path=layout.root, hint="Stop them, then repair again."
            )
        return _Repair(layout, deep, progress).run()
    finally:
        layout.fs.close(fd)


def _severity_of(mark: full_mark.Mark) -> str:
    """Where the index lacks a whole entry it is wrong; no crash leaves that behind."""
    return "drift" if mark.why == full_mark.ADOPTED else "leftover"


def _named(mark: full_mark.Mark) -> tuple[str, str, str]:
    return mark.what, mark.name, mark.why


def _entry_digests(rooms: Rooms) -> Iterator[tuple[str, list[bytes]]]:
    with rooms.index.env.read() as txn:
        for key, value in txn.items("digests"):
            yield key.hex(), split_digests(value)


def _check_entry(
    rooms: Rooms, entry_id: str, scope: str, digests: list[bytes] | None, deep: bool, verified: dict[bytes, str | None]
) -> Iterator[Problem]:
    """An entry's header and blocks; `verified` remembers what was found of each block.

    digests: what the index said a moment ago that it names; None of an entry that was saved since.
    """
    try:
        implied = entries.examine(rooms, entry_id, scope)
    except CacheMiss as error:
        if rooms.index.entry(entry_id) is not None:
            yield Problem("damage", "header", entry_id, error.message)
        return
    known = rooms.index.entry(entry_id)
    if known is not None and _without_uses(implied.row) != _without_uses(known):
        yield Problem("drift", "entry", entry_id, "the index has other facts of it than its header")
    if digests is not None and set(implied.sizes) != set(digests):
        yield Problem("drift", "entry", entry_id, "the index names other blocks than its header")
    for digest, size in implied.sizes.items():
        if digest not in verified:
            verified[digest] = _block_fault(rooms, digest, size, deep)
        fault = verified[digest]
        if fault is not None and rooms.index.entry(entry_id) is not None:
            yield Problem("damage", "block", digest.hex(), f"{fault}; entry {entry_id} needs it")


def _without_uses(row: EntryRow) -> EntryRow:
    """What follows from the header."""
    return msgspec.structs.replace(row, pinned=False, used=0, used_at_ms=0)


def _block_fault(rooms: Rooms, digest: bytes, size: int, deep: bool) -> str | None:
    found = rooms.fs.size_of(rooms.blocks.path(digest))
    if found is None:
        return "it is missing"
    if found != size:
        return f"it has {found} bytes instead of {size}"
    if deep and not rooms.blocks.is_whole(digest, size):
        return "its bytes are not those of its name"
    return None


def _check_rows(rooms: Rooms) -> Iterator[Problem]:
    """References, the list of the dead and the total, all inside one view of the index."""
    with rooms.index.env.read() as txn:
        counted = _counted(txn)
        recorded, total = ledger.number(txn, ledger.TOTAL), _implied_total(rooms.index, txn)
        for digest, value in txn.items("blocks"):
            row = unpack_block(value)
            wanted = counted.pop(digest, 0)
            if row.refs != wanted:
                yield Problem("drift", "block", digest.hex(), f"{row.refs} references instead of {wanted}")
            if (txn.get("dead", digest) is not None) != (row.refs == 0):
                yield Problem("drift", "block", digest.hex(), "the list of dead blocks is wrong about it")
        for digest in counted:
            yield Problem("drift", "block", digest.hex(), "it is referred to and has no row")
        yield from _check_tables(txn)
        yield from _check_quotas(rooms.index, txn)
    if recorded != total:
        yield Problem("drift", "total", "bytes", f"{recorded} recorded, {total} counted")


def _check_quotas(index: Index, txn: Transaction) -> Iterator[Problem]:
    """What is kept for models with a quota."""
    for model_id in ledger.limits_of(txn).quotas:
        total, counts = quotas.implied(txn, model_id, index.unit)
        if quotas.recorded(txn, model_id) != (total, counts):
            yield Problem("drift", "quota", model_id, f"what it holds is recorded wrongly; it is {total} bytes")


def _check_tables(txn: Transaction) -> Iterator[Problem]:
    """What find, replacement and eviction go by: every entry has just its rows there, and nobody else has any."""
    chains = entries_ = 0
    for key, value in txn.items("entries"):
        entry_id, row, tokens = key.hex(), unpack_entry(value), txn.get("tokens", key) or b""
        wanted = list(prefixes.rows(row, key, tokens))
        entries_, chains = entries_ + 1, chains + len(wanted)
        if len(tokens) != 4 * row.token_count or any(txn.get("chains", at) != length for at, length in wanted):
            yield Problem("drift", "entry", entry_id, "the token chains that find it are wrong")
        if txn.get("equal", row.equal) != key:
            yield Problem("drift", "entry", entry_id, "it would not be replaced by an equal one")
        if txn.get("uses", ledger.COUNT.pack(row.used) + key) is None:
            yield Problem("drift", "entry", entry_id, "its last use is not listed")
    expected = {"chains": chains, "equal": entries_, "uses": entries_, "digests": entries_, "tokens": entries_}
    for table, count in expected.items():
        if txn.count(table) != count:
            yield Problem("drift", "table", table, f"{txn.count(table)} rows instead of {count}")


def _counted(txn: Transaction) -> Counter[bytes]:
    counted: Counter[bytes] = Counter()
    for _, value in txn.items("digests"):
        counted.update(split_digests(value))
    for _, value in txn.items("leases"):
        counted.update(split_digests(unpack_lease(value).digests))
    return counted


def _implied_total(index: Index, txn: Transaction) -> int:
    blocks = sum(index.on_disk(unpack_block(value).size) for _, value in txn.items("blocks"))
    headers = sum(index.on_disk(unpack_entry(value).header_bytes) for _, value in txn.items("entries"))
    doomed = sum(index.on_disk(split_doomed(value)[1]) for _, value in txn.items("doomed"))
    return blocks + headers + doomed


class _Repair:
    """One rebuild: the old index aside, every header judged, what nobody names swept."""

    def __init__(self, layout: Layout, deep: bool, progress: Progress) -> None:
        self.layout = layout
        self.fs: FileSystem = layout.fs
        self.deep = deep
        self.progress = progress
        self.repairs: list[str] = []
        self.problems: list[Problem] = []
        self.verified: dict[bytes, str | None] = {}
        self._building = self.layout.index_folder + ".new"

    def run(self) -> Report:
        for name in ("blocks", "entries", "index", "leases", "quarantine"):
            self.fs.make_dir(os.path.join(self.layout.root, name))
        carried = probe.survey(self.layout.index_folder)
        count = self._build(carried or {})
        self._put_in_place(sound=carried is not None)
        return Report(count, len(self.verified), tuple(self.problems), tuple(self.repairs))

    def _build(self, carried: Mapping[str, probe.Remembered]) -> int:
        """Make the new index beside the old one, which stays as it is until that is whole; how many headers it saw."""
        self._clear_building()
        self.fs.make_dir(self._building)
        env = environment.acquire(self.fs, self._building, durable=self.layout.durable)
        try:
            env.create()
            rooms = Rooms(self.layout, Index(env, self.fs.allocation_unit(self.layout.root)))
            rooms.index.set_limits(msgspec.structs.asdict(self.layout.config.limits))
            count = self._enter_all(rooms, carried)
            self._clear_leases(rooms)
            for mark in full_mark.mark(rooms, lambda done, total: None):
                self.repairs.append(f"{mark.what} {mark.name}: {mark.why}")
            rooms.finish_doomed(rooms.index.doomed())
        finally:
            environment.release(env)
        return count

    def _put_in_place(self, *, sound: bool) -> None:
        """Let the new index stand where the old one stood. A crash in between costs a walk, or the repair once more."""
        folder, stamp = self.layout.index_folder, self.layout.index_folder + SUFFIX
        self.fs.discard(stamp, self.layout.quarantine_folder)
        self._set_index_aside(sound=sound)
        self.fs.rename(os.path.join(self._building, environment.DATA_NAME), os.path.join(folder, environment.DATA_NAME))
        self.fs.rename(self._building + SUFFIX, stamp)
        self._clear_building()
        if self.layout.durable:
            self.fs.sync_dir(folder)
            self.fs.sync_dir(self.layout.root)

    def _clear_building(self) -> None:
        """Take away what is left of a new index, of an earlier attempt too."""
        for name in list(self.fs.names(self._building)):
            self.fs.discard(os.path.join(self._building, name), self.layout.quarantine_folder)
        self.fs.remove_dir(self._building)
        self.fs.unlink(self._building + SUFFIX)

    def _set_index_aside(self, *, sound: bool) -> None:
        """One that could be read has given all it had, so only a damaged one is kept."""
        source = os.path.join(self.layout.index_folder, environment.DATA_NAME)
        if not self.fs.exists(source):
            self.repairs.append("index: it was gone; rebuilt from the headers")
        elif sound:
            self.fs.unlink(source)
            self.repairs.append("index: rebuilt from the headers; last uses and pins are kept")
        else:
            self.fs.rename(source, self._quarantined("index.mdb"))
            self.repairs.append("index: rebuilt from the headers; the damaged one is in quarantine/")

    def _enter_all(self, rooms: Rooms, carried: Mapping[str, probe.Remembered]) -> int:
        """Enter every whole header, the least recently used first, and quarantine the others; how many were seen."""
        found: list[tuple[tuple[int, int], str, entries.Implied]] = []
        standing = list(entries.files(rooms))
        for number, (entry_id, scope) in enumerate(standing):
            self.progress(number, len(standing))
            implied = self._examine(rooms, entry_id, scope)
            if implied is not None:
                known = carried.get(entry_id, probe.Remembered())
                row = msgspec.structs.replace(implied.row, pinned=known.pinned, used_at_ms=known.used_at_ms)
                found.append(((known.used, row.created_at_ms), entry_id, msgspec.structs.replace(implied, row=row)))
        for _, entry_id, implied in sorted(found, key=lambda item: item[:2]):
            self._enter(rooms, entry_id, implied)
        return len(standing)

    def _examine(self, rooms: Rooms, entry_id: str, scope: str) -> entries.Implied | None:
        path = rooms.layout.header_path(scope, entry_id)
        try:
            implied = entries.examine(rooms, entry_id, scope)
        except CacheMiss as error:
            self._quarantine(path, Problem("damage", "header", entry_id, error.message))
            return None
        for digest, size in implied.sizes.items():
            if digest not in self.verified:
                self.verified[digest] = fault = _block_fault(rooms, digest, size, self.deep)
                if fault is not None and fault != "it is missing":
                    self._quarantine(rooms.blocks.path(digest), Problem("damage", "block", digest.hex(), fault))
        bad = [digest.hex() for digest in implied.sizes if self.verified[digest] is not None]
        if bad:
            why = f"dropped: {len(bad)} of its {len(implied.sizes)} blocks are missing or damaged, {bad[0]} first"
            self._quarantine(path, Problem("damage", "entry", entry_id, why))
            return None
        return implied

    def _enter(self, rooms: Rooms, entry_id: str, implied: entries.Implied) -> None:
        with rooms.index.write() as books:
            older = books.equal(implied.row.equal)
            row = implied.row
            if older is not None:
                row = books.succeed(older, row)
                self.repairs.append(f"entry {older}: superseded by {entry_id}")
            books.adopt(entry_id, row, implied.tokens, implied.sizes)

    def _clear_leases(self, rooms: Rooms) -> None:
        """Nobody has the store open, so every lease's owner is dead."""
        for lease_id in rooms.leases.ids():
            claimed = rooms.leases.claim_dead(lease_id)
            if claimed is None:
                raise StoreBroken("a lease is locked while nobody has the store open", path=rooms.leases.directory)
            claimed.release()
            self.repairs.append(f"lease {lease_id}: cleared")

    def _quarantine(self, path: str, problem: Problem) -> None:
        self.problems.append(problem)
        if self.fs.exists(path):
            self.fs.rename(path, self._quarantined(os.path.basename(path)))
            self.repairs.append(f"{problem.what} {problem.name}: moved to quarantine/ ({problem.why})")

    def _quarantined(self, name: str) -> str:
        return os.path.join(self.layout.quarantine_folder, f"{secrets.token_hex(4)}-{name}")


def to_builtins(report: Report) -> Any:
    """The report as JSON sees it."""
    return {"clean": report.is_clean, **msgspec.to_builtins(report)}
