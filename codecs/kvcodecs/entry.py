"""What a header says of one cache: frozen structs that know no mlx and no file.

The words are those of FORMAT.md: a *header entry* describes one cache, a *slot* one tensor of it.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import msgspec

# FORMAT 2, dtype codes: name and bytes an element. The position in this tuple is the code.
DTYPES: tuple[tuple[str, int], ...] = (
    ("bool", 1),
    ("uint8", 1),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
    ("int8", 1),
    ("int16", 2),
    ("int32", 4),
    ("int64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("bfloat16", 2),
    ("complex64", 8),
)
DTYPE_CODES: dict[str, int] = {name: code for code, (name, _) in enumerate(DTYPES)}


class BlockRef(msgspec.Struct, frozen=True):
    """One block of a slot that is cut in C order: its hex digest and its length in bytes."""

    hash: str
    bytes: int


class Slot(msgspec.Struct, frozen=True):
    """One tensor of a header entry.

    `axis` is set where the slot belongs to a segment group: the index of its token axis. `blocks` is set where its
    C-order bytes are cut into blocks of their own. `off` and `hash` matter in v3/v4 files only.
    """

    shape: tuple[int, ...]
    dtype: int
    bytes: int
    off: int = 0
    hash: str = ""
    blocks: tuple[BlockRef, ...] | None = None
    axis: int | None = None

    @property
    def item_size(self) -> int:
        return DTYPES[self.dtype][1]


class HeaderEntry(msgspec.Struct, frozen=True):
    """What a header says of one cache.

    `fields` holds the geometry beside kind and offset, in the order in which it is written. `children` is not empty
    for the kind `list` alone.
    """

    kind: str
    offset: int
    fields: dict[str, Any] = {}
    tensors: tuple[Slot, ...] = ()
    children: tuple["HeaderEntry", ...] = ()
    minimum_reusable_offset: int | None = None

    @property
    def is_empty(self) -> bool:
        """True where the cache holds nothing yet: no tensor in it or below it."""
        return not self.tensors and all(child.is_empty for child in self.children)


def slot(shape: Iterable[int], dtype: str) -> Slot:
    """Describe a tensor of `shape` and dtype name that has not been cut yet."""
    dims = tuple(shape)
    code = DTYPE_CODES[dtype]
    return Slot(shape=dims, dtype=code, bytes=prod(dims) * DTYPES[code][1])


def leaves(entries: Iterable[HeaderEntry]) -> Iterator[HeaderEntry]:
    """The entries that hold tensors themselves, in header order: a `list` stands for its children."""
    for entry in entries:
        if entry.children:
            yield from leaves(entry.children)
        else:
            yield entry


def replace_leaves(entries: Iterable[HeaderEntry], new: Iterator[HeaderEntry]) -> tuple[HeaderEntry, ...]:
    """The same tree with its leaves taken from `new`, in order."""
    return tuple(
        msgspec.structs.replace(entry, children=replace_leaves(entry.children, new)) if entry.children else next(new)
        for entry in entries
    )
