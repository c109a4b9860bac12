"""Every class in every state: snapshot, load in memory, and go on as if nothing had happened."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache_cases import CASES, UINTS, arrays_of, bits, caches_equal, continue_cache, facts, reload, token_count
from kvcodecs import HeaderEntry, default_provider
from kvcodecs.algebra import Snapshot, SnapshotContext
from kvcodecs.entry import leaves
from kvcodecs.geometry import KINDS

pytestmark = pytest.mark.mlx_lm
each_case = pytest.mark.parametrize("build", CASES.values(), ids=CASES)
Build = Callable[[], list[Any]]


def snapshot(caches: list[Any], whole_ring: bool = False) -> list[Snapshot]:
    return default_provider().snapshot(caches, SnapshotContext(token_count(caches), whole_ring))


def continued(caches: list[Any]) -> list[Any]:
    return [bits(array) for i, cache in enumerate(caches) for array in continue_cache(cache, 1000 * i)]


@each_case
@pytest.mark.parametrize("whole_ring", [False, True], ids=["live rows", "whole ring"])
def test_a_loaded_cache_is_equal_and_goes_on_equally(build: Build, whole_ring: bool) -> None:
    kept, saved = build(), build()
    loaded = reload(snapshot(saved, whole_ring), prototypes=build())
    assert [facts(cache) for cache in loaded] == [facts(cache) for cache in kept]
    assert continued(loaded) == continued(kept)


@each_case
def test_without_a_prototype_it_goes_on_equally(build: Build) -> None:
    loaded = reload(snapshot(build()), stale=3)
    assert continued(loaded) == continued(build())


@each_case
def test_a_second_snapshot_says_the_same(build: Build) -> None:
    first = snapshot(build())
    second = snapshot(reload(first, prototypes=build()))
    assert [part.entry for part in second] == [part.entry for part in first]
    assert [bits(array) for part in second for array in part.arrays] == [
        bits(array) for part in first for array in part.arrays
    ]


@each_case
def test_entries_describe_their_arrays_and_pass_every_check(build: Build) -> None:
    for part in snapshot(build()):
        found = list(leaves([part.entry]))
        for leaf in found:
            KINDS[leaf.kind].check(leaf)
        slots = [slot for leaf in found for slot in leaf.tensors]
        assert [(slot.shape, slot.bytes) for slot in slots] == [(tuple(a.shape), a.nbytes) for a in part.arrays]


@each_case
def test_snapshots_do_not_change_the_cache_and_hold_other_objects(build: Build) -> None:
    caches = build()
    before = [facts(cache) for cache in caches]
    own = [id(array) for cache in caches for array in arrays_of(cache)]
    taken = snapshot(caches)
    assert [facts(cache) for cache in caches] == before
    assert [id(array) for cache in caches for array in arrays_of(cache)] == own
    assert not {id(array) for part in taken for array in part.arrays} & set(own)


@each_case
@pytest.mark.parametrize("whole_ring", [False, True], ids=["live rows", "whole ring"])
def test_what_the_cache_does_next_leaves_a_snapshot_alone(build: Build, whole_ring: bool) -> None:
    caches = build()
    expected = [bits(array)[2] for part in snapshot(build(), whole_ring) for array in part.arrays]
    late, early = snapshot(caches, whole_ring), snapshot(caches, whole_ring)
    views = [array.view(UINTS[array.dtype.size]) for part in early for array in part.arrays]
    mx.eval(views)
    memory = [np.asarray(memoryview(view)) if view.size else np.zeros(0) for view in views]
    continued(caches)
    assert [view.tobytes() for view in memory] == expected
    assert [bits(array)[2] for part in late for array in part.arrays] == expected


@each_case
@pytest.mark.parametrize("first", ["the clone", "the original"])
def test_clones_are_independent(build: Build, first: str) -> None:
    original, expected = build(), build()
    clone = default_provider().clone(original)
    assert all(caches_equal(a, b) for a, b in zip(clone, expected, strict=True))
    assert not {id(array) for cache in clone for array in arrays_of(cache)} & {
        id(array) for cache in original for array in arrays_of(cache)
    }
    one, other = (clone, original) if first == "the clone" else (original, clone)
    assert continued(one) == continued(build())
    assert all(caches_equal(a, b) for a, b in zip(other, expected, strict=True))
    assert continued(other) == continued(expected)


def test_clones_share_memory_until_one_of_them_goes_on() -> None:
    cache = CASES["ours kv: one past 256"]()[0]
    mx.eval(cache.state)
    used = mx.get_active_memory()
    clone = default_provider().clone([cache])[0]
    mx.eval(clone.state)
    assert mx.get_active_memory() == used
    continue_cache(clone, 0, steps=1)
    assert mx.get_active_memory() - used >= cache.nbytes


# ---- what exactly is stored


def entries(name: str, whole_ring: bool = False) -> list[HeaderEntry]:
    return [part.entry for part in snapshot(CASES[name](), whole_ring)]


def test_only_live_rows_are_stored() -> None:
    (entry,) = entries("ours kv: trimmed and regrown")
    assert (entry.kind, entry.offset, entry.fields) == ("kv", 17, {})
    assert [slot.shape for slot in entry.tensors] == [(1, 2, 17, 64), (1, 2, 17, 32)]


@pytest.mark.parametrize(("whole_ring", "rows"), [(False, 3), (True, 8)])
def test_a_ring_that_is_not_full(whole_ring: bool, rows: int) -> None:
    (entry,) = entries("mlx-lm rotating: not full, token by token", whole_ring)
    assert entry.fields == {"idx": 3, "maxSize": 8}
    assert entry.tensors[0].shape[2] == rows


def test_a_ring_that_is_longer_than_its_window() -> None:
    (entry,) = entries("mlx-lm rotating keep 3: longer than its window")
    assert (entry.offset, list(entry.fields.items())) == (13, [("idx", 13), ("maxSize", 8), ("keep", 3)])
    assert entry.tensors[0].shape[2] == 13


def test_fields_and_order_of_a_quantized_ring() -> None:
    (entry,) = entries("ours rotating-qkv: wrapped")
    assert list(entry.fields.items()) == [("idx", 3), ("maxSize", 8), ("groupSize", 32), ("bits", 4)]
    assert [slot.shape for slot in entry.tensors] == [
        (1, 2, 8, 8), (1, 2, 8, 2), (1, 2, 8, 2), (1, 2, 8, 4), (1, 2, 8, 1), (1, 2, 8, 1),
    ]  # fmt: skip


def test_fields_of_arrays() -> None:
    (padded,) = entries("mlx-lm arrays: left padding")
    assert (padded.offset, padded.fields) == (9, {"slots": [True, False], "leftPadding": [2, 0]})
    (fresh,) = entries("mlx-lm arrays: fresh")
    assert (fresh.offset, fresh.fields, fresh.tensors) == (0, {"slots": [False, False]}, ())


def test_a_list_has_the_offset_and_the_arrays_of_its_leaves() -> None:
    (entry,) = entries("mlx-lm list: nested")
    assert (entry.kind, entry.offset, entry.tensors) == ("list", 9, ())
    assert [leaf.kind for leaf in leaves([entry])] == ["kv", "kv", "arrays", "rotating"]


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("fresh", "trimmed to nothing"))])
def test_what_holds_nothing_stores_nothing(name: str) -> None:
    (entry,) = entries(name)
    assert entry.is_empty
    assert entry.offset == 0


def test_the_least_length_travels_along() -> None:
    parts = snapshot(CASES["ours kv: with a least length"]())
    assert parts[0].entry.minimum_reusable_offset == 4
    assert reload(parts)[0].minimum_reusable_offset == 4
    assert default_provider().clone(reload(parts))[0].minimum_reusable_offset == 4
    elsewhere = reload(parts, prototypes=CASES["mlx-lm kv: fresh"]())
    assert snapshot(elsewhere)[0].entry.minimum_reusable_offset == 4


# ---- room to go on


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("ours kv: one short of 256", 256),
        ("mlx-lm kv: at 256", 512),
        ("mlx-lm qkv: at 256", 512),
        ("mlx-lm concatenate: filled", 6),
        ("mlx-lm rotating: wrapped", 8),
        ("mlx-lm rotating: longer than its window", 13),
        ("mlx-lm chunked: first chunk", 256),
        ("mlx-lm chunked: before its front is trimmed", 512),
    ],
)
def test_capacity(name: str, rows: int) -> None:
    caches = CASES[name]()
    (entry,) = entries(name)
    codec = default_provider().for_entry(entry, caches[0])
    assert {codec.capacity(entry, i)[2] for i in range(len(entry.tensors))} == {rows}


@pytest.mark.parametrize("name", [name for name in CASES if "rotating" in name and "fresh" not in name])
def test_a_ring_comes_back_with_just_the_rows_that_were_stored(name: str) -> None:
    """Spare rows would be written when it is saved again as it lies, so that the file would not be the same."""
    parts = snapshot(CASES[name]())
    for part, loaded in zip(parts, reload(parts), strict=True):
        assert [array.shape for array in arrays_of(loaded)] == [array.shape for array in part.arrays]


@pytest.mark.parametrize("name", ["ours kv: at 256", "ours qkv: at 256"])
def test_the_next_token_grows_nothing(name: str) -> None:
    (loaded,) = reload(snapshot(CASES[name]()))
    size = loaded.nbytes
    continue_cache(loaded, 0, steps=1)
    assert loaded.nbytes == size


def test_concatenate_stores_what_a_trim_has_left() -> None:
    (cache,) = CASES["mlx-lm concatenate: filled"]()
    expected = [bits(array[..., :4, :]) for array in arrays_of(cache)]
    assert cache.trim(2) == 2
    (loaded,) = reload(snapshot([cache]), prototypes=[type(cache)()])
    assert loaded.offset == 4
    assert [bits(array) for array in arrays_of(loaded)] == expected
