"""Where the bytes of blocks go: the plan of a load, and the arrays that it fills in place.

A plan is made, and every block's size looked at, before any array is allocated: a small header can name large tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any, Final

import numpy as np

from kvcodecs import geometry
from kvcodecs.entry import HeaderEntry, Slot, leaves

from .buffers import ByteArray, flat_views, unfilled, writable_view
from .errors import UnsupportedFormat
from .records import Attachment, Group, Header, token_bytes

# A segment is read whole before it is spread over its tensors; ours stay below twice the target block size.
_SEGMENT_LIMIT_BYTES: Final = 64 << 20
# Below that a system call with many short runs costs more than reading at once and copying.
_LEAST_RUN_BYTES: Final = 2 << 10


class Target:
    """One tensor being restored. Its live part, in bytes, is [what stands before the token axis][tokens][behind it].

    `live` views that part of `array`; both are there after allocate(). Whoever fills it calls blank(), too.
    """

    def __init__(self, tensor: Slot, axis: int | None) -> None:
        self._tensor = tensor
        self._axis = axis
        self.shape = _outer_rows_inner(tensor, tensor.shape, axis)
        self.array: Any = None
        self.live: ByteArray = np.empty(0, np.uint8)
        self._beyond: ByteArray = np.empty(0, np.uint8)

    def allocate(self, capacity: tuple[int, ...] | None) -> None:
        """Make the array, of shape `capacity` (None: the tensor's own). On the caller's thread."""
        capacity = self._tensor.shape if capacity is None else capacity
        self.array = unfilled(capacity, self._tensor.dtype)
        if prod(capacity) == 0:
            return
        data = writable_view(self.array).reshape(-1).view(np.uint8)
        whole = data.reshape(_outer_rows_inner(self._tensor, capacity, self._axis))
        self.live, self._beyond = whole[:, : self.shape[1]], whole[:, self.shape[1] :]

    def blank(self) -> None:
        """Zero what lies beyond the live tokens."""
        self._beyond[...] = 0

    def allocate_host(self) -> ByteArray:
        """Make plain memory instead of an array; the whole tensor as unsigned integers of its item size."""
        tensor = self._tensor
        view: ByteArray = np.zeros(tensor.shape, f"u{tensor.item_size}")
        if view.size:
            self.live = view.reshape(-1).view(np.uint8).reshape(self.shape)
        return view


@dataclass(frozen=True)
class Read:
    """One block to read. `place(data, offset)` takes its bytes from `offset` on; all at once where `whole`.

    `rows()` is where they go directly, piece by piece in the order of the block; None where that does not pay.
    """

    digest: bytes
    size: int
    place: Callable[[ByteArray, int], None]
    whole: bool
    rows: Callable[[], list[memoryview] | None] | None = None


def targets(entries: Sequence[HeaderEntry]) -> list[list[Target]]:
    """What `entries` want restored: a list of targets for each leaf."""
    return [[Target(tensor, _axis(leaf)) for tensor in leaf.tensors] for leaf in leaves(entries)]


def companions(attachments: Sequence[Attachment]) -> list[HeaderEntry]:
    """The attachments as further leaves, of a kind that is nobody's."""
    return [HeaderEntry(f"attachment {a.schema}", 0, tensors=a.tensors) for a in attachments]


def reads(header: Header, wanted: Sequence[Sequence[Target]]) -> Iterator[Read]:
    """The blocks that `wanted` needs, and where their bytes go; blocks that hold only later tokens are left out."""
    flat = [*leaves(header.caches), *companions(header.attachments)]
    by_group = []
    for group in header.segments or ():
        slots = [flat[leaf].tensors[index] for leaf, index in group.tensors]
        by_group.append(_group_reads(group, slots, [wanted[leaf][index] for leaf, index in group.tensors]))
    # By turns: threads that fill neighbouring parts of one array at once wait for each other's new pages.
    yield from (read for turn in zip_longest(*by_group) for read in turn if read is not None)
    for leaf, entry in enumerate(flat):
        for index, tensor in enumerate(entry.tensors):
            if tensor.blocks:
                yield from _loose_reads(tensor, _axis(entry), wanted[leaf][index])


def _axis(entry: HeaderEntry) -> int | None:
    known = geometry.KINDS.get(entry.kind)
    return known.axis if known is not None else None


def _outer_rows_inner(tensor: Slot, shape: tuple[int, ...], axis: int | None) -> tuple[int, int, int]:
    """`shape` in bytes as [what stands before the token axis][tokens][what stands behind it]."""
    if axis is None:
        return (1, 1, prod(shape) * tensor.item_size)
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]) * tensor.item_size


