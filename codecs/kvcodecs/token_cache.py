"""What our own caches with a token axis share: how they grow, trim and mask."""

from typing import Any, ClassVar

from .backend import mx
from .planes import Planes, blank, cut, held, hold, join, paired, rows, write


class TokenCache:
    """A cache that grows along the token axis in steps of 256 tokens.

    keys, values: what attention reads, `[B, H, capacity, D]`, or None while nothing has been stored. Rows from
        `offset` on hold nothing that counts.
    minimum_reusable_offset: in tokens; a stored copy of this cache may be shortened no further. None, as 0: to any
        length.

    The interface is that of mlx-lm's caches. Not for use from several threads.
    """

    step: ClassVar[int] = 256

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0
        self.minimum_reusable_offset: int | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append the tokens of `keys` and `values` (`[B, H, S, D]`) and return views of all live tokens."""
        new = self._encode(keys, values)
        stop = self.offset + rows(new)
        planes = held(self)
        if stop > rows(planes):
            planes = self._grown(planes, new)
            hold(self, planes)
        write(planes, self.offset, new)
        self.offset = stop
        return paired(cut(planes, 0, stop))

    def _encode(self, keys: mx.array, values: mx.array) -> Planes:
        """The planes in which the cache keeps `keys` and `values`."""
        return (keys, values)

    def _grown(self, planes: Planes, new: Planes) -> Planes:
        added = blank(new, -(-rows(new) // self.step) * self.step)
        return join(cut(planes, 0, self.offset), added) if planes else added

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all there are. Returns how many were forgotten."""
        n = min(self.offset, n)
        self.offset -= n
        return n

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        """How many tokens attention sees."""
        return self.offset

    def empty(self) -> bool:
        """True while no array has been stored."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays at their capacity."""
        return sum(plane.nbytes for plane in held(self))

    @property
    def state(self) -> list[mx.array]:
        """The cache's own arrays at their capacity, for `mx.eval`. Assigning to them changes the cache."""
        return list(held(self))

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask for the next `n` tokens: None, "causal", or booleans `[n, offset + n]`, true where one may look."""
        if window_size is not None or (return_array and n > 1):
            return causal_mask(n, self.offset, window_size)
        return None if n == 1 else "causal"


def causal_mask(count: int, offset: int, window_size: int | None) -> mx.array:
    """Booleans `[count, offset + count]`: each of `count` tokens sees itself and what came before, at most
    `window_size` tokens in all."""
    keys = mx.arange(offset + count)[None]
    queries = mx.arange(offset, offset + count)[:, None]
    mask = queries >= keys
    return mask if window_size is None else mask & (queries - keys < window_size)
