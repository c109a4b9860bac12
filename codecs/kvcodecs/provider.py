"""The provider of this release: every codec there is, in one table."""

from functools import cache

from .algebra import OURS, Codec, CodecProvider
from .codec import ClassRef
from .kv import KVCache, KVCodec
from .mla import MLACache, MLACodec, MLADSACache, MLADSACodec, MTPMLACache, MTPMLACodec
from .mlx_lm import mlx_lm_codecs
from .paged import PagedCodec, PagedKVCache
from .quantized import QuantizedCodec, QuantizedKVCache
from .recurrent import RecurrentCache, RecurrentCodec
from .rotating import RotatingCodec, RotatingKVCache, RotatingQuantizedCodec, RotatingQuantizedKVCache
from .turboquant import TurboQuantCodec, TurboQuantKVCache


@cache
def default_provider() -> CodecProvider:
    """Our own classes and mlx-lm's. Writes entries as `mlx-cache-v5`, reads those of `mlx-cache-v3` too."""
    ours: tuple[Codec, ...] = (
        KVCodec(OURS, ClassRef.of(KVCache)),
        RotatingCodec(OURS, ClassRef.of(RotatingKVCache)),
        QuantizedCodec(OURS, ClassRef.of(QuantizedKVCache)),
        RotatingQuantizedCodec(OURS, ClassRef.of(RotatingQuantizedKVCache)),
        RecurrentCodec(OURS, ClassRef.of(RecurrentCache)),
        TurboQuantCodec(OURS, ClassRef.of(TurboQuantKVCache)),
        MLACodec(OURS, ClassRef.of(MLACache)),
        MLADSACodec(OURS, ClassRef.of(MLADSACache)),
        MTPMLACodec(OURS, ClassRef.of(MTPMLACache)),
        PagedCodec(OURS, ClassRef.of(PagedKVCache)),
    )
    codecs = (*ours, *mlx_lm_codecs(default_provider))
    return CodecProvider("mlx-cache-v5", codecs, reads=frozenset({"mlx-cache-v3"}))
