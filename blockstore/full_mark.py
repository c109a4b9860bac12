"""gc --full: marks from the headers, which are the truth, and sweeps files that no row knows.

Each header is judged alone, inside one transaction that rereads file, entry, doomed row and leases. A header that a
live lease names is skipped; one that cannot be read stops the sweep of blocks, since it may name any of them.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from . import entries
from .errors import CacheMiss
from .index_rows import unpack_entry
from .layout import config_temporaries
from .ledger import Ledger
from .rooms import Rooms
from .transaction import Transaction

ADOPTED = "adopted: its header and blocks are whole"
UNREAD = "could not be read: "
_ORPHAN = "no row knows it"
_UNFINISHED = "who wrote it died"


class Mark(NamedTuple):
    """What a mark did, or would do: what, its name, why, the bytes on the disk that it gives back."""

    what: str
    name: str
    why: str
    bytes: int


def mark(rooms: Rooms, progress: Callable[[int, int], None]) -> list[Mark]:
    """Bring index and headers together, then delete block files without a row. Returns what was done."""
    done, readable = mark_headers(rooms, progress)
    done += _unlink_temporaries(rooms)
    if readable:
        return done + sweep(rooms)
    return [*done, Mark("sweep", "blocks", "left out: a header cannot be read; run check --repair", 0)]


def mark_headers(rooms: Rooms, progress: Callable[[int, int], None]) -> tuple[list[Mark], bool]:
    """Bring index and headers together; what was done, and whether every header could be read."""
    done: list[Mark] = []
    standing = _standing(rooms)
    readable = True
    for number, (entry_id, scope) in enumerate(standing):
        with rooms.index.write() as books:
            verdict = judge(rooms, books.txn, entry_id, scope)
            verdict.act(books)
        readable = readable and not verdict.unreadable
        done += [verdict.mark] if verdict.mark else []
        progress(number + 1, len(standing))
    return done, readable


def orphans(rooms: Rooms) -> list[bytes]:
    """The digests of block files without a row."""
    return [name for name in rooms.blocks.names() if _is_orphan(rooms, name)]


def sweep(rooms: Rooms) -> list[Mark]:
    """Delete block files without a row."""
    return [_unlink_orphan(rooms, name) for name in orphans(rooms)]


def survey(rooms: Rooms) -> list[Mark]:
    """What mark() would do now; changes nothing, and holds the index for one header or block at a time."""
    found: list[Mark] = []
    readable = True
    for entry_id, scope in _standing(rooms):
        with rooms.index.env.read() as txn:
            verdict = judge(rooms, txn, entry_id, scope)
        readable = readable and not verdict.unreadable
        found += [verdict.mark] if verdict.mark else []
    with rooms.index.env.read():  # nobody changes limits meanwhile
        found += [_temporary_mark(rooms, path) for path in config_temporaries(rooms.fs, rooms.layout.root)]
    if readable:
        sizes = {name: rooms.fs.allocated(rooms.blocks.path(name)) for name in orphans(rooms)}
        found += [Mark("block", name.hex(), _ORPHAN, size) for name, size in sizes.items()]
    return found


class Verdict(NamedTuple):
    """What is to be done about one header or entry: a mark to report, and the change to make."""

    mark: Mark | None
    act: Callable[[Ledger], object]
    unreadable: bool = False


def judge(rooms: Rooms, txn: Transaction, entry_id: str, scope: str) -> Verdict:
    """Compare one header with its entry as things stand inside `txn`."""
    key = bytes.fromhex(entry_id)
    stands = rooms.fs.size_of(rooms.layout.header_path(scope, entry_id)) is not None
    known = txn.get("entries", key) is not None
    if known and not stands:
        return Verdict(Mark("entry", entry_id, "its header is gone", 0), lambda books: books.doom(entry_id))
    if known or not stands or txn.get("doomed", key) is not None or txn.get("leases", key) is not None:
        return _nothing()
    return _judge_stray(rooms, txn, entry_id, scope)


def _judge_stray(rooms: Rooms, txn: Transaction, entry_id: str, scope: str) -> Verdict:
    """A header that no entry, lease or removal owns: adopted where it is whole and alone, otherwise doomed."""
    try:
        stray = entries.examine(rooms, entry_id, scope)
    except CacheMiss as error:
        return _unreadable(entry_id, f"unreadable: {error.message}")
    except OSError as error:
        return _unreadable(entry_id, f"{UNREAD}{error.strerror or error}")
    if txn.get("equal", stray.row.equal) is not None or rooms.blocks.missing(stray.sizes.items()):
        why = "no entry owns it, and it is superseded or incomplete"
        return Verdict(
            Mark("header", entry_id, why, rooms.index.on_disk(stray.row.header_bytes)),
            lambda books: books.doom_stray(entry_id, scope, stray.row.header_bytes),
        )
    return Verdict(
        Mark("entry", entry_id, ADOPTED, 0),
        lambda books: books.adopt(entry_id, stray.row, stray.tokens, stray.sizes),
    )


def _unreadable(entry_id: str, why: str) -> Verdict:
    return Verdict(Mark("header", entry_id, why, 0), lambda books: None, unreadable=True)


def _nothing() -> Verdict:
    return Verdict(None, lambda books: None)


def _standing(rooms: Rooms) -> list[tuple[str, str]]:
    """(entry id, scope) of every header file and every entry."""
    found = dict(entries.files(rooms))
    with rooms.index.env.read() as txn:
        for key, value in txn.items("entries"):
            found.setdefault(key.hex(), unpack_entry(value).scope)
    return sorted(found.items())


def _is_orphan(rooms: Rooms, name: bytes) -> bool:
    with rooms.index.env.read() as txn:
        return txn.get("blocks", name) is None


def _unlink_orphan(rooms: Rooms, name: bytes) -> Mark:
    size = rooms.fs.allocated(rooms.blocks.path(name))
    with rooms.index.write() as books:
        # A saver may have reserved it since: its file is about to be renamed into this very place.
        if books.txn.get("blocks", name) is None:
            rooms.blocks.unlink(name)
    return Mark("block", name.hex(), _ORPHAN, size)


def _temporary_mark(rooms: Rooms, path: str) -> Mark:
    return Mark("file", os.path.basename(path), _UNFINISHED, rooms.fs.allocated(path))


def _unlink_temporaries(rooms: Rooms) -> list[Mark]:
    """Remove what is left of changes of the limits: they are written with the index held, as it is here."""
    done: list[Mark] = []
    if not config_temporaries(rooms.fs, rooms.layout.root):
        return done
    with rooms.index.write():
        for path in config_temporaries(rooms.fs, rooms.layout.root):
            done.append(_temporary_mark(rooms, path))
            rooms.fs.discard(path, rooms.layout.quarantine_folder)
    return done