def _group_reads(group: Group, slots: Sequence[Slot], into: Sequence[Target]) -> Iterator[Read]:
    widths = [token_bytes(tensor) for tensor in slots]
    axis = slots[0].axis
    assert axis is not None, "decode_header has checked that slots of a group have an axis"
    live, start = into[0].shape[1], 0
    for name, tokens in zip(group.digests(), group.counts(slots[0].shape[axis]), strict=True):
        if start >= live:
            break
        size = tokens * sum(widths)
        if size > _SEGMENT_LIMIT_BYTES:
            raise UnsupportedFormat("a segment is too large", expected=f"≤ {_SEGMENT_LIMIT_BYTES} bytes", found=size)
        placer = _SegmentPlacer(into, widths, start, tokens)
        yield Read(bytes.fromhex(name), size, placer, whole=True, rows=placer.rows)
        start += tokens


@dataclass(frozen=True)
class _SegmentPlacer:
    """Spreads a segment over its tensors; a segment that reaches beyond the live tokens gives its first ones only."""

    into: Sequence[Target]
    widths: Sequence[int]
    start: int
    tokens: int

    def __call__(self, data: ByteArray, _: int) -> None:
        at = 0
        for target, width in zip(self.into, self.widths, strict=True):
            outer, live, inner = target.shape
            size = self.tokens * width
            part = data[at : at + size].reshape(outer, self.tokens, inner)
            keep = min(self.tokens, live - self.start)
            np.copyto(target.live[:, self.start : self.start + keep], part[:, :keep])
            at += size

    def rows(self) -> list[memoryview] | None:
        """The memory of each run of bytes that stands together; None where some tokens stay away, or runs are short."""
        live = self.into[0].shape[1]
        runs = sum(target.shape[0] for target in self.into)
        if self.start + self.tokens > live or self.tokens * sum(self.widths) < runs * _LEAST_RUN_BYTES:
            return None
        stop = self.start + self.tokens
        return [memoryview(row).cast("B") for target in self.into for row in target.live[:, self.start : stop]]


def _loose_reads(tensor: Slot, axis: int | None, into: Target) -> Iterator[Read]:
    _, stored, inner = _outer_rows_inner(tensor, tensor.shape, axis)
    placer = _RowPlacer(into, stored * inner)
    at = 0
    for block in tensor.blocks or ():
        if placer.wants(at, at + block.bytes):
            yield Read(bytes.fromhex(block.hash), block.bytes, partial(placer.put, at), whole=False)
        at += block.bytes


@dataclass(frozen=True)
class _RowPlacer:
    """Puts C-order bytes of a stored tensor where they belong, leaving out what lies behind each row's live part."""

    into: Target
    row: int

    def wants(self, start: int, stop: int) -> bool:
        return any(True for _ in self._parts(start, stop))

    def put(self, base: int, data: ByteArray, offset: int) -> None:
        """Place the bytes `data`, which stand `offset` behind byte `base` of the stored tensor."""
        start = base + offset
        for first, last, at in self._parts(start, start + len(data)):
            source = first - start
            for view in flat_views(self.into.live, at, at + last - first):
                np.copyto(view, data[source : source + view.size].reshape(view.shape))
                source += view.size

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first, last) in the stored bytes and where it goes in the live bytes, row by row."""
        _, live, inner = self.into.shape
        kept = live * inner
        for number in range(start // self.row, -(-stop // self.row)):
            begin = number * self.row
            first, last = max(start, begin), min(stop, begin + kept)
            if first < last:
                yield first, last, number * kept + first - begin


@dataclass(frozen=True)
class FileRead:
    """A piece of a tensor in a v3/v4 file: `offset` counts from the file's dataStart."""

    offset: int
    size: int
    place: Callable[[ByteArray, int], None]


def pieces(header: Header, wanted: Sequence[Sequence[Target]], piece_bytes: int) -> Iterator[FileRead]:
    """What `wanted` needs of a v3/v4 file, in pieces; parts that hold only later tokens are left out."""
    flat = [*leaves(header.caches), *companions(header.attachments)]
    for leaf, entry in enumerate(flat):
        for index, tensor in enumerate(entry.tensors):
            yield from _file_reads(tensor, _axis(entry), wanted[leaf][index], piece_bytes)


def _file_reads(tensor: Slot, axis: int | None, into: Target, piece_bytes: int) -> Iterator[FileRead]:
    if tensor.bytes == 0:
        return
    _, stored, inner = _outer_rows_inner(tensor, tensor.shape, axis)
    placer = _RowPlacer(into, stored * inner)
    for start in range(0, tensor.bytes, piece_bytes):
        size = min(piece_bytes, tensor.bytes - start)
        if placer.wants(start, start + size):
            yield FileRead(tensor.off + start, size, partial(placer.put, start))
