"""Headers that were changed, put under an entry of a real store: by values, and by bytes.

What the header then says is served exactly, or it is a miss. Nothing else is raised, nothing is allocated that no
block could fill, and no other entry is concerned.
"""

import copy
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore import CacheMiss, Store
from format.headers import REMOVED, changed, entry, in_rows, pack
from store.damage_kit import repaired
from store_kit import all_facts, assert_clean, assert_exact, block_path, described, report_of
from token_caches import IDENTITY, hybrid, identity, plain, small_store

Json = Any
VICTIM = list(range(12))
OTHER = [*range(8), 90, 91, 92]
MEMORY_BYTES = 64 << 20
PREFIX_BYTES = 26

VALUES = st.sampled_from([
    None, True, False, -1, 0, 1, 2, 3, 4, 5, 12, 13, 255, 2**31 - 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**63, 10**30,
    0.5, 1e300, -0.0, "", "kv", "rotating", "arrays", "ssm", "list", "future", "sha256", "blake3", "f" * 64,
    "F" * 64, "0" * 63, "\0" * 64, "../" * 21 + "x", "ü", [], {}, [0], [[0, 0]], [[0, 1], [0, 0]], [[9, 9]], [4, 4, 4],
    [1] * 40, {"kind": "kv"},
])  # fmt: skip


# ---- changes to values


