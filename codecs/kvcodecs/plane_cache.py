"""What caches of named planes share: they grow along the token axis, and take their tokens as the planes they keep."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .algebra import CodecError, Snapshot, SnapshotContext, token_capacity
from .backend import mx
from .codec import ClassCodec, Scalar, describe, unsavable
from .entry import HeaderEntry
from .planes import TOKEN_AXIS, Planes, blank, cut, distinct, join, rows, write


class PlaneCache(ABC):
    """Planes by name, `[…, capacity, width]`, grown in steps of 256 tokens.

    Each name is an attribute: the cache's own array at its capacity, or None while it holds nothing. Rows from
    `offset` on hold nothing that counts. Not for use from several threads.
    """

    names: ClassVar[tuple[str, ...]]
    rank: ClassVar[int]
    step: ClassVar[int] = 256

    def __init__(self) -> None:
        self.offset = 0
        self.minimum_reusable_offset: int | None = None
        self.hold([None] * len(self.names))

    @property
    @abstractmethod
    def layout(self) -> tuple[tuple[mx.Dtype, int], ...]:
        """Dtype and width of each plane, in header order."""

    @property
    def planes(self) -> Planes:
        """The cache's own arrays at their capacity, in header order; those that there are."""
        return tuple(plane for _, plane in self.named() if plane is not None)

    def named(self) -> list[tuple[str, mx.array | None]]:
        return [(name, getattr(self, name)) for name in self.names]

    @property
    def state(self) -> list[mx.array]:
        """The same, for `mx.eval`. Assigning to them changes the cache."""
        return list(self.planes)

    def hold(self, planes: Sequence[mx.array | None]) -> None:
        """Take over one array for each name."""
        for name, plane in zip(self.names, planes, strict=True):
            setattr(self, name, plane)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all there are. Returns how many were forgotten."""
        n = min(self.offset, n)
        self.offset -= n
        return n

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        """True while no array has been stored."""
        return not self.planes

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays at their capacity."""
        return sum(plane.nbytes for plane in self.planes)

    def _append(self, new: Planes) -> Planes:
        """Write the tokens of `new` behind the others and return views of all live tokens. Raises ValueError."""
        self._check(new)
        stop = self.offset + rows(new)
        planes = self.planes
        if stop > rows(planes):
            planes = self._grown(planes, new)
            self.hold(planes)
        write(planes, self.offset, new)
        self.offset = stop
        return cut(planes, 0, stop)

    def _check(self, new: Planes) -> None:
        like = self.planes[0] if self.planes else new[0]
        if like.ndim != self.rank:
            raise ValueError(f"{self.names[0]}: expected {self.rank} dimensions, found {like.shape}")
        leading, tokens = like.shape[:TOKEN_AXIS], new[0].shape[TOKEN_AXIS:][:1]
        for name, plane, (dtype, width) in zip(self.names, new, self.layout, strict=True):
            if (plane.dtype, plane.shape) != (dtype, (*leading, *tokens, width)):
                expected = f"{dtype} {(*leading, *tokens, width)}"
                raise ValueError(f"{name}: expected {expected}, found {plane.dtype} {plane.shape}")

    def _grown(self, planes: Planes, new: Planes) -> Planes:
        added = blank(new, -(-rows(new) // self.step) * self.step)
        return join(cut(planes, 0, self.offset), added) if planes else added


@dataclass(frozen=True)
class PlaneCodec(ClassCodec):
    """A PlaneCache, and the numbers in `scalars`, all of them static, in header order."""

    kind: str = field(init=False)
    scalars: ClassVar[tuple[Scalar, ...]]

    def snapshot(self, cache: Any, context: SnapshotContext) -> Snapshot:
        entry = HeaderEntry(self.kind, cache.offset, self.fields_of(cache))
        return describe(cache, entry, cut(_aligned(self.kind, cache), 0, cache.offset))

    def clone(self, cache: Any) -> Any:
        values = {scalar.attribute: getattr(cache, scalar.attribute) for scalar in self.scalars}
        planes = distinct(_aligned(self.kind, cache))
        return _build(type(cache), values, cache.offset, planes, cache.minimum_reusable_offset)

    def capacity(self, entry: HeaderEntry, index: int, prototype: Any = None) -> tuple[int, ...]:
        shape = entry.tensors[index].shape
        return (*shape[:TOKEN_AXIS], token_capacity(entry.offset), shape[-1])

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        values = {scalar.attribute: entry.fields[scalar.name] for scalar in self.scalars}
        return _build(self.owner.imported(), values, entry.offset, arrays, entry.minimum_reusable_offset)

    def fields_of(self, cache: Any) -> dict[str, Any]:
        return {scalar.name: getattr(cache, scalar.attribute) for scalar in self.scalars}


def _build(owner: type[Any], values: dict[str, Any], offset: int, planes: Sequence[mx.array], least: int | None) -> Any:
    cache = owner(**values)
    cache.hold(planes)
    cache.offset, cache.minimum_reusable_offset = offset, least
    return cache


def _aligned(kind: str, cache: Any) -> Planes:
    """The cache's planes. Raises CodecError where it holds no token, or its planes not the same tokens."""
    planes: Planes = cache.planes
    if not planes or cache.offset == 0:
        raise CodecError(f"a cache of kind {kind} that has seen no token has nothing to save or clone: make a new one")
    if len(planes) != len(cache.names) or len({plane.shape[:-1] for plane in planes}) != 1:
        found = {name: None if plane is None else plane.shape for name, plane in cache.named()}
        raise unsavable(cache, f"its planes are not aligned: {found}")
    return planes
