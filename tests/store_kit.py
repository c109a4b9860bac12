"""What the tests of the store share: what caches say, and a look behind the store's doors."""

import contextlib
import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import kvcodecs
from blockstore import Match, Store, check, collect, entries, leases, probe, rooms, saving, sources
from blockstore.digest import digest
from blockstore.index_rows import PRESENT, BlockRow, split_digests, unpack_block, unpack_lease
from blockstore.records import Header, blocks_of
from cache_cases import bits, facts
from kvcodecs.algebra import SnapshotContext
from kvcodecs.entry import leaves


def all_facts(caches: Sequence[Any]) -> list[object]:
    return [facts(cache) for cache in caches]


def described(caches: Sequence[Any], count: int) -> list[object]:
    """What a snapshot says of the caches: kinds, offsets, fields, and each tensor's shape, dtype and bytes."""
    found: list[object] = []
    for part in kvcodecs.default_provider().snapshot(caches, SnapshotContext(count)):
        for entry in leaves([part.entry]):
            found.append((entry.kind, entry.offset, entry.fields, entry.minimum_reusable_offset))
        found += [bits(array) for array in part.arrays]
    return found


def served(found: Match | None) -> tuple[str, int, int] | None:
    """Which entry was found, how many tokens of the prompt it serves, and how many it holds."""
    return None if found is None else (found.entry_id, found.length, found.entry_length)


# ---- behind the doors


def header_of(store: Store, entry_id: str) -> Header:
    row = store._rooms.index.entry(entry_id)
    assert row is not None
    return entries.read(store._rooms, entry_id, row.scope)


def block_path(store: Store, digest: str) -> Path:
    return Path(store.root, "blocks", digest)


def block_names(store: Store) -> set[str]:
    return {path.name for path in Path(store.root, "blocks").iterdir()}


def named_blocks(header: Header) -> set[str]:
    return {name for name, _ in blocks_of(header)}


def needed_blocks(header: Header, length: int) -> set[str]:
    """Blocks that hold any of the first `length` tokens: by group, and by row in a tensor that is cut by itself.

    For caches `[B, H, tokens, D]` that begin at position 0.
    """
    needed: set[str] = set()
    flat = list(leaves(header.caches))
    for group in header.segments or ():
        leaf, index = group.tensors[0]
        start = 0
        for name, count in zip(group.digests(), group.counts(flat[leaf].tensors[index].shape[2]), strict=True):
            needed |= {name} if start < length else set()
            start += count
    for slot in (slot for entry in flat for slot in entry.tensors):
        token = slot.shape[3] * slot.item_size
        start = 0
        for block in slot.blocks or ():
            first = start // token % slot.shape[2]
            crosses_row = first + -(-block.bytes // token) > slot.shape[2]
            needed |= {block.hash} if first < length or crosses_row else set()
            start += block.bytes
    return needed


def header_paths(store: Store) -> dict[str, Path]:
    """Every header on the disk, by entry id."""
    return {path.stem: path for path in Path(store.root, "entries").rglob("*.mlxkv")}


def lease_folders(store: Store) -> list[str]:
    return os.listdir(os.path.join(store.root, "leases"))


def block_rows(store: Store) -> dict[str, BlockRow]:
    with store._rooms.index.env.read() as txn:
        return {key.hex(): unpack_block(value) for key, value in txn.items("blocks")}


def references(store: Store) -> Counter[str]:
    """How often the headers on the disk and the rows of unfinished saves name each block: once each."""
    counted: Counter[str] = Counter()
    for entry_id, path in header_paths(store).items():
        counted.update(named_blocks(entries.read(store._rooms, entry_id, path.parent.name)))
    with store._rooms.index.env.read() as txn:
        for _, value in txn.items("leases"):
            counted.update(digest.hex() for digest in split_digests(unpack_lease(value).digests))
    return counted


def assert_exact(store: Store) -> None:
    """After a collection: references are what the headers say; files, rows and headers are those of the entries."""
    rows = block_rows(store)
    assert {name: row.refs for name, row in rows.items()} == references(store)
    assert {row.state for row in rows.values()} <= {PRESENT}
    assert block_names(store) == set(rows)
    assert set(header_paths(store)) == {entry.entry_id for entry in store.entries()}
    assert lease_folders(store) == []
    assert_total(store)


def assert_total(store: Store) -> None:
    """The running total is what the files of blocks and headers take, each rounded up."""
    index = store._rooms.index
    blocks = [os.path.getsize(block_path(store, name)) for name in block_names(store)]
    headers = [path.stat().st_size for path in header_paths(store).values()]
    assert index.total_bytes() == sum(map(index.on_disk, [*blocks, *headers]))


def report_of(store: Store, *, deep: bool = True) -> check.Report:
    """What check says, without a second process that walks the index first: that takes most of a second."""
    with mock.patch.object(probe, "survey", return_value={}):
        return check.check(store._layout, store._rooms, deep=deep, progress=lambda done, total: None)


def assert_clean(store: Store) -> None:
    assert report_of(store).problems == ()


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file, which keeps its size."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage(path: Path, how: str) -> None:
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        os.truncate(path, path.stat().st_size - 1)
    else:
        flip(path)


def is_bad(store: Store, name: str) -> bool:
    path = block_path(store, name)
    return not path.exists() or digest(store.config.block_hash, path.read_bytes()).hex() != name


def size_of(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def disk_bytes(root: str) -> int:
    """What du says of a directory."""
    seen = [root, *(os.path.join(folder, name) for folder, folders, files in os.walk(root) for name in folders + files)]
    return sum(os.lstat(path).st_blocks * 512 for path in seen)


def repeatable() -> contextlib.ExitStack:
    """What chance or the clock decides follows from the steps alone, so that Hypothesis can repeat and shorten them."""
    numbers = itertools.count()
    ids = SimpleNamespace(token_hex=lambda size: sha256(str(next(numbers)).encode()).hexdigest()[: 2 * size])
    margins = dataclasses.replace(rooms.MARGINS, threads=1, collect_batch_s=1e9)
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(leases, "secrets", ids))
    for module in (saving, sources, collect):
        stack.enter_context(mock.patch.object(module, "MARGINS", margins))
    return stack
