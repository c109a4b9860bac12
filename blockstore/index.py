"""The index: every transaction on it, each one atomic step of the protocol (DESIGN 4).

What the index says of an entry follows from the entry's header; what it says of a block's file is believed only while
the row is PRESENT and referred to, and after a look at the file.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from . import ledger, prefixes, quotas
from .environment import Environment
from .errors import NotPermitted
from .index_rows import ABSENT, PRESENT, WRITING, EntryRow, on_disk, split_digests, unpack_entry, unpack_lease
from .ledger import COUNT, TOTAL, Ledger, key_of
from .limits import Limits


class Published(msgspec.Struct, frozen=True):
    """The outcome of publish: `lost` names hits that must be written again first; else what was replaced."""

    lost: tuple[bytes, ...] = ()
    replaced: tuple[str, ...] = ()


class Index:
    """Domain transactions over one Environment. Entry and lease ids are 32 hex digits, digests 32 bytes."""

    def __init__(self, env: Environment, allocation_unit: int, *, read_only: bool = False) -> None:
        self.env = env
        self.read_only = read_only
        self.unit = allocation_unit
        self._touched: dict[str, int] = {}

    def write(self) -> AbstractContextManager[Ledger]:
        """One write transaction; an exception inside undoes all of it."""
        if self.read_only:
            raise NotPermitted("the store is open for reading only", path=self.env.directory)
        return self.env.write(lambda txn: Ledger(txn, self.unit))

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
        """Remember a use; it reaches the index with the next publish (or flush), where it may be written at all."""
        if self.read_only:
            return
        self._touched.pop(entry_id, None)  # used again: to the end of the order
        self._touched[entry_id] = now_ms()

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

    def entries_of(self, scope: str) -> list[tuple[str, EntryRow]]:
        """The entries of one identity, the longest first, without a look at any other."""
        found = []
        with self.env.read() as txn, txn.cursor("chains") as cursor:
            for entry_id in prefixes.members(cursor, scope):
                value = txn.get("entries", key_of(entry_id))
                if value is not None:
                    found.append((entry_id, unpack_entry(value)))
        return sorted(found, key=lambda one: -one[1].token_count)

    def oldest(self, model_id: str | None = None, *, but: str | None = None) -> str | None:
        """The entry, of that model or of any, that was used the longest ago and is not pinned, nor `but`."""
        with self.env.read() as txn:
            for key, _ in txn.items("uses"):
                entry_id = key[COUNT.size :].hex()
                value = txn.get("entries", key[COUNT.size :])
                row = unpack_entry(value) if value is not None and entry_id != but else None
                if row is not None and not row.pinned and model_id in (None, row.model_id):
                    return entry_id
        return None

    def unused_since(self, latest_ms: int) -> list[tuple[str, EntryRow]]:
        """Entries, not pinned, last used before `latest_ms`, the least recently used first.

        The order of uses is followed until the first that is younger, whatever clocks said meanwhile.
        """
        found = []
        with self.env.read() as txn:
            for key, _ in txn.items("uses"):
                value = txn.get("entries", key[COUNT.size :])
                row = unpack_entry(value) if value is not None else None
                if row is None or row.pinned:
                    continue
                if row.last_used_ms >= latest_ms:
                    break
                found.append((key[COUNT.size :].hex(), row))
        return found

    def pin(self, entry_id: str, *, pinned: bool) -> bool:
        with self.write() as books:
            return books.pin(entry_id, pinned=pinned)

    def digests(self, entry_id: str) -> list[bytes]:
        with self.env.read() as txn:
            return split_digests(txn.get("digests", key_of(entry_id)) or b"")

    def tokens(self, entry_id: str) -> bytes:
        """The tokens of an entry, packed; none where there is no such entry."""
        with self.env.read() as txn:
            return txn.get("tokens", key_of(entry_id)) or b""

    def total_bytes(self) -> int:
        """Bytes on the disk of all blocks and headers, each rounded up to the allocation unit."""
        with self.env.read() as txn:
            return ledger.number(txn, TOTAL)

    def total_beside(self, lease_ids: Iterable[str]) -> tuple[int, list[str]]:
        """total_bytes(), and those of the leases, at that moment, of which nothing is counted in it."""
        with self.env.read() as txn:
            keys = {lease_id: key_of(lease_id) for lease_id in lease_ids}
            tables = ("leases", "entries", "doomed")
            unknown = [one for one, key in keys.items() if all(txn.get(table, key) is None for table in tables)]
            return ledger.number(txn, TOTAL), unknown

    def counts(self) -> dict[str, int]:
        with self.env.read() as txn:
            return {name: txn.count(name) for name in ("entries", "blocks", "dead", "leases", "doomed")}

    def kept_bytes(self) -> int:
        """What no eviction gives back: pinned entries, and what unfinished saves have reserved."""
        blocks, headers = set[bytes](), 0
        with self.env.read() as txn:
            for _, value in txn.items("leases"):
                blocks.update(split_digests(unpack_lease(value).digests))
            for key, value in txn.items("entries"):
                row = unpack_entry(value)
                if row.pinned:
                    headers += on_disk(row.header_bytes, self.unit)
                    blocks.update(split_digests(txn.get("digests", key) or b""))
            size = sum(on_disk(ledger.need_block(txn, digest).size, self.unit) for digest in blocks)
        return headers + size

    def limits(self) -> Limits:
        with self.env.read() as txn:
            return ledger.limits_of(txn)

    def set_limits(self, changes: Mapping[str, Any], keep: Callable[[Limits], object] = lambda limits: None) -> Limits:
        """Change those limits that are not None; `keep` is called with all of them before the change stands."""
        with self.write() as books:
            limits = ledger.limits_of(books.txn).changed(changes)
            books.set_limits(limits)
            keep(limits)
        return limits

    def held_bytes(self, model_id: str) -> int:
        """What a model with a quota takes on the disk."""
        with self.env.read() as txn:
            return quotas.held_bytes(txn, model_id)

    def on_disk(self, size: int) -> int:
        """`size` rounded up to the file system's allocation unit."""
        return on_disk(size, self.unit)

    def _flush_into(self, books: Ledger) -> None:
        touched, self._touched = self._touched, {}
        for entry_id, at_ms in touched.items():
            books.use(entry_id, at_ms)


def now_ms() -> int:
    """The clock's milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _is_same(now: EntryRow, seen: EntryRow) -> bool:
    return (now.equal, now.header_bytes, now.created_at_ms) == (seen.equal, seen.header_bytes, seen.created_at_ms)
