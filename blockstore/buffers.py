"""Byte views of arrays, and arrays that are filled in place. The one room here that touches array memory.

Everything that calls mlx runs on the caller's thread; the views returned are plain numpy, for the worker threads.
"""

import json
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Final, cast

import numpy as np

from kvcodecs.backend import mx
from kvcodecs.entry import DTYPES

from .memory import ask_for_huge_pages

_UNSIGNED: Final = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
# safetensors names of the dtypes, by FORMAT code; float64 has none that mx.load would take.
_SAFETENSORS: Final = ("BOOL", "U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "F16", "F32", None, "BF16", "C64")
_PROBE_BYTES: Final = 64 << 10
_PATTERN: Final = 0xA5
# The size of a huge page where there are any; smaller memory has none.
_HUGE_BYTES: Final = 2 << 20
_SMALL_PART_BYTES: Final = 32 << 10
# Zeroing so little is quicker than the way to memory that nobody has zeroed.
_SMALL_BYTES: Final = 512 << 10

ByteArray = np.ndarray[Any, np.dtype[Any]]


def dtype_of(code: int) -> mx.Dtype:
    """The mlx dtype of a FORMAT code."""
    dtype: mx.Dtype = getattr(mx, "bool_" if DTYPES[code][0] == "bool" else DTYPES[code][0])
    return dtype


def host_views(arrays: Sequence[mx.array]) -> list[ByteArray]:
    """Read-only numpy views of the arrays' own memory, as unsigned integers of the same item size, evaluated.

    No copy: strides are kept. Each view keeps its memory alive and unchanged, whatever becomes of the array that was
    passed in. Call on the thread that made the arrays. On a device whose memory the host does not share the arrays are
    copied to the host first, since viewing them there would move the live buffers.
    """
    stream = mx.cpu if _device_memory() else None
    views = [_distinct(array, stream) for array in arrays]
    mx.eval(views)
    return [_numpy(view, writable=False) for view in views]


def writable_views(arrays: Sequence[mx.array]) -> list[ByteArray]:
    """Numpy views of all of the arrays' memory as unsigned integers, for filling it before anybody reads it.

    Large memory that nobody has touched gets huge pages, where the platform has any.
    """
    views = [array.view(_UNSIGNED[array.itemsize]) for array in arrays]
    mx.eval(views)  # once: each evaluation is a round trip to mlx's own threads
    found = [_numpy(view, writable=True) for view in views]
    for view in found:
        if view.nbytes >= _HUGE_BYTES:
            ask_for_huge_pages(view)
    return found


def unfilled(wanted: Sequence[tuple[Sequence[int], int]]) -> list[mx.array]:
    """New arrays of these shapes and dtype codes, to be filled through writable_views(); they may hold anything.

    Where the device allows, their memory is not touched before it is filled: one pass less over it. Otherwise zeros.
    """
    plain = [_SAFETENSORS[code] is None or _size(shape, code) < _SMALL_BYTES for shape, code in wanted]
    if not _can_fill_in_place():
        plain = [True] * len(wanted)
    untouched = iter(_untouched([one for one, is_plain in zip(wanted, plain, strict=True) if not is_plain]))
    arrays = [
        mx.zeros(tuple(shape), dtype=dtype_of(code)) if is_plain else next(untouched)
        for (shape, code), is_plain in zip(wanted, plain, strict=True)
    ]
    mx.eval(arrays)
    return arrays


def flat_views(array: ByteArray, start: int, stop: int) -> Iterator[ByteArray]:
    """Views of `array` that cover elements start … stop of its C order, whatever its strides; in that order."""
    if stop <= start:
        return
    if array.ndim <= 1 or array.flags.c_contiguous:
        yield array.reshape(-1)[start:stop]
        return
    row = prod(array.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from flat_views(array[start // row], start % row, stop - start // row * row)
        return
    if start % row:
        yield from flat_views(array[first - 1], start % row, row)
    if first < last:
        yield array[first:last]
    if stop % row:
        yield from flat_views(array[last], 0, stop % row)


class Scratch(threading.local):
    """One buffer for each thread, of `largest` bytes: one that grew would leave those behind that views still hold."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._buffer: ByteArray = np.empty(0, np.uint8)
        self.views: dict[tuple[int, int], list[ByteArray]] = {}  # of the buffer, kept as long as its thread

    def take(self, size: int) -> ByteArray:
        """`size` bytes of this thread's buffer, at most `largest`; what the last call returned is overwritten."""
        if not len(self._buffer):
            self._buffer = np.empty(self._largest, np.uint8)
        return self._buffer[:size]


class Turns:
    """Lets threads take turns where they copy many small parts: they would do little but hand Python's lock around."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def copying(self, parts: int, size: int) -> AbstractContextManager[object]:
        """Around copying so many parts of `size` bytes together."""
        return self._lock if size < parts * _SMALL_PART_BYTES else nullcontext()


def _distinct(array: mx.array, stream: Any) -> mx.array:
    if stream is not None:
        array = mx.contiguous(array, stream=stream)
    return array.view(_UNSIGNED[array.itemsize], stream=stream)


def _numpy(view: mx.array, *, writable: bool) -> ByteArray:
    result = np.asarray(memoryview(cast(Any, view))) if view.size else np.empty(view.shape, f"u{view.itemsize}")
    # Where MLX could not allocate, the array has no memory, and numpy would quietly take some of its own.
    if view.size and (result.flags.owndata or result.ctypes.data == 0):
        raise MemoryError(f"no memory for an array of {view.nbytes} bytes")
    result.flags.writeable = writable
    return result


def _device_memory() -> bool:
    """True where arrays live in memory that the host does not share (CUDA)."""
    return bool(mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available())


class _HeaderOnly:
    """A virtual safetensors file: its header, and tensor bytes that readinto claims to have read without touching.

    mx.load reads with its own threads, so nothing here may raise or log.
    """

    def __init__(self, header: bytes, size: int) -> None:
        self._header, self._size, self._position = header, size, 0
        self.closed = False

    def readinto(self, buffer: memoryview) -> int:
        header = self._header[self._position : self._position + len(buffer)]
        buffer[: len(header)] = header
        self._position += len(buffer)
        return len(buffer)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position


def _size(shape: Sequence[int], code: int) -> int:
    return prod(shape) * DTYPES[code][1]


def _untouched(wanted: Sequence[tuple[Sequence[int], int]]) -> list[mx.array]:
    if not wanted:
        return []
    table, end = dict[str, Any](), 0
    for number, (shape, code) in enumerate(wanted):
        begin, end = end, end + _size(shape, code)
        table[str(number)] = {"dtype": _SAFETENSORS[code], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    file = _HeaderOnly(struct.pack("<Q", len(text)) + text, 8 + len(text) + end)
    loaded: Any = mx.load(cast(Any, file), format="safetensors", stream=mx.cpu)
    arrays = [loaded[str(number)] for number in range(len(wanted))]
    mx.eval(arrays)
    return arrays


_probed: bool | None = None


def _can_fill_in_place() -> bool:
    """Whether a pattern written through the view of an unfilled array is what an op on the default device reads."""
    global _probed  # asked once a process: the answer is the platform's
    if _probed is None:
        _probed = _probe()
    return _probed


def _probe() -> bool:
    if _device_memory():
        return False
    try:
        [array] = _untouched([((_PROBE_BYTES,), 1)])
        [view] = writable_views([array])
        view[...] = _PATTERN
        return bool(view.flags.c_contiguous and mx.all(array == _PATTERN).item())
    except (RuntimeError, ValueError, TypeError, BufferError):
        return False
