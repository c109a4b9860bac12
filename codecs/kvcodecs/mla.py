"""Kinds `mla`, `mla-dsa` and `mtp-mla`: latent attention, a latent and a rotary part of each token's key and value.

A layer of these kinds takes no other kind, and only its own geometry: the prototype is checked before anything is read.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .algebra import PrototypeMismatch, refuse_different
from .backend import mx
from .codec import Scalar
from .entry import HeaderEntry
from .plane_cache import PlaneCache, PlaneCodec
from .planes import Planes, rows

DEFAULT_MAX_TOKENS = 131072
UNLIMITED_TOKENS = (1 << 53) - 1
"""The largest integer of the format: as many tokens as one likes."""


class LatentCache(PlaneCache):
    """What the three classes share: float32 planes `[B, capacity, width]`, the tokens along axis 1.

    only_kind: the kind of the entries that a layer of this cache takes.
    """

    only_kind: ClassVar[str]
    rank = 3
    latent: mx.array | None
    rope: mx.array | None

    def __init__(self, kv_lora_rank: int, rope_head_dim: int, max_tokens: int) -> None:
        super().__init__()
        self.kv_lora_rank, self.rope_head_dim, self.max_tokens = kv_lora_rank, rope_head_dim, max_tokens

    @property
    def layout(self) -> tuple[tuple[mx.Dtype, int], ...]:
        return (mx.float32, self.kv_lora_rank), (mx.float32, self.rope_head_dim)

    def _append(self, new: Planes) -> Planes:
        stop = self.offset + rows(new)
        if stop > self.max_tokens:
            raise ValueError(f"{stop} tokens are more than max_tokens {self.max_tokens}")
        return super()._append(new)


class MLACache(LatentCache):
    """latent `[B, capacity, kv_lora_rank]` and rope `[B, capacity, rope_head_dim]`, at most `max_tokens` tokens."""

    only_kind = "mla"
    names = ("latent", "rope")

    def __init__(self, kv_lora_rank: int, rope_head_dim: int, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        super().__init__(kv_lora_rank, rope_head_dim, max_tokens)

    def append(self, latent: mx.array, rope: mx.array) -> Planes:
        """Append tokens, float32 `[B, S, width]`; returns views of all live tokens.

        Raises ValueError where a plane has another dtype or shape, and where max_tokens would be passed.
        """
        return self._append((latent, rope))


class MTPMLACache(MLACache):
    """The cache of a multi-token-prediction layer. It may be a token behind the others."""

    only_kind = "mtp-mla"

    def __init__(self, kv_lora_rank: int, rope_head_dim: int, max_tokens: int = UNLIMITED_TOKENS) -> None:
        super().__init__(kv_lora_rank, rope_head_dim, max_tokens)


class MLADSACache(LatentCache):
    """As MLACache, and dsa `[B, capacity, dsa_head_dim]`: the keys by which a sparse-attention indexer chooses."""

    only_kind = "mla-dsa"
    names = ("latent", "rope", "dsa")
    dsa: mx.array | None

    def __init__(
        self, kv_lora_rank: int, rope_head_dim: int, dsa_head_dim: int, max_tokens: int = DEFAULT_MAX_TOKENS
    ) -> None:
        super().__init__(kv_lora_rank, rope_head_dim, max_tokens)
        self.dsa_head_dim = dsa_head_dim

    @property
    def layout(self) -> tuple[tuple[mx.Dtype, int], ...]:
        return *super().layout, (mx.float32, self.dsa_head_dim)

    def append(self, latent: mx.array, rope: mx.array, dsa: mx.array) -> Planes:
        """As MLACache.append."""
        return self._append((latent, rope, dsa))


_RANKS = (Scalar("kv_lora_rank", "kvLoraRank"), Scalar("rope_head_dim", "ropeHeadDim"))
_DSA = Scalar("dsa_head_dim", "dsaHeadDim")
_MAX_TOKENS = Scalar("max_tokens", "maxTokens")


@dataclass(frozen=True)
class LatentCodec(PlaneCodec):
    """A layer takes the entry only where everything but the length is equal."""

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        if prototype is None:
            return
        if not self.matches(prototype):
            raise PrototypeMismatch("kind", getattr(prototype, "only_kind", type(prototype).__name__), entry.kind)
        refuse_different(entry, {_DSA.name: None, **self.fields_of(prototype)})
        if len(entry.tensors) != len(prototype.names):
            raise PrototypeMismatch(f"{entry.kind}.tensors", len(prototype.names), len(entry.tensors))


@dataclass(frozen=True)
class MLACodec(LatentCodec):
    kind: str = field(default="mla", init=False)
    scalars: ClassVar[tuple[Scalar, ...]] = (*_RANKS, _MAX_TOKENS)


@dataclass(frozen=True)
class MLADSACodec(LatentCodec):
    kind: str = field(default="mla-dsa", init=False)
    scalars: ClassVar[tuple[Scalar, ...]] = (*_RANKS, _DSA, _MAX_TOKENS)


@dataclass(frozen=True)
class MTPMLACodec(LatentCodec):
    kind: str = field(default="mtp-mla", init=False)
    scalars: ClassVar[tuple[Scalar, ...]] = (*_RANKS, _MAX_TOKENS)
