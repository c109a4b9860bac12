"""Check every header, block, row, reference, lease and total; repair: rebuild the index from the headers."""

import os
from collections import Counter
from collections.abc import Iterator

import msgspec

from . import entries, full_mark, ledger, prefixes, probe, quotas
from .errors import CacheMiss, NotPermitted, StoreBusy
from .findings import SEVERITIES, BlockFaults, Problem, Report, places, unread
from .fs import NotRegular
from .index import Index
from .index_rows import EntryRow, split_digests, unpack_block, unpack_entry, unpack_lease
from .layout import Layout
from .ledger import split_doomed
from .rebuild import BUILDING, Progress, Rebuild, mend_lock
from .rooms import Rooms
from .stamp import SUFFIX
from .transaction import Transaction

__all__ = ["Problem", "Progress", "Report", "check", "repair"]


def check(layout: Layout, rooms: Rooms | None, *, deep: bool, progress: Progress) -> Report:
    """Look at everything, change nothing. `deep` reads every block and compares its digest. Beside running servers.

    `rooms` is None where the store cannot be opened: then what keeps it from that is all that is found, since what is
    live follows from the index. Raises NotPermitted, StoreBusy where nobody can say what the index is like.
    """
    if rooms is None:
        _require_readable(layout)
        return Report(0, 0, tuple(places(layout)) or (_no_index(layout),))
    if probe.survey(layout.index_folder) is None:
        return Report(0, 0, (_no_index(layout),))
    problems = [*places(layout), *_check_rows(rooms)]
    known = dict(_entry_digests(rooms))
    faults = BlockFaults(rooms, deep=deep)
    for number, (entry_id, row) in enumerate(rooms.index.entries()):
        progress(number, len(known))
        problems += _check_entry(rooms, entry_id, row.scope, known.get(entry_id), faults)
    problems += [Problem(_severity_of(mark), *_named(mark)) for mark in full_mark.survey(rooms)]
    problems += _leftovers(rooms)
    return Report(len(known), len(faults), tuple(sorted(problems, key=lambda p: SEVERITIES.index(p.severity))))


def repair(layout: Layout, *, deep: bool, progress: Progress) -> Report:
    """Rebuild the index from the headers and move what is damaged to quarantine/. Needs the store to itself.

    Raises StoreBusy while any process has the store open, NotPermitted.
    """
    _require_writable(layout)
    layout.fs.make_dir(layout.quarantine_folder)
    mended = mend_lock(layout, layout.lock_path)
    fd = layout.fs.open_lock(layout.lock_path)
    try:
        if not (layout.fs.try_lock(fd, exclusive=True) and layout.fs.same_file(fd, layout.lock_path)):
            raise StoreBusy(
                "other processes have the store open", path=layout.root, hint="Stop them, then repair again."
            )
        report = Rebuild(layout, deep=deep, progress=progress).run()
    finally:
        layout.fs.close(fd)
    return msgspec.structs.replace(report, repairs=(*mended, *report.repairs))


def _require_readable(layout: Layout) -> None:
    """Raise NotPermitted where this user may not open what opening the store takes: that is no damage."""
    for path in (*layout.lock_paths, layout.data_path):
        try:
            layout.fs.close(layout.fs.open_read(path))
        except PermissionError as error:
            hint = "Ask the owner of the directory for the right to read there."
            raise NotPermitted("the store may not be read", path=path, hint=hint) from error
        except (FileNotFoundError, NotADirectoryError, NotRegular):
            continue  # for others to judge


def _require_writable(layout: Layout) -> None:
    standing = (path for path in (layout.root, *layout.folders, layout.data_path) if layout.fs.exists(path))
    refused = next((path for path in standing if not layout.fs.is_writable(path)), None)
    if refused is not None:
        hint = "Repair it as its owner, or ask for the right to write there."
        raise NotPermitted("the store may not be written", path=refused, hint=hint)


def _no_index(layout: Layout) -> Problem:
    return Problem("damage", "index", layout.index_folder, "it cannot be read; check --repair rebuilds it")


def _leftovers(rooms: Rooms) -> Iterator[Problem]:
    for lease_id in rooms.leases.ids():
        if not rooms.leases.has_live_owner(lease_id):
            yield Problem("leftover", "lease", lease_id, "its owner is dead")
    building = rooms.layout.index_folder + BUILDING
    for path in (building, building + SUFFIX):
        if rooms.fs.exists(path):  # nobody repairs while the store is open
            yield Problem("leftover", "index", os.path.basename(path), "of a repair cut short; the next one takes it")


def _severity_of(mark: full_mark.Mark) -> str:
    """Where the index lacks a whole entry it is wrong; no crash leaves that behind."""
    if mark.why.startswith(full_mark.UNREAD):
        return "unreadable"
    return "drift" if mark.why == full_mark.ADOPTED else "leftover"


def _named(mark: full_mark.Mark) -> tuple[str, str, str]:
    return mark.what, mark.name, mark.why


def _entry_digests(rooms: Rooms) -> Iterator[tuple[str, list[bytes]]]:
    with rooms.index.env.read() as txn:
        for key, value in txn.items("digests"):
            yield key.hex(), split_digests(value)


def _check_entry(
    rooms: Rooms, entry_id: str, scope: str, digests: list[bytes] | None, faults: BlockFaults
) -> Iterator[Problem]:
    """An entry's header and blocks.

    digests: what the index said a moment ago that it names; None of an entry that was saved since.
    """
    try:
        implied = entries.examine(rooms, entry_id, scope)
    except CacheMiss as error:
        if rooms.index.entry(entry_id) is not None:
            yield Problem("damage", "header", entry_id, error.message)
        return
    except OSError as error:
        yield unread("header", entry_id, error)
        return
    known = rooms.index.entry(entry_id)
    if known is not None and _without_uses(implied.row) != _without_uses(known):
        yield Problem("drift", "entry", entry_id, "the index has other facts of it than its header")
    if digests is not None and set(implied.sizes) != set(digests):
        yield Problem("drift", "entry", entry_id, "the index names other blocks than its header")
    for digest, size in implied.sizes.items():
        fault = faults.of(digest, size)
        if fault is not None and rooms.index.entry(entry_id) is not None:
            yield msgspec.structs.replace(fault, why=f"{fault.why}; entry {entry_id} needs it")


def _without_uses(row: EntryRow) -> EntryRow:
    """What follows from the header."""
    return msgspec.structs.replace(row, pinned=False, used=0, used_at_ms=0)


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
