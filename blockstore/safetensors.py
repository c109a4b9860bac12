"""safetensors files: the header, checked before anything is allocated for the tensors that it names.

| bytes of JSON, u64 LE | JSON: {name: {"dtype", "shape", "data_offsets"}, "__metadata__": {text: text}} | tensors |
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Annotated, Any, Final

import msgspec

from kvcodecs.entry import DTYPES

from .errors import CorruptEntry, UnsupportedFormat
from .fs import FileSystem
from .header_files import opened_file

SUFFIX: Final = ".safetensors"
MAX_JSON_BYTES: Final = 16 << 20
_MAX_TENSORS: Final = 1 << 16
_METADATA: Final = "__metadata__"
_LENGTH: Final = struct.Struct("<Q")
# What mlx writes and reads, as codes of FORMAT 3.
_CODES: Final = {
    name: code
    for code, name in enumerate(
        ("BOOL", "U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64", "F16", "F32", "F64", "BF16", "C64")
    )
}

_Dimension = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Tensor(msgspec.Struct, frozen=True):
    """Where a tensor's C-order bytes stand in its file. `dtype` is a code of FORMAT 3."""

    shape: tuple[int, ...]
    dtype: int
    offset: int
    size: int


class Contents(msgspec.Struct, frozen=True):
    """What a file says that it holds."""

    metadata: dict[str, str]
    tensors: dict[str, Tensor]


class _Described(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Dimension, ...], msgspec.Meta(max_length=32)]
    data_offsets: tuple[int, int]


@contextmanager
def opened(fs: FileSystem, path: str) -> Iterator[tuple[int, Contents]]:
    """A file's descriptor and its checked header. Raises CorruptEntry, UnsupportedFormat, OSError.

    What is read through the descriptor belongs to the header, even if another file takes the name meanwhile.
    """
    with opened_file(fs, path) as fd:
        yield fd, _contents(fs, fd, path)


def encode(metadata: Mapping[str, str]) -> bytes:
    """A file of metadata alone."""
    text = msgspec.json.encode({_METADATA: dict(metadata)})
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _contents(fs: FileSystem, fd: int, path: str) -> Contents:
    file_size = fs.size(fd)
    if file_size < _LENGTH.size:
        raise _corrupt(path, "size", f"at least {_LENGTH.size} bytes", file_size)
    (size,) = _LENGTH.unpack(_read(fs, fd, 0, _LENGTH.size, path))
    if size > file_size - _LENGTH.size:
        raise _corrupt(path, "header length", f"at most {file_size - _LENGTH.size}, which the file holds", size)
    if size > MAX_JSON_BYTES:
        raise UnsupportedFormat(
            "the header is too long", path=path, field="header length", expected=f"≤ {MAX_JSON_BYTES}", found=size
        )
    text = _read(fs, fd, _LENGTH.size, size, path)
    # Every tensor has this key; text that only looks like it may be refused too.
    count = text.count(b'"data_offsets"')
    if count > _MAX_TENSORS:
        raise UnsupportedFormat(
            "too many tensors", path=path, field="tensors", expected=f"≤ {_MAX_TENSORS}", found=count
        )
    raw = _decoded(text, dict[str, msgspec.Raw], path, "header")
    metadata = _decoded(raw.pop(_METADATA, b"{}"), dict[str, str], path, _METADATA)
    start = _LENGTH.size + size
    tensors = {name: _tensor(name, value, path, start, file_size) for name, value in raw.items()}
    _check_apart(tensors, path)
    return Contents(metadata, tensors)


def _read(fs: FileSystem, fd: int, offset: int, size: int, path: str) -> bytes:
    buffer = bytearray(size)
    count = fs.read_into(fd, memoryview(buffer), offset)
    if count < size:
        raise _corrupt(path, "size", f"at least {offset + size} bytes", offset + count)
    return bytes(buffer)


def _tensor(name: str, value: Any, path: str, start: int, file_size: int) -> Tensor:
    found = _decoded(value, _Described, path, name)
    code = _CODES.get(found.dtype)
    if code is None:
        raise UnsupportedFormat(
            "a tensor of a type that MLX does not have", path=path, field=f"{name}: dtype",
            expected=list(_CODES), found=found.dtype,
        )  # fmt: skip
    first, last = found.data_offsets
    if not 0 <= first <= last <= file_size - start:
        within = f"within the {file_size - start} bytes that the file has"
        raise _corrupt(path, f"{name}: data_offsets", within, list(found.data_offsets))
    size = prod(found.shape) * DTYPES[code][1]
    if last - first != size:
        raise _corrupt(path, f"{name}: data_offsets", f"{size} bytes, as dtype and shape say", last - first)
    return Tensor(found.shape, code, start + first, size)


def _check_apart(tensors: Mapping[str, Tensor], path: str) -> None:
    """Refuse tensors that share bytes: all of them together are then no larger than the file."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.size and tensor.offset < end:
            raise _corrupt(path, f"{name}: data_offsets", "bytes that no other tensor has", "an overlap")
        end = max(end, tensor.offset + tensor.size)


def _decoded(text: Any, kind: Any, path: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(path, field, "the JSON of a safetensors header", str(error)) from None


def _corrupt(path: str, field: str, expected: object, found: object) -> CorruptEntry:
    return CorruptEntry("not a sound safetensors file", path=path, field=field, expected=expected, found=found)
