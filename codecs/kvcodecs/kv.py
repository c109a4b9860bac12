"""Kind `kv`: keys and values of every token."""

from dataclasses import dataclass, field

from .codec import TokenCodec
from .planes import held, hold, quantize
from .quantized import QuantizedKVCache
from .token_cache import TokenCache


class KVCache(TokenCache):
    """Keys and values `[B, H, S, D]` as they come; the two may differ in D."""

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """A quantized cache of the same tokens. This one stays as it is."""
        cache = QuantizedKVCache(group_size=group_size, bits=bits)
        hold(cache, quantize(held(self), group_size, bits))
        cache.offset, cache.minimum_reusable_offset = self.offset, self.minimum_reusable_offset
        return cache


@dataclass(frozen=True)
class KVCodec(TokenCodec):
    kind: str = field(default="kv", init=False)
