"""Where tensors are cut into blocks (FORMAT 4 and 6): arithmetic on header entries, no bytes and no mlx.

Segments, the default: some tokens of some layers in one block, cut along the token axis at absolute positions, so that
equal prefixes of equal geometry share every full block. Rows: each tensor by itself, restarting at every row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from kvcodecs.entry import HeaderEntry, Slot
from kvcodecs.geometry import KINDS, Run, group_class

from .errors import InvalidInput

DEFAULT_SPAN: Final = 64
DEFAULT_BLOCK_BYTES: Final = 1 << 20
WIDEST_TOKEN_BYTES: Final = 16 << 20
Ref = tuple[int, int]  # (leaf, slot)


@dataclass(frozen=True)
class GroupPlan:
    """Tensors that are cut together: block i holds the next `counts[i]` tokens of each, along its token axis."""

    span: int
    axis: int
    tensors: tuple[Ref, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class LoosePlan:
    """One tensor whose C-order elements are cut by themselves: block i holds the next `counts[i]` elements."""

    tensor: Ref
    counts: tuple[int, ...]


Part = GroupPlan | LoosePlan


@dataclass(frozen=True)
class CutPlan:
    """The whole cut of a cache list; blocks are numbered through `parts`."""

    groups: tuple[GroupPlan, ...]
    loose: tuple[LoosePlan, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.groups, *self.loose)


def plan(layout: str, leaves: Sequence[HeaderEntry], span: int, block_bytes: int) -> CutPlan:
    """The cut that `layout` names: "segments", "rows", or "monolith", which cuts nothing. Raises InvalidInput."""
    if layout == "segments":
        return segments(leaves, span, block_bytes)
    if layout == "rows":
        return rows(numbered(leaves), block_bytes)
    if layout == "monolith":
        return CutPlan((), ())
    raise InvalidInput("unknown layout", field="layout", expected=["segments", "rows", "monolith"], found=layout)


def segments(leaves: Sequence[HeaderEntry], span: int, block_bytes: int) -> CutPlan:
    """The segment cut of `leaves`: groups depend on geometry alone, never on length or history."""
    drafts: list[_Draft] = []
    grouped: set[Ref] = set()
    for ref, axis in _token_tensors(leaves):
        grouped.add(ref)
        _join(drafts, leaves, ref, axis, span, block_bytes)
    groups = tuple(group for draft in drafts for group in draft.split(leaves, block_bytes))
    return CutPlan(groups, tuple(_loose(leaves, grouped, block_bytes)))


def rows(tensors: Iterable[tuple[Ref, Slot]], block_bytes: int) -> CutPlan:
    """The rows cut: every tensor by itself, the cut restarting at each row (the last two dimensions)."""
    loose = [LoosePlan(ref, _row_counts(tensor, block_bytes)) for ref, tensor in tensors]
    return CutPlan((), tuple(loose))


def numbered(leaves: Sequence[HeaderEntry]) -> Iterator[tuple[Ref, Slot]]:
    for leaf, entry in enumerate(leaves):
        for index, tensor in enumerate(entry.tensors):
            yield (leaf, index), tensor


def token_bytes(tensor: Slot, axis: int) -> int:
    """Bytes that one token takes in `tensor`."""
    return tensor.bytes // tensor.shape[axis]


def position_counts(runs: Iterable[Run], span: int) -> tuple[int, ...]:
    """Tokens of each block: cut where the absolute position reaches a multiple of span, and between runs."""
    merged, counts = _merged(runs), list[int]()
    if len(merged) == 1 and merged[0].position % span == 0:
        return default_counts(merged[0].length, span)
    for run in merged:
        position, left = run.position, run.length
        while left:
            count = min(span - position % span, left)
            counts.append(count)
            position, left = position + count, left - count
    return tuple(counts)


def default_counts(tokens: int, span: int) -> tuple[int, ...]:
    """The counts that a group without `tokens` has: span each, the last block holding the rest."""
    full, rest = divmod(tokens, span)
    return (span,) * full + ((rest,) if rest else ())


class _Draft:
    """A group while tensors still join it."""

    def __init__(self, key: tuple[object, ...], axis: int, span: int) -> None:
        self.key = key
        self.axis = axis
        self.span = span
        self.tensors: list[Ref] = []
        self.bytes_per_token = 0

    def split(self, leaves: Sequence[HeaderEntry], block_bytes: int) -> Iterator[GroupPlan]:
        """Groups of equal length and positions; there is one unless the layers of this entry differ."""
        span = self.span
        while span > 1 and self.bytes_per_token * span > 2 * block_bytes:
            span //= 2
        alike: dict[tuple[Run, ...], list[Ref]] = {}
        for leaf, index in self.tensors:
            alike.setdefault(_runs(leaves[leaf]), []).append((leaf, index))
        for runs, refs in alike.items():
            yield GroupPlan(span, self.axis, tuple(refs), position_counts(runs, span))


def _join(
    drafts: list[_Draft], leaves: Sequence[HeaderEntry], ref: Ref, axis: int, span: int, block_bytes: int
) -> None:
    key = group_class(leaves[ref[0]])
    draft = next((d for d in drafts if d.key == key and d.bytes_per_token * span < block_bytes), None)
    if draft is None:
        draft = _Draft(key, axis, span)
        drafts.append(draft)
    draft.tensors.append(ref)
    draft.bytes_per_token += token_bytes(leaves[ref[0]].tensors[ref[1]], axis)


def _token_tensors(leaves: Sequence[HeaderEntry]) -> Iterator[tuple[Ref, int]]:
    """The tensors that have a token axis and any bytes, with that axis."""
    for ref, tensor in numbered(leaves):
        geometry = KINDS.get(leaves[ref[0]].kind)
        if geometry is None or geometry.axis is None or not tensor.bytes:
            continue
        # A reader takes a segment whole; a tensor with tokens of such a width is cut by itself instead.
        if token_bytes(tensor, geometry.axis) <= WIDEST_TOKEN_BYTES:
            yield ref, geometry.axis


def _runs(entry: HeaderEntry) -> tuple[Run, ...]:
    return tuple(_merged(KINDS[entry.kind].runs(entry)))


def _merged(runs: Iterable[Run]) -> list[Run]:
    """Runs with those joined that continue each other."""
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].position + merged[-1].length == run.position:
            merged[-1] = Run(merged[-1].position, merged[-1].length + run.length)
        elif run.length:
            merged.append(run)
    return merged


def _loose(leaves: Sequence[HeaderEntry], grouped: set[Ref], block_bytes: int) -> Iterator[LoosePlan]:
    for ref, tensor in numbered(leaves):
        if ref not in grouped:
            yield LoosePlan(ref, _element_counts(prod(tensor.shape), tensor.item_size, block_bytes))


def _row_counts(tensor: Slot, block_bytes: int) -> tuple[int, ...]:
    elements, row = prod(tensor.shape), prod(tensor.shape[-2:])
    if elements == 0:
        return ()
    return _element_counts(row, tensor.item_size, block_bytes) * (elements // row)


def _element_counts(elements: int, item_size: int, block_bytes: int) -> tuple[int, ...]:
    return default_counts(elements, max(1, block_bytes // item_size))
