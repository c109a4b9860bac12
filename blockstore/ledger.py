"""What one write transaction may do to the index: references, states, entries, leases, the running total.

Every method keeps the books balanced: a block row has one reference for each entry and each lease that names it, rows
without references stand in `dead`, and the total is the sum of what blocks and headers take on the disk.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from . import limits, prefixes, quotas
from .errors import StoreBroken
from .index_rows import (
    PRESENT,
    WRITING,
    BlockRow,
    EntryRow,
    LeaseRow,
    on_disk,
    pack,
    split_digests,
    unpack_block,
    unpack_entry,
    unpack_lease,
)
from .transaction import Transaction

COUNT: Final = struct.Struct(">Q")
TOTAL: Final = b"total"
USES: Final = b"uses"
LIMITS: Final = b"limits"
_SCOPE_DIGITS: Final = 32


class Ledger:
    """The domain's steps inside one write transaction; `txn` is open for plain looks."""

    def __init__(self, txn: Transaction, allocation_unit: int) -> None:
        self.txn = txn
        self._unit = allocation_unit

    # ---- blocks

    def reserve(self, digest: bytes, size: int) -> bool:
        """Take a reference; True where the block is a hit, otherwise it becomes WRITING."""
        row = block(self.txn, digest)
        if row is None:
            row = BlockRow(0, WRITING, size)
            self.grow(on_disk(size, self._unit))
        hit = is_hit(row)
        if not hit:
            row.state = WRITING
        self._refer(digest, row)
        return hit

    def set_state(self, digest: bytes, state: int) -> None:
        row = need_block(self.txn, digest)
        row.state = state
        self.txn.put("blocks", digest, row.pack())

    def bury(self, digest: bytes, size: int) -> None:
        """Drop the row of a dead block whose file is unlinked."""
        self.txn.delete("blocks", digest)
        self.txn.delete("dead", digest)
        self.grow(-on_disk(size, self._unit))

    def _refer(self, digest: bytes, row: BlockRow) -> None:
        if row.refs == 0:
            self.txn.delete("dead", digest)
        row.refs += 1
        self.txn.put("blocks", digest, row.pack())

    def _unrefer(self, joined: bytes) -> None:
        for digest in split_digests(joined):
            row = need_block(self.txn, digest)
            if row.refs == 0:
                raise StoreBroken("a block has fewer references than the entries that name it", digest=digest.hex())
            row.refs -= 1
            self.txn.put("blocks", digest, row.pack())
            if row.refs == 0:
                self.txn.put("dead", digest, b"")

    # ---- leases

    def lease(self, lease_id: str) -> LeaseRow | None:
        value = self.txn.get("leases", key_of(lease_id))
        return unpack_lease(value) if value is not None else None

    def add_lease(self, lease_id: str, header: str, digests: Iterable[bytes]) -> None:
        self.txn.put("leases", key_of(lease_id), pack(LeaseRow(header, b"".join(digests))))

    def drop_lease(self, lease_id: str) -> None:
        """Undo a lease: its references go, and its row."""
        lease = self.lease(lease_id)
        if lease is not None:
            self._unrefer(lease.digests)
            self.txn.delete("leases", key_of(lease_id))

    def fulfil(self, lease_id: str, entry: EntryRow, tokens: bytes) -> None:
        """The lease's references become the entry's."""
        lease = self.lease(lease_id)
        if lease is None:
            raise StoreBroken("the index has lost a live lease", entry_id=lease_id)
        self._add_entry(lease_id, entry, tokens, lease.digests)
        self.txn.delete("leases", key_of(lease_id))

    # ---- entries

    def entry(self, entry_id: str) -> EntryRow | None:
        value = self.txn.get("entries", key_of(entry_id))
        return unpack_entry(value) if value is not None else None

    def equal(self, equal: bytes) -> str | None:
        """The entry with this identity and these tokens."""
        key = self.txn.get("equal", equal)
        return key.hex() if key is not None else None

    def adopt(self, entry_id: str, entry: EntryRow, tokens: bytes, sizes: Mapping[bytes, int]) -> None:
        """Enter an entry whose header and blocks were found whole on the disk."""
        for digest, size in sizes.items():
            self.reserve(digest, size)
            self.set_state(digest, PRESENT)
        self._add_entry(entry_id, entry, tokens, b"".join(sizes))

    def doom(self, entry_id: str) -> bool:
        """Take an entry out and drop its references; its header is still to be unlinked. False where there is none."""
        entry = self.entry(entry_id)
        if entry is None:
            return False
        key = key_of(entry_id)
        for chain_key, _ in prefixes.rows(entry, key, self.txn.get("tokens", key) or b""):
            self.txn.delete("chains", chain_key)
        digests = self.txn.get("digests", key) or b""
        quotas.discharge(self.txn, entry, digests, self._unit)
        self._unrefer(digests)
        for table in ("entries", "digests", "tokens"):
            self.txn.delete(table, key)
        if self.txn.get("equal", entry.equal) == key:
            self.txn.delete("equal", entry.equal)
        self.txn.delete("uses", COUNT.pack(entry.used) + key)
        self.txn.put("doomed", key, _doomed(entry.scope, entry.header_bytes))
        return True

    def succeed(self, older: str, entry: EntryRow) -> EntryRow:
        """Doom the entry that `entry` takes the place of; the pin passes on."""
        before = self.entry(older)
        self.doom(older)
        return msgspec.structs.replace(entry, pinned=entry.pinned or (before is not None and before.pinned))

    def doom_stray(self, entry_id: str, scope: str, header_bytes: int) -> None:
        """Mark a header that no entry owns for unlinking."""
        self.grow(on_disk(header_bytes, self._unit))
        self.txn.put("doomed", key_of(entry_id), _doomed(scope, header_bytes))

    def forget_doomed(self, entry_id: str) -> None:
        """The header of a doomed entry is unlinked: drop its row, and its bytes from the total."""
        value = self.txn.get("doomed", key_of(entry_id))
        if value is not None:
            self.grow(-on_disk(split_doomed(value)[1], self._unit))
            self.txn.delete("doomed", key_of(entry_id))

    def pin(self, entry_id: str, *, pinned: bool) -> bool:
        entry = self.entry(entry_id)
        if entry is not None:
            self.txn.put("entries", key_of(entry_id), pack(msgspec.structs.replace(entry, pinned=pinned)))
        return entry is not None

    def use(self, entry_id: str, at_ms: int) -> None:
        """Make an entry the most recently used; one that is gone is passed over."""
        entry = self.entry(entry_id)
        if entry is not None:
            self.txn.delete("uses", COUNT.pack(entry.used) + key_of(entry_id))
            self._put_used(entry_id, msgspec.structs.replace(entry, used_at_ms=at_ms))

    def _add_entry(self, entry_id: str, entry: EntryRow, tokens: bytes, digests: bytes) -> None:
        key = key_of(entry_id)
        self.txn.put("digests", key, digests)
        self.txn.put("tokens", key, tokens)
        self.txn.put("equal", entry.equal, key)
        for chain_key, value in prefixes.rows(entry, key, tokens):
            self.txn.put("chains", chain_key, value)
        self.grow(on_disk(entry.header_bytes, self._unit))
        quotas.charge(self.txn, entry, digests, self._unit)
        self._put_used(entry_id, entry)

    def _put_used(self, entry_id: str, entry: EntryRow) -> None:
        count = number(self.txn, USES) + 1
        self.txn.put("meta", USES, COUNT.pack(count))
        self.txn.put("entries", key_of(entry_id), pack(msgspec.structs.replace(entry, used=count)))
        self.txn.put("uses", COUNT.pack(count) + key_of(entry_id), b"")

    # ---- limits

    def grow(self, change: int) -> None:
        """Move the running total."""
        self.txn.put("meta", TOTAL, COUNT.pack(max(number(self.txn, TOTAL) + change, 0)))

    def set_limits(self, wanted: limits.Limits) -> None:
        for model_id in limits_of(self.txn).quotas.keys() - wanted.quotas.keys():
            quotas.end(self.txn, model_id)
        for model_id in wanted.quotas:
            quotas.begin(self.txn, model_id, self._unit)
        self.txn.put("meta", LIMITS, limits.pack(wanted))


