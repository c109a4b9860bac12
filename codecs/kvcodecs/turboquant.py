"""Kind `turboquant`: keys as rotated indices with scales and zeros, values as packed codes with scales.

The quantizer is a foreign kernel: what it made is kept, grown, cut and given back as it is.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .algebra import refuse_different
from .backend import mx
from .codec import Scalar, refuse_other_structure
from .entry import HeaderEntry
from .geometry import TURBOQUANT_GROUP
from .plane_cache import PlaneCache, PlaneCodec
from .planes import Planes

_MOST_BITS = 8


class TurboQuantKVCache(PlaneCache):
    """Five planes `[B, H, capacity, width]`, made by a quantizer of `k_bits` and `v_bits` for heads of `head_dim`.

    k_idx: `head_dim * k_bits / 8` wide, int8 at 8 bits, else uint8. v_packed: uint8, `head_dim * v_bits / 8` wide.
    k_scales, k_zeros, v_scales: float16, one for every 32 elements.
    minimum_reusable_offset: in tokens; a stored copy may be shortened no further. None: not at all.
    """

    names = ("k_idx", "k_scales", "k_zeros", "v_packed", "v_scales")
    rank = 4
    k_idx: mx.array | None
    k_scales: mx.array | None
    k_zeros: mx.array | None
    v_packed: mx.array | None
    v_scales: mx.array | None

    def __init__(self, k_bits: int, v_bits: int, head_dim: int) -> None:
        if not (1 <= k_bits <= _MOST_BITS and 1 <= v_bits <= _MOST_BITS):
            raise ValueError(f"k_bits {k_bits} and v_bits {v_bits} are not between 1 and {_MOST_BITS}")
        if head_dim < 1 or head_dim % TURBOQUANT_GROUP:
            raise ValueError(f"head_dim {head_dim} is not a multiple of {TURBOQUANT_GROUP}")
        super().__init__()
        self.k_bits, self.v_bits, self.head_dim = k_bits, v_bits, head_dim
        self.minimum_reusable_offset = 0

    @property
    def layout(self) -> tuple[tuple[mx.Dtype, int], ...]:
        scale = (mx.float16, self.head_dim // TURBOQUANT_GROUP)
        index = (mx.int8 if self.k_bits == _MOST_BITS else mx.uint8, self.head_dim * self.k_bits // 8)
        return index, scale, scale, (mx.uint8, self.head_dim * self.v_bits // 8), scale

    def append(
        self, k_idx: mx.array, k_scales: mx.array, k_zeros: mx.array, v_packed: mx.array, v_scales: mx.array
    ) -> Planes:
        """Append tokens that the quantizer has packed, `[B, H, S, width]`; returns views of all live tokens.

        Raises ValueError where a plane has another dtype or shape.
        """
        return self._append((k_idx, k_scales, k_zeros, v_packed, v_scales))


@dataclass(frozen=True)
class TurboQuantCodec(PlaneCodec):
    kind: str = field(default="turboquant", init=False)
    scalars: ClassVar[tuple[Scalar, ...]] = (
        Scalar("k_bits", "kBits"),
        Scalar("v_bits", "vBits"),
        Scalar("head_dim", "headDim"),
    )

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        """Any cache with a token axis will do (one may be quantized while running); one of this class, if equal."""
        refuse_other_structure(entry, prototype)
        if self.matches(prototype):
            refuse_different(entry, self.fields_of(prototype))
