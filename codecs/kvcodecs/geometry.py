"""What each kind of cache allows: arithmetic on header entries, without mlx and without a file.

One frozen `Geometry` a kind (FORMAT 5 and 6). The store asks it where the token axis is, which positions the tokens
along it hold, whether an entry may be shortened, and whether an entry read from a file is possible at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .entry import HeaderEntry, Slot


class BadEntry(ValueError):
    """A header entry that no cache could have written. `where` names the field, with what was expected and found."""

    def __init__(self, where: str, expected: object, found: object) -> None:
        super().__init__(f"{where}: expected {expected}, found {found!r}")
        self.where, self.expected, self.found = where, expected, found


@dataclass(frozen=True)
class Run:
    """`length` tokens that stand side by side along the token axis and hold consecutive positions from `position`."""

    position: int
    length: int


def _nothing(entry: HeaderEntry) -> None:
    return None


def _never(entry: HeaderEntry) -> bool:
    return False


def _always(entry: HeaderEntry) -> bool:
    return True


@dataclass(frozen=True)
class Geometry:
    """The rules of one kind.

    names: the tensors in header order (None: any number).
    ranks: the rank that each tensor has (None: any).
    axis: the token axis of every tensor (None: the kind has none).
    static: the fields that must be equal for two caches to be cut into one group.
    tokens: how many tokens stand along the token axis of a non-empty entry.
    runs: the positions that they hold, in the order in which they are laid out.
    shortens: whether the entry may be cut to a prefix.
    verify: checks beyond ranks and token counts; raises BadEntry.
    """

    kind: str
    names: tuple[str, ...] | None
    rank: int | None = None
    axis: int | None = None
    static: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    may_be_empty: bool = True
    tokens: Callable[[HeaderEntry], int | None] = _nothing
    runs: Callable[[HeaderEntry], tuple[Run, ...]] = lambda entry: ()
    shortens: Callable[[HeaderEntry], bool] = _never
    shortened: Callable[[HeaderEntry, int], dict[str, Any]] = lambda entry, n: {}
    verify: Callable[[HeaderEntry], None] = _nothing

    def check(self, entry: HeaderEntry) -> None:
        """Raise BadEntry unless a cache of this kind could have written `entry`."""
        for name in self.required:
            natural(entry, name)
        if not entry.tensors and not entry.children:
            self._check_empty(entry)
            if self.names is None:
                self.verify(entry)
            return
        self._check_tensors(entry)
        self.verify(entry)

    def _check_empty(self, entry: HeaderEntry) -> None:
        if not self.may_be_empty:
            raise BadEntry("tensors", f"{len(self.names or ())} tensors of kind {entry.kind}", [])
        if entry.offset != 0:
            raise BadEntry("offset", "0, since the cache holds no tensor", entry.offset)

    def _check_tensors(self, entry: HeaderEntry) -> None:
        if self.names is not None and len(entry.tensors) != len(self.names):
            raise BadEntry("tensors", f"{len(self.names)} ({', '.join(self.names)})", len(entry.tensors))
        tokens = self.tokens(entry)
        for i, tensor in enumerate(entry.tensors):
            if self.rank is not None and len(tensor.shape) != self.rank:
                raise BadEntry(f"tensors[{i}].shape", f"{self.rank} dimensions", list(tensor.shape))
            if self.axis is not None and tensor.shape[self.axis] != entry.tensors[0].shape[self.axis]:
                raise BadEntry(f"tensors[{i}].shape", "as many tokens as the first tensor", list(tensor.shape))
            if self.axis is not None and tokens is not None and tensor.shape[self.axis] != tokens:
                raise BadEntry(f"tensors[{i}].shape", f"{tokens} tokens on axis {self.axis}", list(tensor.shape))


def natural(entry: HeaderEntry, name: str, least: int = 0) -> int:
    """The integer field `name` of `entry`, at least `least`; BadEntry where it is missing or something else."""
    value = entry.fields.get(name)
    if type(value) is not int or not least <= value < 1 << 53:
        raise BadEntry(name, f"an integer ≥ {least}", value)
    return value


# ---- token axes whose first row is position 0


def _offset_tokens(entry: HeaderEntry) -> int:
    return entry.offset


def _straight(entry: HeaderEntry) -> tuple[Run, ...]:
    return (Run(0, entry.offset),)


# ---- rings


def ring_rows(entry: HeaderEntry) -> int:
    """How many rows the ring of a rotating entry has as stored."""
    return entry.tensors[0].shape[2]


def _ring_runs(entry: HeaderEntry) -> tuple[Run, ...]:
    """The positions of a ring, row by row.

    While nothing has been dropped, row i holds position i. Afterwards the first `keep` rows stay, rows from idx on
    hold the oldest tokens of the window, and rows before idx the newest, ending at offset − 1.
    """
    rows, offset, idx = ring_rows(entry), entry.offset, entry.fields["idx"]
    if offset <= rows:
        return (Run(0, rows),)
    keep = min(entry.fields.get("keep", 0), rows)
    kept, newest, oldest = keep, max(idx - keep, 0), rows - max(idx, keep)
    parts = (Run(0, kept), Run(offset - newest, newest), Run(offset - newest - oldest, oldest))
    return tuple(run for run in parts if run.length)


def _ring_shortens(entry: HeaderEntry) -> bool:
    return entry.offset < int(entry.fields["maxSize"]) and entry.offset <= ring_rows(entry)


def _ring_shortened(entry: HeaderEntry, n: int) -> dict[str, Any]:
    return {**entry.fields, "idx": n}


def _ring_verify(entry: HeaderEntry) -> None:
    max_size, idx = natural(entry, "maxSize", 1), natural(entry, "idx")
    keep = natural(entry, "keep") if "keep" in entry.fields else 0
    rows = ring_rows(entry)
    if keep >= max_size:
        raise BadEntry("keep", f"less than maxSize {max_size}", keep)
    if idx > rows:
        raise BadEntry("idx", f"at most {rows}, the rows of the ring", idx)
    if entry.offset < rows and idx != entry.offset:
        raise BadEntry("idx", f"{entry.offset}, the offset, in a ring that is not full", idx)
    if entry.offset > rows and idx < keep:
        raise BadEntry("idx", f"at least keep {keep} in a ring that has dropped tokens", idx)


# ---- chunked


def _chunk_tokens(entry: HeaderEntry) -> int:
    return entry.offset - natural(entry, "startPosition")


def _chunk_runs(entry: HeaderEntry) -> tuple[Run, ...]:
    start = int(entry.fields["startPosition"])
    return (Run(start, entry.offset - start),)


def _chunk_shortens(entry: HeaderEntry) -> bool:
    return entry.fields.get("startPosition") == 0


def _chunk_verify(entry: HeaderEntry) -> None:
    natural(entry, "chunkSize", 1)


# ---- arrays


def _arrays_verify(entry: HeaderEntry) -> None:
    slots = entry.fields.get("slots")
    if not isinstance(slots, list) or any(type(flag) is not bool for flag in slots):
        raise BadEntry("slots", "a list of true and false, one for each slot", slots)
    if sum(slots) != len(entry.tensors):
        raise BadEntry("slots", f"{len(entry.tensors)} of them set, one for each tensor", slots)
    for name in ("lengths", "leftPadding"):
        values = entry.fields.get(name, [])
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise BadEntry(name, "a list of integers", values)


# ---- quantization


def _quantized_verify(entry: HeaderEntry) -> None:
    """Check packed, scales and biases of both sides against group size and bits (groups run along D)."""
    group, bits = natural(entry, "groupSize", 1), natural(entry, "bits", 1)
    if bits > 32:
        raise BadEntry("bits", "at most 32", bits)
    for side in (0, 3):
        packed, scales, biases = entry.tensors[side : side + 3]
        if scales.shape != biases.shape or packed.shape[:-1] != scales.shape[:-1]:
            raise BadEntry(f"tensors[{side + 2}].shape", f"as scales {list(scales.shape)}", list(biases.shape))
        if packed.shape[-1] * 32 != scales.shape[-1] * group * bits:
            width = scales.shape[-1] * group * bits // 32
            raise BadEntry(f"tensors[{side}].shape", f"{width} words for groups of {group}", list(packed.shape))


def _rotating_quantized_verify(entry: HeaderEntry) -> None:
    _ring_verify(entry)
    _quantized_verify(entry)


def _same_leading(entry: HeaderEntry) -> None:
    first = entry.tensors[0].shape
    for i, tensor in enumerate(entry.tensors):
        if tensor.shape[:1] != first[:1]:
            raise BadEntry(f"tensors[{i}].shape", f"batch {first[0]}", list(tensor.shape))


KEYS_VALUES = ("keys", "values")
QUANTIZED = ("keys", "keyScales", "keyBiases", "values", "valueScales", "valueBiases")

_KINDS = (
    Geometry(
        "kv", KEYS_VALUES, 4, 2, tokens=_offset_tokens, runs=_straight, shortens=_always, verify=_same_leading,
    ),
    Geometry(
        "qkv", QUANTIZED, 4, 2, static=("groupSize", "bits"), required=("groupSize", "bits"),
        tokens=_offset_tokens, runs=_straight, shortens=_always, verify=_quantized_verify,
    ),
    Geometry(
        "rotating", KEYS_VALUES, 4, 2, static=("maxSize", "keep"), required=("idx", "maxSize"),
        runs=_ring_runs, shortens=_ring_shortens, shortened=_ring_shortened, verify=_ring_verify,
    ),
    Geometry(
        "rotating-qkv", QUANTIZED, 4, 2, static=("maxSize", "keep", "groupSize", "bits"),
        required=("idx", "maxSize", "groupSize", "bits"),
        runs=_ring_runs, shortens=_ring_shortens, shortened=_ring_shortened, verify=_rotating_quantized_verify,
    ),
    Geometry("ssm", ("conv", "recurrent"), may_be_empty=False),
    Geometry(
        "chunked", KEYS_VALUES, 4, 2, static=("chunkSize",), required=("chunkSize", "startPosition"),
        tokens=_chunk_tokens, runs=_chunk_runs, shortens=_chunk_shortens, verify=_chunk_verify,
    ),
    Geometry("arrays", None, verify=_arrays_verify),
    Geometry("list", ()),
)  # fmt: skip
KINDS: dict[str, Geometry] = {geometry.kind: geometry for geometry in _KINDS}


# ---- questions about entries and lists of them


def minimum_reusable(entry: HeaderEntry) -> int:
    """The least length to which `entry` may be shortened, in tokens. Absent means 0."""
    return max([entry.minimum_reusable_offset or 0, *map(minimum_reusable, entry.children)])


def shortens(entry: HeaderEntry) -> bool:
    """True where `entry` may be shortened to a prefix. What holds nothing stays what it is."""
    if entry.is_empty:
        return True
    if entry.children:
        return all(shortens(child) for child in entry.children)
    geometry = KINDS.get(entry.kind)
    return geometry is not None and geometry.shortens(entry)


def shortened(entry: HeaderEntry, n: int) -> HeaderEntry:
    """What the header would say of the first `n` tokens of `entry`, which shortens and holds at least `n`."""
    if entry.is_empty or entry.offset <= n:
        return entry
    children = tuple(shortened(child, n) for child in entry.children)
    geometry = KINDS[entry.kind]
    tensors = tuple(_first(tensor, geometry.axis, n) for tensor in entry.tensors)
    fields = geometry.shortened(entry, n) or entry.fields
    return msgspec.structs.replace(entry, offset=n, fields=fields, tensors=tensors, children=children)


def _first(tensor: Slot, axis: int | None, n: int) -> Slot:
    assert axis is not None, "only kinds with a token axis shorten"
    shape = (*tensor.shape[:axis], n, *tensor.shape[axis + 1 :])
    size = tensor.bytes // max(tensor.shape[axis], 1) * n
    return msgspec.structs.replace(tensor, shape=shape, bytes=size, blocks=None)


def group_class(entry: HeaderEntry) -> tuple[object, ...]:
    """What two entries must share for their tensors to stand in one segment group."""
    return (entry.kind, *(entry.fields.get(name) for name in KINDS[entry.kind].static))


def list_shortens(entries: Sequence[HeaderEntry]) -> bool:
    return all(shortens(entry) for entry in entries)