# ---- looks that need no write transaction


def key_of(entry_id: str) -> bytes:
    """The key of an entry or a lease: its id as 16 bytes."""
    return bytes.fromhex(entry_id)


def is_hit(row: BlockRow) -> bool:
    """Whether a block need not be written: only a row that is PRESENT and referred to is believed."""
    return row.state == PRESENT and row.refs > 0


def block(txn: Transaction, digest: bytes) -> BlockRow | None:
    value = txn.get("blocks", digest)
    return unpack_block(value) if value is not None else None


def need_block(txn: Transaction, digest: bytes) -> BlockRow:
    row = block(txn, digest)
    if row is None:
        raise StoreBroken("a block is referred to and has no row", digest=digest.hex())
    return row


def limits_of(txn: Transaction) -> limits.Limits:
    try:
        return limits.unpack(txn.get("meta", LIMITS))
    except msgspec.DecodeError as error:
        raise StoreBroken(f"the limits in the index cannot be read: {error}") from error


def number(txn: Transaction, key: bytes) -> int:
    value = txn.get("meta", key)
    return int(COUNT.unpack(value)[0]) if value is not None else 0


def dead(txn: Transaction, limit: int | None) -> list[tuple[bytes, int]]:
    """Digest and size of blocks without references, at most `limit` of them."""
    found = []
    for digest, _ in txn.items("dead"):
        found.append((digest, need_block(txn, digest).size))
        if limit is not None and len(found) >= limit:
            break
    return found


def _doomed(scope: str, header_bytes: int) -> bytes:
    return scope.encode() + str(header_bytes).encode()


def split_doomed(value: bytes) -> tuple[str, int]:
    """Scope and header size of a row of `doomed`."""
    return value[:_SCOPE_DIGITS].decode(), int(value[_SCOPE_DIGITS:])
