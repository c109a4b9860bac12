"""Kind `ssm`: the two states of a recurrent layer, of fixed size, however many tokens they have seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .algebra import CodecError, PrototypeMismatch, Snapshot, SnapshotContext
from .backend import mx
from .codec import ClassCodec, carry_minimum, describe, refuse_other_structure
from .entry import HeaderEntry
from .planes import distinct

_SLOTS = ("conv", "recurrent")


class RecurrentCache:
    """The convolution's last inputs and the recurrent state; `cache[0]` and `cache[1]` in a model of mlx-lm's.

    conv, recurrent: arrays whose first dimension is the batch, or None until the model has set them.
    offset: how many tokens they have seen; counted: whether the model says so, by `advance`. Some never do.
    Holds sequences of equal length without padding. What has been seen cannot be taken back.
    """

    def __init__(self) -> None:
        self.conv: mx.array | None = None
        self.recurrent: mx.array | None = None
        self.offset = 0
        self.counted = False
        self.minimum_reusable_offset: int | None = None

    def __getitem__(self, index: int) -> mx.array | None:
        found: mx.array | None = getattr(self, _SLOTS[index])
        return found

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        setattr(self, _SLOTS[index], value)

    @property
    def lengths(self) -> None:
        """None: no sequence is shorter than the others."""
        return None

    @property
    def left_padding(self) -> None:
        """None: no sequence begins later than the others."""
        return None

    def advance(self, n: int) -> None:
        """Count `n` tokens as seen."""
        self.offset += n
        self.counted = True

    def make_mask(self, n: int) -> None:
        """None: every token counts."""
        return None

    def is_trimmable(self) -> bool:
        return False

    def trim(self, n: int) -> int:
        return 0

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.conv is None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    @property
    def state(self) -> list[mx.array]:
        """The arrays that have been set."""
        return [array for array in (self.conv, self.recurrent) if array is not None]


@dataclass(frozen=True)
class RecurrentCodec(ClassCodec):
    """Both states in full. The offset is the cache's own, or the list's where the model does not count."""

    kind: str = field(default="ssm", init=False)

    def snapshot(self, cache: Any, context: SnapshotContext) -> Snapshot:
        states = _states(cache)
        offset = cache.offset if cache.counted else context.token_count
        return describe(cache, HeaderEntry(self.kind, offset), states)

    def clone(self, cache: Any) -> Any:
        copy = self._build(_states(cache), cache.offset)
        copy.counted = cache.counted
        carry_minimum(copy, cache.minimum_reusable_offset)
        return copy

    def capacity(self, entry: HeaderEntry, index: int, prototype: Any = None) -> tuple[int, ...]:
        return entry.tensors[index].shape

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        """A prototype of two slots will do: this class has the interface of mlx-lm's."""
        refuse_other_structure(entry, prototype)
        if prototype is None or self.matches(prototype):
            return
        slots = len(getattr(prototype, "cache", ()))
        if slots != len(_SLOTS):
            raise PrototypeMismatch("ssm.slots", slots, len(_SLOTS))

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        cache = self._build(tuple(arrays), entry.offset)
        carry_minimum(cache, entry.minimum_reusable_offset)
        return cache

    def _build(self, states: tuple[mx.array, ...], offset: int) -> Any:
        cache = self.owner.imported()()
        cache.conv, cache.recurrent = states
        cache.offset = offset
        return cache


def _states(cache: Any) -> tuple[mx.array, ...]:
    if cache.conv is None or cache.recurrent is None:
        raise CodecError("a recurrent cache that has seen no token has nothing to save or clone: make a new one")
    return distinct((cache.conv, cache.recurrent))
