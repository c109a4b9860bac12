"""What each kind of cache allows: arithmetic on header entries, without mlx and without a file.

One frozen `Geometry` a kind (FORMAT 5 and 6). The store asks it where the token axis is, which positions the tokens
along it hold, whether an entry may be shortened, and whether an entry read from a file is possible at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from . import geometry_checks as checks
from .entry import HeaderEntry, Slot
from .geometry_checks import TURBOQUANT_GROUP, BadEntry, natural, ring_rows

__all__ = [
    "KINDS",
    "TURBOQUANT_GROUP",
    "BadEntry",
    "Geometry",
    "Run",
    "group_class",
    "list_shortens",
    "minimum_reusable",
    "natural",
    "ring_rows",
    "shortened",
    "shortens",
]


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


def _offset(entry: HeaderEntry) -> int:
    return entry.offset


def _zero(entry: HeaderEntry) -> int:
    return 0


@dataclass(frozen=True)
class Geometry:
    """The rules of one kind.

    names: the tensors in header order (None: any number).
    rank: the rank that each tensor has (None: any).
    axis: the token axis of every tensor (None: the kind has none).
    static: the fields that must be equal for two caches to be cut into one group.
    required: the fields that must be there, as integers.
    count: how many of `names` an entry has.
    may_trail: by how many tokens the offset may be less than what the whole cache list encodes.
    tokens: how many tokens stand along the token axis of a non-empty entry.
    runs: the positions that they hold, in the order in which they are laid out.
    shortens: whether the entry may be cut to a prefix.
    shortened: the fields of the entry when it is cut to n tokens; none where they stay as they are.
    minimum: the least length to which an entry may be cut that names none.
    verify: checks beyond ranks and token counts; raises BadEntry.
    """

    kind: str
    names: tuple[str, ...] | None
    rank: int | None = None
    axis: int | None = None
    static: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    may_be_empty: bool = True
    may_trail: int = 0
    count: Callable[[HeaderEntry], int | None] = _nothing
    tokens: Callable[[HeaderEntry], int | None] = _nothing
    runs: Callable[[HeaderEntry], tuple[Run, ...]] = lambda entry: ()
    shortens: Callable[[HeaderEntry], bool] = _never
    shortened: Callable[[HeaderEntry, int], dict[str, Any]] = lambda entry, n: {}
    minimum: Callable[[HeaderEntry], int] = _zero
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

    def names_of(self, entry: HeaderEntry) -> tuple[str, ...] | None:
        """The tensors that `entry` has, in header order (None: any number)."""
        return None if self.names is None else self.names[: self.count(entry)]

    def _check_empty(self, entry: HeaderEntry) -> None:
        if not self.may_be_empty:
            raise BadEntry("tensors", f"{len(self.names_of(entry) or ())} tensors of kind {entry.kind}", [])
        if entry.offset != 0:
            raise BadEntry("offset", "0, since the cache holds no tensor", entry.offset)

    def _check_tensors(self, entry: HeaderEntry) -> None:
        names = self.names_of(entry)
        if names is not None and len(entry.tensors) != len(names):
            raise BadEntry("tensors", f"{len(names)} ({', '.join(names)})", len(entry.tensors))
        tokens = self.tokens(entry)
        for i, tensor in enumerate(entry.tensors):
            if self.rank is not None and len(tensor.shape) != self.rank:
                raise BadEntry(f"tensors[{i}].shape", f"{self.rank} dimensions", list(tensor.shape))
            if self.axis is not None and tensor.shape[self.axis] != entry.tensors[0].shape[self.axis]:
                raise BadEntry(f"tensors[{i}].shape", "as many tokens as the first tensor", list(tensor.shape))
            if self.axis is not None and tokens is not None and tensor.shape[self.axis] != tokens:
                raise BadEntry(f"tensors[{i}].shape", f"{tokens} tokens on axis {self.axis}", list(tensor.shape))


# ---- token axes whose first row is position 0


def _straight(entry: HeaderEntry) -> tuple[Run, ...]:
    return (Run(0, entry.offset),)


# ---- rings


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


# ---- chunked


def _chunk_tokens(entry: HeaderEntry) -> int:
    return entry.offset - natural(entry, "startPosition")


def _chunk_runs(entry: HeaderEntry) -> tuple[Run, ...]:
    start = int(entry.fields["startPosition"])
    return (Run(start, entry.offset - start),)


def _chunk_shortens(entry: HeaderEntry) -> bool:
    return entry.fields.get("startPosition") == 0


# ---- pages


def _paged_count(entry: HeaderEntry) -> int:
    return len(KEYS_VALUES if entry.fields.get("bits") is None else PAGED)


# ---- the table

KEYS_VALUES = ("keys", "values")
QUANTIZED = ("keys", "keyScales", "keyBiases", "values", "valueScales", "valueBiases")
PAGED = ("keys", "values", "keyScales", "keyBiases", "valueScales", "valueBiases")
TURBOQUANT = ("kIdx", "kScales", "kZeros", "vPacked", "vScales")
LATENT = ("latent", "rope")
LATENT_FIELDS = ("kvLoraRank", "ropeHeadDim", "maxTokens")

_KINDS = (
    Geometry(
        "kv", KEYS_VALUES, 4, 2, tokens=_offset, runs=_straight, shortens=_always,
        verify=checks.verify_same_batch,
    ),
    Geometry(
        "qkv", QUANTIZED, 4, 2, static=("groupSize", "bits"), required=("groupSize", "bits"),
        tokens=_offset, runs=_straight, shortens=_always, verify=checks.verify_quantized,
    ),
    Geometry(
        "rotating", KEYS_VALUES, 4, 2, static=("maxSize", "keep"), required=("idx", "maxSize"),
        runs=_ring_runs, shortens=_ring_shortens, shortened=_ring_shortened, verify=checks.verify_ring,
    ),
    Geometry(
        "rotating-qkv", QUANTIZED, 4, 2, static=("maxSize", "keep", "groupSize", "bits"),
        required=("idx", "maxSize", "groupSize", "bits"),
        runs=_ring_runs, shortens=_ring_shortens, shortened=_ring_shortened, verify=checks.verify_quantized_ring,
    ),
    Geometry("ssm", ("conv", "recurrent"), may_be_empty=False),
    Geometry(
        "chunked", KEYS_VALUES, 4, 2, static=("chunkSize",), required=("chunkSize", "startPosition"),
        tokens=_chunk_tokens, runs=_chunk_runs, shortens=_chunk_shortens, verify=checks.verify_chunked,
    ),
    Geometry("arrays", None, verify=checks.verify_arrays),
    Geometry("list", ()),
    Geometry(
        "turboquant", TURBOQUANT, 4, 2, static=("kBits", "vBits", "headDim"), may_be_empty=False,
        tokens=_offset, runs=_straight, shortens=_always, minimum=_offset, verify=checks.verify_turboquant,
    ),
    Geometry(
        "mla", LATENT, 3, 1, static=LATENT_FIELDS, may_be_empty=False,
        tokens=_offset, runs=_straight, shortens=_always, verify=checks.verify_latent,
    ),
    Geometry(
        "mla-dsa", (*LATENT, "dsa"), 3, 1, static=(*LATENT_FIELDS, "dsaHeadDim"), may_be_empty=False,
        tokens=_offset, runs=_straight, shortens=_always, verify=checks.verify_latent,
    ),
    Geometry(
        "mtp-mla", LATENT, 3, 1, static=LATENT_FIELDS, may_be_empty=False, may_trail=1,
        tokens=_offset, runs=_straight, shortens=_always, verify=checks.verify_latent,
    ),
    Geometry(
        "paged", PAGED, 4, may_be_empty=False, count=_paged_count, shortens=_always, verify=checks.verify_paged,
    ),
)  # fmt: skip
KINDS: dict[str, Geometry] = {geometry.kind: geometry for geometry in _KINDS}


# ---- questions about entries and lists of them


def minimum_reusable(entry: HeaderEntry) -> int:
    """The least length to which `entry` may be shortened, in tokens. Absent means 0, or what its kind says."""
    own, geometry = entry.minimum_reusable_offset, KINDS.get(entry.kind)
    if own is None:
        own = 0 if geometry is None else geometry.minimum(entry)
    return max([own, *map(minimum_reusable, entry.children)])


def shortens(entry: HeaderEntry) -> bool:
    """True where `entry` may be shortened to a prefix. What holds nothing stays what it is."""
    if entry.is_empty:
        return True
    if entry.children:
        return all(shortens(child) for child in entry.children)
    geometry = KINDS.get(entry.kind)
    return geometry is not None and geometry.shortens(entry)


def shortened(entry: HeaderEntry, n: int) -> HeaderEntry:
    """What the header would say of the first `n` tokens of `entry`, which shortens; one that holds fewer stays.

    Without a token axis the tensors stay whole, and the offset alone says how much of them counts.
    """
    if entry.is_empty or entry.offset <= n:
        return entry
    children = tuple(shortened(child, n) for child in entry.children)
    geometry = KINDS[entry.kind]
    tensors = tuple(_first(tensor, geometry.axis, n) for tensor in entry.tensors)
    fields = geometry.shortened(entry, n) or entry.fields
    return msgspec.structs.replace(entry, offset=n, fields=fields, tensors=tensors, children=children)


def _first(tensor: Slot, axis: int | None, n: int) -> Slot:
    if axis is None:
        return tensor
    shape = (*tensor.shape[:axis], n, *tensor.shape[axis + 1 :])
    size = tensor.bytes // max(tensor.shape[axis], 1) * n
    return msgspec.structs.replace(tensor, shape=shape, bytes=size, blocks=None)


def live(entry: HeaderEntry) -> HeaderEntry:
    """The entry without the rows of rings that hold nothing yet, as segments store it."""
    if entry.children:
        return msgspec.structs.replace(entry, children=tuple(map(live, entry.children)))
    geometry = KINDS.get(entry.kind)
    ring = geometry is not None and geometry.runs is _ring_runs and bool(entry.tensors)
    if not ring or entry.offset >= ring_rows(entry):
        return entry
    tensors = tuple(_first(tensor, 2, entry.offset) for tensor in entry.tensors)
    return msgspec.structs.replace(entry, tensors=tensors)


def group_class(entry: HeaderEntry) -> tuple[object, ...]:
    """What two entries must share for their tensors to stand in one segment group."""
    return (entry.kind, *(entry.fields.get(name) for name in KINDS[entry.kind].static))


def list_shortens(entries: Sequence[HeaderEntry]) -> bool:
    return all(shortens(entry) for entry in entries)
