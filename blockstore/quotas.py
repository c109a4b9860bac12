"""What a model with a quota takes: which blocks its entries refer to, how often, and what that is on the disk.

Kept for models with a quota alone, in the same transaction as the entries: table `shares`, a model's key and a digest
to the number of that model's entries that name the block, and one sum a model in `meta`.
"""

import struct
from typing import Final

from blake3 import blake3

from .index_rows import EntryRow, on_disk, split_digests, unpack_block, unpack_entry
from .transaction import Transaction

_COUNT: Final = struct.Struct(">Q")
_KEY_BYTES: Final = 16


def is_limited(txn: Transaction, model_id: str | None) -> bool:
    return model_id is not None and txn.get("meta", _sum_key(model_id)) is not None


def held_bytes(txn: Transaction, model_id: str) -> int:
    """What the model's entries take on the disk. Only for a model that is_limited()."""
    value = txn.get("meta", _sum_key(model_id))
    return int(_COUNT.unpack(value)[0]) if value is not None else 0


def begin(txn: Transaction, model_id: str, unit: int) -> None:
    """Start to keep a model's share: walks all entries once."""
    if is_limited(txn, model_id):
        return
    txn.put("meta", _sum_key(model_id), _COUNT.pack(0))
    for key, value in list(txn.items("entries")):
        entry = unpack_entry(value)
        if entry.model_id == model_id:
            charge(txn, entry, txn.get("digests", key) or b"", unit)


def end(txn: Transaction, model_id: str) -> None:
    key = _key(model_id)
    txn.delete("meta", _sum_key(model_id))
    for name in [name for name, _ in _rows(txn, key)]:
        txn.delete("shares", name)


def charge(txn: Transaction, entry: EntryRow, digests: bytes, unit: int) -> None:
    """Count an entry that comes; one whose model has no quota costs one look."""
    _count(txn, entry, digests, unit, 1)


def discharge(txn: Transaction, entry: EntryRow, digests: bytes, unit: int) -> None:
    """Count an entry that goes."""
    _count(txn, entry, digests, unit, -1)


def implied(txn: Transaction, model_id: str, unit: int) -> tuple[int, dict[bytes, int]]:
    """What the model's entries say: the sum, and how often they name each block. For a check."""
    total, counts = 0, dict[bytes, int]()
    for key, value in txn.items("entries"):
        entry = unpack_entry(value)
        if entry.model_id == model_id:
            total += on_disk(entry.header_bytes, unit)
            for digest in split_digests(txn.get("digests", key) or b""):
                counts[digest] = counts.get(digest, 0) + 1
    return total + sum(_block_bytes(txn, digest, unit) for digest in counts), counts


def recorded(txn: Transaction, model_id: str) -> tuple[int, dict[bytes, int]]:
    """What the index has of the same."""
    key = _key(model_id)
    counts = {name[_KEY_BYTES:]: int(_COUNT.unpack(value)[0]) for name, value in _rows(txn, key)}
    return held_bytes(txn, model_id), counts


def _count(txn: Transaction, entry: EntryRow, digests: bytes, unit: int, step: int) -> None:
    if entry.model_id is None or not is_limited(txn, entry.model_id):
        return
    model = _key(entry.model_id)
    total = held_bytes(txn, entry.model_id) + step * on_disk(entry.header_bytes, unit)
    for digest in split_digests(digests):
        value = txn.get("shares", model + digest)
        before = int(_COUNT.unpack(value)[0]) if value is not None else 0
        after = max(before + step, 0)
        if not before or not after:
            total += step * _block_bytes(txn, digest, unit)
        if after:
            txn.put("shares", model + digest, _COUNT.pack(after))
        else:
            txn.delete("shares", model + digest)
    txn.put("meta", _sum_key(entry.model_id), _COUNT.pack(max(total, 0)))


def _block_bytes(txn: Transaction, digest: bytes, unit: int) -> int:
    value = txn.get("blocks", digest)
    return on_disk(unpack_block(value).size, unit) if value is not None else 0


def _rows(txn: Transaction, model: bytes) -> list[tuple[bytes, bytes]]:
    found = []
    for name, value in txn.items("shares", model):
        if not name.startswith(model):
            break
        found.append((name, value))
    return found


def _key(model_id: str) -> bytes:
    return blake3(model_id.encode("utf-8", "surrogatepass")).digest(_KEY_BYTES)


def _sum_key(model_id: str) -> bytes:
    return b"held:" + _key(model_id)
