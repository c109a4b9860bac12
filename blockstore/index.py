"""The index: every transaction on it, each one atomic step of the protocol (DESIGN 4).

What the index says of an entry follows from the entry's header; what it says of a block's file is believed only while
the row is PRESENT and referred to, and after a look at the file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from . import ledger, prefixes
from .environment import Environment
from .index_rows import ABSENT, PRESENT, WRITING, EntryRow, split_digests, unpack_entry
from .ledger import CAP, COUNT, TOTAL, Ledger, key_of


class Published(msgspec.Struct, frozen=True):
    """The outcome of publish: `lost` names hits that must be written again first; else what was replaced."""

    lost: tuple[bytes, ...] = ()
    replaced: tuple[str, ...] = ()


class Index:
    """Domain transactions over one Environment. Entry and lease ids are 32 hex digits, digests 32 bytes."""

    def __init__(self, env: Environment, allocation_unit: int) -> None:
        self.env = env
        self._unit = allocation_unit
        self._touched: dict[str, None] = {}

    @contextmanager
    def write(self) -> Iterator[Ledger]:
        """One write transaction; an exception inside undoes all of it."""
        with self.env.write() as txn:
            yield Ledger(txn, self._unit)

    # ---- saving

    def believed(self, digest: bytes) -> bool:
        """True where a block need not be written as things stand. Binds nothing; reserve() decides."""
        with self.env.read() as txn:
            row = ledger.block(txn, digest)
        return row is not None and ledger.is_hit(row)

    def reserve(self, lease_id: str, header: str, sizes: Mapping[bytes, int]) -> set[bytes]:
        """Write the lease's row and one reference for each digest; which of them are hits."""
        with self.write() as books:
            hits = {digest for digest, size in sizes.items() if books.reserve(digest, size)}
            books.add_lease(lease_id, header, sizes)
        return hits

    def publish(self, lease_id: str, entry: EntryRow, tokens: bytes, written: Iterable[bytes]) -> Published:
        """Turn the lease into an entry; nothing changes where a hit is no longer present, but those become WRITING.

        `tokens` are the entry's token ids as little-endian u32; `written` the digests that this lease put in place.
        """
        mine = set(written)
        with self.write() as books:
            lease = books.lease(lease_id)
            digests = split_digests(lease.digests) if lease is not None else []
            lost = [d for d in digests if d not in mine and ledger.need_block(books.txn, d).state != PRESENT]
            for digest in lost:
                books.set_state(digest, WRITING)
            if lost:
                return Published(lost=tuple(lost))
            for digest in mine:
                books.set_state(digest, PRESENT)
            older = books.equal(entry.equal)
            if older is not None:
                entry = books.succeed(older, entry)
            self._flush_into(books)  # those uses came before this one
            books.fulfil(lease_id, entry, tokens)
        return Published(replaced=(older,) if older is not None else ())

    # ---- finding and loading

    def find(self, scope: str, packed: bytes, exclude: frozenset[str] = frozenset()) -> prefixes.Found | None:
        with self.env.read() as txn, txn.cursor("chains") as cursor:
            return prefixes.longest(cursor, scope, packed, exclude)

    def entry(self, entry_id: str) -> EntryRow | None:
        with self.env.read() as txn:
            value = txn.get("entries", key_of(entry_id))
        return unpack_entry(value) if value is not None else None

    def find_equal(self, equal: bytes) -> str | None:
        """The entry with this identity and these tokens, by entries.equal_key."""
        with self.env.read() as txn:
            key = txn.get("equal", equal)
        return key.hex() if key is not None else None

    def touch(self, entry_id: str) -> None:
        """Remember a use; it reaches the index with the next publish (or flush)."""
        self._touched.pop(entry_id, None)  # used again: to the end of the order
        self._touched[entry_id] = None

    def flush(self) -> None:
        if self._touched:
            with self.write() as books:
                self._flush_into(books)

    def condemn(self, entry_id: str, seen: EntryRow, bad_block: bytes | None, still_bad: Callable[[], bool]) -> bool:
        """Doom an entry that failed to load, judging again inside the transaction; True where it was doomed.

        A bad block also loses PRESENT, so that the next save of its bytes writes it and heals whoever shares it.
        """
        with self.write() as books:
            now = books.entry(entry_id)
            if now is None or not _is_same(now, seen) or not still_bad():
                return False
            if bad_block is not None:
                row = ledger.block(books.txn, bad_block)
                if row is not None and row.state == PRESENT:
                    books.set_state(bad_block, ABSENT)
            return books.doom(entry_id)

    # ---- removing

    def doom(self, entry_id: str) -> bool:
        """Take an entry out of the index and drop its references; its header is still to be unlinked."""
        with self.write() as books:
            return books.doom(entry_id)

    def doomed(self) -> list[tuple[str, str]]:
        """(entry id, scope) of every entry whose header may still stand."""
        with self.env.read() as txn:
            return [(key.hex(), ledger.split_doomed(value)[0]) for key, value in txn.items("doomed")]

    def forget_doomed(self, entry_ids: Iterable[str]) -> None:
        """The headers are unlinked: drop their rows and their bytes from the total."""
        with self.write() as books:
            for entry_id in entry_ids:
                books.forget_doomed(entry_id)

    # ---- collecting

    def leases(self) -> list[str]:
        with self.env.read() as txn:
            return [key.hex() for key, _ in txn.items("leases")]

    def reap(self, lease_id: str, unlink_header: Callable[[str], object]) -> bool:
        """Undo a lease: its header is unlinked and its references dropped in one transaction. False without a row."""
        with self.write() as books:
            lease = books.lease(lease_id)
            if lease is None:
                return False
            unlink_header(lease.header)
            books.drop_lease(lease_id)
            return True

    def dead(self, limit: int | None = None) -> list[tuple[bytes, int]]:
        """Digest and size of blocks without references."""
        with self.env.read() as txn:
            return ledger.dead(txn, limit)

    def collect(
        self, limit: int, unlink: Callable[[bytes], object], stop: Callable[[], bool]
    ) -> list[tuple[bytes, int]]:
        """Unlink up to `limit` dead files and drop their rows, until `stop`, in one transaction."""
        gone = []
        with self.write() as books:
            for digest, size in ledger.dead(books.txn, limit):
                unlink(digest)
                books.bury(digest, size)
                gone.append((digest, size))
                if stop():
                    break
        return gone

    # ---- use, limits, totals

    def entries(self) -> list[tuple[str, EntryRow]]:
        """Every entry, the least recently used first."""
        with self.env.read() as txn:
            found = []
            for key, _ in txn.items("uses"):
                value = txn.get("entries", key[COUNT.size :])
                if value is not None:
                    found.append((key[COUNT.size :].hex(), unpack_entry(value)))
            return found

    def oldest(self) -> str | None:
        """The entry that was used the longest ago and is not pinned."""
        with self.env.read() as txn:
            for key, _ in txn.items("uses"):
                value = txn.get("entries", key[COUNT.size :])
                if value is not None and not unpack_entry(value).pinned:
                    return key[COUNT.size :].hex()
        return None

    def pin(self, entry_id: str, *, pinned: bool) -> bool:
        with self.write() as books:
            return books.pin(entry_id, pinned=pinned)

    def digests(self, entry_id: str) -> list[bytes]:
        with self.env.read() as txn:
            return split_digests(txn.get("digests", key_of(entry_id)) or b"")

    def total_bytes(self) -> int:
        """Bytes on the disk of all blocks and headers, each rounded up to the allocation unit."""
        with self.env.read() as txn:
            return ledger.number(txn, TOTAL)

    def counts(self) -> dict[str, int]:
        with self.env.read() as txn:
            return {name: txn.count(name) for name in ("entries", "blocks", "dead", "leases", "doomed")}

    def max_bytes(self) -> int | None:
        with self.env.read() as txn:
            return ledger.number(txn, CAP) or None

    def set_max_bytes(self, max_bytes: int) -> None:
        with self.write() as books:
            books.set_max_bytes(max_bytes)

    def on_disk(self, size: int) -> int:
        """`size` rounded up to the file system's allocation unit."""
        return ledger.on_disk(size, self._unit)

    def _flush_into(self, books: Ledger) -> None:
        touched, self._touched = self._touched, {}
        for entry_id in touched:
            books.use(entry_id)


def _is_same(now: EntryRow, seen: EntryRow) -> bool:
    return (now.equal, now.header_bytes, now.created_at_ms) == (seen.equal, seen.header_bytes, seen.created_at_ms)