@st.composite
def changed_values(draw: st.DrawFn, value: Json) -> Json:
    """A copy of a JSON value with a few places in it set, removed, doubled, or exchanged for another place."""
    result = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(result))
        parent, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["set", "set", "nudge", "remove", "double", "exchange"]))
        if how == "remove":
            del parent[key]
        elif how == "double" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif how == "exchange":
            other, other_key = draw(st.sampled_from(places))
            parent[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(parent[key])
        elif how == "nudge":
            parent[key] = _nudged(parent[key], draw(st.integers(-2, 2)))
        else:
            parent[key] = draw(VALUES)
    return result


def _places(value: Json) -> Any:
    """Every place in a JSON value: the list or object, and the index or key in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _nudged(value: Json, by: int) -> Json:
    if type(value) is int:
        return value + by
    if isinstance(value, str) and value:
        at = by % len(value)
        return value[:at] + chr((ord(value[at]) ^ 1) & 127) + value[at + 1 :]
    return value[: len(value) // 2] if isinstance(value, list) else value


# ---- changes to bytes


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(result) - 1, 0)))
        how = draw(st.sampled_from(["flip", "flip", "set", "insert", "cut", "drop", "repeat"]))
        size = draw(st.sampled_from([1, 2, 8, 26, 100]))
        if how == "flip" and result:
            result[at] ^= 1 << draw(st.integers(0, 7))
        elif how in ("set", "insert"):
            end = at + size if how == "set" else at
            result[at:end] = draw(st.binary(min_size=1, max_size=8))
        elif how == "cut":
            del result[at:]
        elif how == "drop":
            del result[at : at + size]
        else:
            result[at:at] = result[at : at + size]
    return bytes(result)


# ---- what a header says, read without any code of the store


def said(store: Store, header: Json) -> list[tuple[tuple[int, ...], bytes]]:
    """Shape and bytes of every tensor that a header names, by FORMAT alone, from the blocks that it names."""
    slots = [slot for cache in header["caches"] for slot in _slots(cache)]
    found = [
        b"".join(block_path(store, block["hash"]).read_bytes() for block in slot.get("blocks") or ()) for slot in slots
    ]
    by_leaf = [leaf for cache in header["caches"] for leaf in _leaves(cache)]
    for group in header.get("segments") or ():
        members = [by_leaf[leaf]["tensors"][index] for leaf, index in group["tensors"]]
        data = b"".join(
            block_path(store, group["hashes"][at : at + 64]).read_bytes() for at in range(0, len(group["hashes"]), 64)
        )
        for slot, part in zip(members, _along(members, data, _counts(group, members[0])), strict=True):
            found[next(number for number, known in enumerate(slots) if known is slot)] = part
    return [(tuple(slot["shape"]), data) for slot, data in zip(slots, found, strict=True)]


def _leaves(cache: Json) -> list[Json]:
    return [leaf for child in cache["children"] for leaf in _leaves(child)] if cache["kind"] == "list" else [cache]


def _slots(cache: Json) -> list[Json]:
    return [slot for leaf in _leaves(cache) for slot in leaf["tensors"]]


def _counts(group: Json, slot: Json) -> list[int]:
    total = slot["shape"][slot["axis"]]
    return group.get("tokens") or [min(group["span"], total - at) for at in range(0, total, group["span"])]


def _along(slots: list[Json], data: bytes, counts: list[int]) -> list[bytes]:
    """Takes blocks apart: each holds, slot after slot, that slot's next tokens along its axis."""
    parts: list[list[np.ndarray[Any, Any]]] = [[] for _ in slots]
    at = 0
    for count in counts:
        for part, slot in zip(parts, slots, strict=True):
            shape, axis = slot["shape"], slot["axis"]
            tokens = slot["bytes"] // shape[axis] * count
            item = slot["bytes"] // int(np.prod(shape))
            whole = [*shape[:axis], count, *shape[axis + 1 :], item]
            part.append(np.frombuffer(data[at : at + tokens], np.uint8).reshape(whole))
            at += tokens
    assert at == len(data)
    return [np.concatenate(part, slot["axis"]).tobytes() for part, slot in zip(parts, slots, strict=True)]


# ---- what is done with it


class Case:
    """A store with a victim of some kind and cut, another entry that shares blocks with it, and one that does not."""

    def __init__(self, root: str, caches: Callable[[list[int]], list[Any]], layout: str) -> None:
        self.store = small_store(root)
        self.caches = caches
        self.victim = self.store.save(VICTIM, caches(VICTIM), IDENTITY, layout=layout, block_bytes=64)
        self.others = {
            self.store.save(tokens, caches(tokens), identity(ns), layout=layout, block_bytes=64).entry_id: tokens
            for ns, tokens in {"": OTHER, "apart": [50, 51, 52]}.items()
        }
        self.header = Path(self.victim.path)

    def forget_row(self) -> None:
        """As an index that was lost leaves it: the header and its blocks stand, and no row knows them."""
        with self.store.rooms.index.write() as books:
            books.doom(self.victim.entry_id)
            books.forget_doomed(self.victim.entry_id)

    def load(self) -> None:
        """A miss, or exactly what the header says."""
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        text = self.header.read_bytes()[PREFIX_BYTES:] if self.header.exists() else b""
        try:
            loaded = self.store.load(self.victim.entry_id)
        except CacheMiss:
            return
        finally:
            assert mx.get_peak_memory() - held < MEMORY_BYTES
        header, _ = json.JSONDecoder().raw_decode(text.decode())
        assert loaded.tokens == header["tokens"]
        found = [part for part in described(loaded.caches, len(loaded.tokens)) if isinstance(part[1], str)]
        assert [(shape, data) for shape, _, data in found] == said(self.store, header)

    def find(self) -> None:
        for tokens in ([*VICTIM, 1], [*OTHER, 1]):
            with suppress(CacheMiss):
                self.store.restore(tokens, IDENTITY)

    def others_load(self) -> None:
        for entry_id, tokens in self.others.items():
            assert all_facts(self.store.load(entry_id).caches) == all_facts(self.caches(tokens))


def go_through(case: Case, data: bytes, known: bool, steps: list[str]) -> None:
    """Put the header in place and do everything to the store that might meet it."""
    if not known:
        case.forget_row()
    case.header.write_bytes(data)
    acts: dict[str, Callable[[], object]] = {
        "load": case.load, "find": case.find, "gc": lambda: case.store.gc(full=True),
        "check": lambda: report_of(case.store), "others": case.others_load,
    }  # fmt: skip
    for step in steps:
        acts[step]()
    case.others_load()
    case.store.close()
    repaired(case.store)
    case.store = small_store(case.store.root)
    case.others_load()
    case.load()
    case.store.gc()
    assert_exact(case.store)
    assert_clean(case.store)


STEPS = st.permutations(["load", "find", "gc", "check", "others"])
KINDS: dict[str, tuple[Callable[[list[int]], list[Any]], str]] = {
    "segments": (lambda tokens: plain(tokens, 2), "segments"),
    "segments and a state": (hybrid, "segments"),
    "rows": (hybrid, "rows"),
}
# Each example is a store of its own, which is opened, repaired and opened again.
few = settings(max_examples=settings.default.max_examples // 3)
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@few
@given(data=st.data(), known=st.booleans(), steps=STEPS)
def test_a_header_with_other_values_serves_what_it_says_or_is_a_miss(
    kind: str, data: st.DataObject, known: bool, steps: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        case = Case(root, *KINDS[kind])
        try:
            value = json.loads(case.header.read_bytes()[PREFIX_BYTES:])
            go_through(case, _packed(data.draw(changed_values(value))), known, steps)
        finally:
            case.store.close()


def _packed(value: Json) -> bytes:
    return pack(json.dumps(value, separators=(",", ":")).encode(), version=5)


@each_kind
@few
@given(data=st.data(), rehashed=st.booleans(), known=st.booleans(), steps=STEPS)
def test_a_header_with_other_bytes_serves_what_it_says_or_is_a_miss(
    kind: str, data: st.DataObject, rehashed: bool, known: bool, steps: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        case = Case(root, *KINDS[kind])
        try:
            whole = case.header.read_bytes()
            if rehashed:
                found = pack(data.draw(changed_bytes(whole[PREFIX_BYTES:])), version=5)
            else:
                found = data.draw(changed_bytes(whole))
            go_through(case, found, known, steps)
        finally:
            case.store.close()


# What few random changes reach: values that the format allows and a store might stumble over.
EXTREMES: dict[str, dict[str, Any]] = {
    "a token beyond 31 bits": {"tokens[3]": 2**31},
    "a token beyond 32 bits": {"tokens[3]": 2**32},
    "the largest token": {"tokens[11]": 2**53 - 1},
    "no tokens": {"tokens": []},
    "no caches": {"caches": [], "segments": []},
    "no tokens and no caches": {"tokens": [], "caches": [], "segments": []},
    "the latest date": {"createdAt": 2**53 - 1},
    "another identity": {"modelId": "other"},
    "no identity": dict.fromkeys(("modelId", "configFingerprint", "tokenizerHash", "ns"), REMOVED),
    "another provider": {"codecProvider": "mlx-cache-v3"},
    "the other hash": {"blockHash": "sha256"},
    "no hash": {"blockHash": REMOVED},
    "the version of a file": {"formatVersion": 4},
    "another dtype of the same size": {"caches[0].tensors[0].dtype": 3},
    "a minimum": {"caches[0].minimumReusableOffset": 12},
    "a vast attachment without bytes": {
        "attachments": [{"schema": "s", "metadata": {}, "tensors": [{**in_rows(2**31 - 1, 2**20, 0), "bytes": 0}]}]
    },
    "a vast attachment": {
        "attachments": [{"schema": "s", "metadata": {}, "tensors": [in_rows(2**30, 2**10)]}]
    },
    "many caches of nothing": {"caches[1]": entry("list", 0, [], children=[entry("kv", 0, [])] * 1_000)},
    "a vast cache without bytes": {
        "caches[1]": entry("kv", 12, [in_rows(1, 2**31 - 1, 12, 0), in_rows(1, 2**31 - 1, 12, 0)])
    },
}  # fmt: skip


@pytest.mark.parametrize("known", [True, False], ids=["known", "stray"])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_are_served_or_missed(extreme: str, known: bool, tmp_path: Path) -> None:
    case = Case(str(tmp_path / "store"), *KINDS["segments and a state"])
    try:
        value = json.loads(case.header.read_bytes()[PREFIX_BYTES:])
        go_through(case, _packed(changed(value, **EXTREMES[extreme])), known, ["check", "gc", "load", "find"])
    finally:
        case.store.close()


# ---- that the reader above reads


@each_kind
def test_a_header_that_was_not_changed_serves_what_it_says(kind: str, tmp_path: Path) -> None:
    case = Case(str(tmp_path / "store"), *KINDS[kind])
    loaded = case.store.load(case.victim.entry_id)
    assert all_facts(loaded.caches) == all_facts(case.caches(VICTIM))
    go_through(case, case.header.read_bytes(), True, ["load", "gc", "check", "find"])
    assert case.victim.entry_id in {entry.entry_id for entry in case.store.entries()}
    case.store.close()
