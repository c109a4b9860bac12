"""What the tests of single kinds share: golden headers, caches made from them, and loads cut to a prefix."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from blockstore import Store
from blockstore.header import decode_header, encode_header
from blockstore.records import Header
from cache_cases import bits, continue_cache, facts
from kvcodecs import HeaderEntry, default_provider
from kvcodecs.algebra import Snapshot, SnapshotContext
from kvcodecs.entry import DTYPES
from kvcodecs.geometry import KINDS
from token_caches import IDENTITY

GOLDEN = Path(__file__).parent / "golden"
PROVIDER = default_provider()


def golden_header(name: str) -> Header:
    data = (GOLDEN / name).read_bytes()
    return decode_header(data, path=name, file_size=len(data))


def golden_arrays(entry: HeaderEntry, first: int) -> list[mx.array]:
    """Arrays of the bytes that the manifest names: b[i] = (i * 131 + t * 17 + 3) & 255 for the t-th of the file."""
    arrays = []
    for number, slot in enumerate(entry.tensors, first):
        data = ((np.arange(slot.bytes) * 131 + number * 17 + 3) & 255).astype(np.uint8)
        array = mx.array(data).view(getattr(mx, DTYPES[slot.dtype][0]))
        arrays.append(array.reshape(slot.shape))
    return arrays


def loaded_from(entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any = None) -> Any:
    """What a load makes of an entry: its arrays placed in capacities whose spare rows hold something."""
    codec = PROVIDER.for_entry(entry, prototype)
    codec.check_prototype(entry, prototype)
    placed = []
    for index, array in enumerate(arrays):
        target = mx.full(codec.capacity(entry, index, prototype), 7, dtype=array.dtype)
        target[tuple(slice(0, size) for size in array.shape)] = array
        placed.append(target)
    return codec.load(entry, placed, prototype)


def golden_caches(name: str) -> tuple[Header, list[Any], list[mx.array]]:
    header, caches, arrays = golden_header(name), [], []
    for entry in header.caches:
        own = golden_arrays(entry, len(arrays))
        caches.append(loaded_from(entry, own))
        arrays += own
    return header, caches, arrays


def snapshot(caches: Sequence[Any], count: int) -> list[Snapshot]:
    return PROVIDER.snapshot(caches, SnapshotContext(count, whole_ring=True))


def assert_golden_comes_back(name: str) -> None:
    """A golden header passes its kind's check; its caches, saved again, say the same, to the last byte and field."""
    header, caches, arrays = golden_caches(name)
    for entry in header.caches:
        KINDS[entry.kind].check(entry)
    again = snapshot(caches, len(header.tokens))
    assert [bits(array) for part in again for array in part.arrays] == [bits(array) for array in arrays]
    for part, entry in zip(again, header.caches, strict=True):
        assert (part.entry.kind, part.entry.offset) == (entry.kind, entry.offset)
        assert list(part.entry.fields.items()) == list(entry.fields.items())
        assert [list(value.items()) for value in part.entry.fields.values() if isinstance(value, dict)] == [
            list(value.items()) for value in entry.fields.values() if isinstance(value, dict)
        ]
        assert part.entry.minimum_reusable_offset == entry.minimum_reusable_offset
        assert [(s.shape, s.dtype, s.bytes) for s in part.entry.tensors] == [
            (s.shape, s.dtype, s.bytes) for s in entry.tensors
        ]
    assert encode_header(header)  # the writer's own checks take it, too


def refused(entry: HeaderEntry, where: str) -> None:
    """The kind's check refuses `entry` for the field `where`."""
    with pytest.raises(ValueError, match="expected") as caught:
        KINDS[entry.kind].check(entry)
    assert getattr(caught.value, "where", None) == where


def save(store: Store, caches: Sequence[Any], count: int, layout: str = "segments") -> str:
    return store.save(list(range(count)), caches, IDENTITY, layout=layout).entry_id


def assert_shorter_load_is_a_trimmed_cache(store: Store, build: Any, length: int, layout: str) -> None:
    """A load cut to `length` tokens equals what trimming makes in memory, and goes on as that does."""
    caches = build()
    count = max(cache.offset for cache in caches)
    entry_id = save(store, caches, count, layout)
    kept = build()
    for cache in kept:
        cache.trim(max(cache.offset - length, 0))
    loaded = store.load(entry_id, build(), length=length).caches
    assert list(map(facts, loaded)) == list(map(facts, kept))
    assert continued(loaded) == continued(kept)


def continued(caches: Sequence[Any]) -> list[object]:
    return [bits(array) for i, cache in enumerate(caches) for array in continue_cache(cache, 1000 * i, steps=4)]
