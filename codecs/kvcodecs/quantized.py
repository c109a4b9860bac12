"""Kind `qkv`: keys and values quantized in groups along D."""

from dataclasses import dataclass, field
from typing import ClassVar

from .backend import mx
from .codec import Scalar, TokenCodec
from .planes import Planes, quantize
from .token_cache import TokenCache

QUANTIZATION = (Scalar("group_size", "groupSize"), Scalar("bits", "bits"))


class QuantizedKVCache(TokenCache):
    """Takes keys and values as they come, `D` a multiple of `group_size`, and keeps and returns triples.

    keys, values: (packed uint32 `[B, H, S, D * bits / 32]`, scales and biases `[B, H, S, D / group_size]`).
    """

    def __init__(self, group_size: int = 64, bits: int = 8) -> None:
        super().__init__()
        self.group_size = group_size
        self.bits = bits

    def _encode(self, keys: mx.array, values: mx.array) -> Planes:
        return quantize((keys, values), self.group_size, self.bits)


@dataclass(frozen=True)
class QuantizedCodec(TokenCodec):
    kind: str = field(default="qkv", init=False)
    scalars: ClassVar[tuple[Scalar, ...]] = QUANTIZATION
