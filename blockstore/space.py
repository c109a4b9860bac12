"""What removing entries does to the disk, known before it is done."""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from .errors import EntryGone
from .index_rows import split_digests, unpack_block, unpack_entry
from .rooms import Rooms
from .transaction import Transaction


class Space(msgspec.Struct, frozen=True):
    """What removing some entries together does to the disk, as things stand: bytes as the disk counts them.

    unique: the blocks that nothing else refers to, which become collectable. shared: those that stay. header_bytes:
    the header files, which go at once.
    """

    unique_blocks: int
    unique_bytes: int
    shared_blocks: int
    shared_bytes: int
    header_bytes: int

    @property
    def removal_bytes(self) -> int:
        """All that removing and collecting gives back."""
        return self.unique_bytes + self.header_bytes


def space(rooms: Rooms, entry_ids: Iterable[str]) -> Space:
    """What removing these entries together would give back. Raises EntryGone where one of them is not there."""
    headers = unique_blocks = unique_bytes = shared_blocks = shared_bytes = 0
    with rooms.index.env.read() as txn:
        chosen = set(entry_ids)
        for entry_id in chosen:
            row = txn.get("entries", bytes.fromhex(entry_id))
            if row is None:
                raise EntryGone("there is no such entry", entry_id=entry_id)
            headers += rooms.index.on_disk(unpack_entry(row).header_bytes)
        for _, size, is_theirs in _blocks(rooms, txn, chosen):
            if is_theirs:
                unique_blocks, unique_bytes = unique_blocks + 1, unique_bytes + size
            else:
                shared_blocks, shared_bytes = shared_blocks + 1, shared_bytes + size
    return Space(unique_blocks, unique_bytes, shared_blocks, shared_bytes, headers)


def theirs_alone(rooms: Rooms, entry_ids: Iterable[str]) -> list[tuple[bytes, int]]:
    """Digest and bytes on the disk of the blocks that only these entries refer to; what is gone is passed over."""
    with rooms.index.env.read() as txn:
        return [(digest, size) for digest, size, is_theirs in _blocks(rooms, txn, set(entry_ids)) if is_theirs]


def named_blocks(rooms: Rooms, entry_ids: Iterable[str]) -> dict[bytes, int]:
    """Digest and bytes on the disk of every block that the entries name."""
    with rooms.index.env.read() as txn:
        return {digest: size for digest, size, _ in _blocks(rooms, txn, set(entry_ids))}


def _blocks(rooms: Rooms, txn: Transaction, entry_ids: set[str]) -> Iterator[tuple[bytes, int, bool]]:
    """Every block that the entries name: its digest, its bytes on the disk, whether nothing else refers to it."""
    named: Counter[bytes] = Counter()
    for entry_id in entry_ids:
        named.update(split_digests(txn.get("digests", bytes.fromhex(entry_id)) or b""))
    for digest, count in named.items():
        value = txn.get("blocks", digest)
        if value is not None:
            block = unpack_block(value)
            yield digest, rooms.index.on_disk(block.size), block.refs == count
