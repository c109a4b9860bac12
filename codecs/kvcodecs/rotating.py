"""Kinds `rotating` and `rotating-qkv`: a ring that keeps the last tokens of a sliding window."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .algebra import SnapshotContext
from .backend import mx
from .codec import Scalar, TokenCodec
from .entry import HeaderEntry
from .geometry import ring_rows
from .planes import Planes, blank, cut, distinct, held, hold, join, paired, quantize, rows, write
from .quantized import QUANTIZATION
from .token_cache import TokenCache, causal_mask


class RotatingKVCache(TokenCache):
    """The last `max_size` tokens, and the first `keep` ones for good.

    Single tokens overwrite the oldest row. Several at once are laid behind the others in order of their positions,
    so that the ring then has up to `max_size - 1` rows more than they are, until the next single token.
    """

    def __init__(self, max_size: int, keep: int = 0) -> None:
        if not 0 <= keep < max_size:
            raise ValueError(f"keep {keep} is not between 0 and max_size {max_size}")
        super().__init__()
        self.max_size = max_size
        self.keep = keep
        self._idx = 0  # the row that the next single token takes; mlx-lm's name, for code that looks at it

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append the tokens of `keys` and `values` (`[B, H, S, D]`) and return views of all live rows, as they lie."""
        new = self._encode(keys, values)
        if rows(new) == 1:
            self._put(new)
        else:
            self._append(new)
        self.offset += rows(new)
        self._idx += rows(new)
        return paired(cut(held(self), 0, self.offset))

    def _append(self, new: Planes) -> None:
        """Lay several tokens behind the others; each must still see max_size - 1 tokens before it."""
        planes = held(self)
        if not planes:
            hold(self, distinct(new))
            return
        ordered = self._in_order(planes)
        kept = self._without_oldest(ordered, rows(ordered) - self.max_size + 1)
        self._idx = rows(kept)
        hold(self, join(kept, new))

    def _put(self, new: Planes) -> None:
        """Assign one token to its row."""
        planes = held(self)
        if self.offset >= rows(planes) and rows(planes) < self.max_size:
            added = blank(new, min(self.step, self.max_size - self.offset))
            planes = join(planes, added) if planes else added
            self._idx = self.offset
        if rows(planes) > self.max_size:
            planes = self._without_oldest(planes, rows(planes) - self.max_size)
            self._idx = self.max_size
        if self._idx == self.max_size:
            self._idx = self.keep
        write(planes, self._idx, new)
        hold(self, planes)

    def _in_order(self, planes: Planes) -> Planes:
        """The live rows by position."""
        if self._idx == rows(planes):
            return planes
        if self._idx >= self.offset:
            return cut(planes, 0, self._idx)
        oldest = cut(planes, self._idx, rows(planes))
        return join(cut(planes, 0, self.keep), oldest, cut(planes, self.keep, self._idx))

    def _without_oldest(self, ordered: Planes, count: int) -> Planes:
        if count <= 0:
            return ordered
        return join(cut(ordered, 0, self.keep), cut(ordered, self.keep + count, rows(ordered)))

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all there are; none once the ring has dropped tokens. Returns how many."""
        n = min(self.offset, n) if self.is_trimmable() else 0
        self.offset -= n
        self._idx -= n
        return n

    def is_trimmable(self) -> bool:
        return self.offset < self.max_size

    def size(self) -> int:
        return min(self.offset, self.max_size)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> "RotatingQuantizedKVCache":
        """A quantized ring of the same tokens. This one stays as it is."""
        cache = RotatingQuantizedKVCache(self.max_size, self.keep, group_size, bits)
        hold(cache, quantize(held(self), group_size, bits))
        cache.offset, cache._idx = self.offset, self._idx
        cache.minimum_reusable_offset = self.minimum_reusable_offset
        return cache

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask for the next `n` tokens over the rows that `update_and_fetch` will return, as they lie."""
        if n == 1:
            return self._mask_of_one(window_size)
        window_size = window_size or self.max_size
        before = min(self.max_size - 1, self.offset)
        if before + n > window_size or return_array:
            return causal_mask(n, before, window_size)
        return "causal"

    def _mask_of_one(self, window_size: int | None) -> mx.array | None:
        """Booleans over the rows where the window is smaller than the ring and has been filled, else None."""
        if window_size is None or self.offset < window_size or self.max_size <= window_size:
            return None
        row = self._idx if self._idx < self.max_size else 0
        width = min(self.offset + 1, self.max_size)
        return mx.roll(mx.arange(width) >= width - window_size, row + 1)


class RotatingQuantizedKVCache(RotatingKVCache):
    """A ring of quantized rows: takes keys and values as they come, keeps and returns triples."""

    def __init__(self, max_size: int, keep: int = 0, group_size: int = 64, bits: int = 8) -> None:
        super().__init__(max_size, keep)
        self.group_size = group_size
        self.bits = bits

    def _encode(self, keys: mx.array, values: mx.array) -> Planes:
        return quantize((keys, values), self.group_size, self.bits)


_RING = (Scalar("_idx", "idx", static=False), Scalar("max_size", "maxSize"), Scalar("keep", "keep", omit_zero=True))


@dataclass(frozen=True)
class RotatingCodec(TokenCodec):
    """A ring is stored as it lies. One that is not full may have rows that hold nothing yet."""

    kind: str = field(default="rotating", init=False)
    scalars: ClassVar[tuple[Scalar, ...]] = _RING

    def _live(self, cache: Any, planes: Planes, context: SnapshotContext) -> Planes:
        count = rows(planes)
        return cut(planes, 0, count if context.whole_ring else min(cache.offset, count))

    def _rows(self, entry: HeaderEntry) -> int:
        """Just what is stored: a ring that has dropped tokens must not have one row more, and one that is not full is
        written as it lies when it is saved again. It grows by itself with the next token."""
        return ring_rows(entry)


@dataclass(frozen=True)
class RotatingQuantizedCodec(RotatingCodec):
    kind: str = field(default="rotating-qkv", init=False)
    scalars: ClassVar[tuple[Scalar, ...]] = (*_RING, *QUANTIZATION)
