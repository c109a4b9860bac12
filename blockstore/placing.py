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

from .buffers import ByteArray, Turns, flat_views, unfilled, writable_views
from .errors import UnsupportedFormat
from .records import Attachment, Group, Header, token_bytes

# A segment is read whole before it is spread over its tensors; ours stay below twice the target block size.
_SEGMENT_LIMIT_BYTES: Final = 64 << 20
# Below that a system call with many short runs costs more than reading at once and copying.
_LEAST_RUN_BYTES: Final = 2 << 10


class Target:
    """One tensor being restored. Its live part, in bytes, is [what stands before the token axis][tokens][behind it].

    `live` views that part of `array`; both are there after take(). Whoever fills it calls blank(), too.
    """

    def __init__(self, tensor: Slot, axis: int | None) -> None:
        self._tensor = tensor
        self._axis = axis
        self.shape = _outer_rows_inner(tensor, tensor.shape, axis)
        self.array: Any = None
        self.live: ByteArray = np.empty(0, np.uint8)
        self._beyond: ByteArray = np.empty(0, np.uint8)

    def take(self, array: Any, memory: ByteArray) -> None:
        """Have `array`, which may be longer along the token axis; `memory` views all of it."""
        self.array = array
        if memory.size:
            whole = memory.reshape(-1).view(np.uint8).reshape(_outer_rows_inner(self._tensor, array.shape, self._axis))
            self.live, self._beyond = whole[:, : self.shape[1]], whole[:, self.shape[1] :]

    def wanted(self, capacity: tuple[int, ...] | None) -> tuple[tuple[int, ...], int]:
        """Shape and dtype code of the array to make; `capacity` None: the tensor's own shape."""
        return self._tensor.shape if capacity is None else capacity, self._tensor.dtype

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


def allocate(targets: Sequence[tuple[Target, tuple[int, ...] | None]]) -> None:
    """Make every target's array, of the shape beside it (None: the tensor's own). On the caller's thread."""
    arrays = unfilled([target.wanted(capacity) for target, capacity in targets])
    for (target, _), array, memory in zip(targets, arrays, writable_views(arrays), strict=True):
        target.take(array, memory)


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
    turns = Turns()
    for group in header.segments or ():
        slots = [flat[leaf].tensors[index] for leaf, index in group.tensors]
        into = [wanted[leaf][index] for leaf, index in group.tensors]
        by_group.append(_group_reads(group, slots, into, turns))
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


def _group_reads(group: Group, slots: Sequence[Slot], into: Sequence[Target], turns: Turns) -> Iterator[Read]:
    widths = [token_bytes(tensor) for tensor in slots]
    axis = slots[0].axis
    assert axis is not None, "decode_header has checked that slots of a group have an axis"
    placer = _GroupPlacer(into, widths, turns)
    live, start = into[0].shape[1], 0
    for name, tokens in zip(group.digests(), group.counts(slots[0].shape[axis]), strict=True):
        if start >= live:
            break
        size = tokens * sum(widths)
        if size > _SEGMENT_LIMIT_BYTES:
            raise UnsupportedFormat("a segment is too large", expected=f"≤ {_SEGMENT_LIMIT_BYTES} bytes", found=size)
        place, rows = partial(placer.put, start, tokens), partial(placer.rows, start, tokens)
        yield Read(bytes.fromhex(name), size, place, whole=True, rows=rows)
        start += tokens


class _GroupPlacer:
    """Spreads the segments of one group over its tensors. For several threads at once."""

    def __init__(self, into: Sequence[Target], widths: Sequence[int], turns: Turns) -> None:
        self._into = into
        self._widths = widths
        self._views: dict[tuple[int, int], list[ByteArray]] = {}
        self._turns = turns

    def put(self, start: int, tokens: int, data: ByteArray, _: int) -> None:
        """Place `tokens` tokens from `start` on; of those beyond the live ones none."""
        stop = min(start + tokens, self._into[0].shape[1])
        parts = self._parts(data, tokens)
        with self._turns.copying(len(parts), tokens * sum(self._widths)):
            for target, part in zip(self._into, parts, strict=True):
                target.live[:, start:stop] = part[:, : stop - start]

    def rows(self, start: int, tokens: int) -> list[memoryview] | None:
        """The memory of each run of bytes that stands together; None where some tokens stay away, or runs are short."""
        stop = start + tokens
        runs = sum(target.shape[0] for target in self._into)
        if stop > self._into[0].shape[1] or tokens * sum(self._widths) < runs * _LEAST_RUN_BYTES:
            return None
        return [memoryview(row).cast("B") for target in self._into for row in target.live[:, start:stop]]

    def _parts(self, data: ByteArray, tokens: int) -> list[ByteArray]:
        """Each tensor's part of a segment. A thread reads all segments into one buffer, so its views are kept."""
        key = (id(data.base), tokens)
        views = self._views.get(key)
        if views is None:
            views = self._cut(data, tokens)
            if data.base is not None:  # which the views keep alive, so that no other gets its id
                self._views[key] = views
        return views

    def _cut(self, data: ByteArray, tokens: int) -> list[ByteArray]:
        views, at = [], 0
        for target, width in zip(self._into, self._widths, strict=True):
            views.append(data[at : at + tokens * width].reshape(target.shape[0], tokens, target.shape[2]))
            at += tokens * width
        return views


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
