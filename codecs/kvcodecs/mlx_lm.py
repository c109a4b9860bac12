"""Codecs for mlx-lm's own cache classes, 0.31 and later.

mlx-lm is optional: a class is looked for among the modules that are already imported, and imported by a load alone.
Everything is read from and written to plain attributes, which have stayed the same while `state` changed its meaning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .algebra import (
    MLX_LM,
    Codec,
    CodecProvider,
    PrototypeMismatch,
    Snapshot,
    SnapshotContext,
    refuse_different,
    token_capacity,
)
from .backend import mx
from .codec import (
    ClassCodec,
    ClassRef,
    Scalar,
    TokenCodec,
    carry_minimum,
    describe,
    minimum_of,
    refuse_other_structure,
    unsavable,
)
from .entry import HeaderEntry, leaves
from .kv import KVCodec
from .planes import Planes, cut, distinct
from .quantized import QuantizedCodec
from .rotating import RotatingCodec

_CACHE = "mlx_lm.models.cache"
_LAYER_CACHE = ClassRef("mlx_lm.models.deepseek_v41", "LayerCache")

REFUSED: dict[str, str] = {
    f"{_CACHE}.BatchKVCache": "holds several sequences of different length; save each row: cache.extract(row)",
    f"{_CACHE}.BatchRotatingKVCache": "holds several sequences of different length; save each row: cache.extract(row)",
}
"""Cache classes that are not handled on purpose, each with the reason."""


def mlx_lm_codecs(provider: Callable[[], CodecProvider]) -> tuple[Codec, ...]:
    """One codec for each class. `provider` returns the provider of the children of a cache list."""
    return (
        KVCodec(MLX_LM, ClassRef(_CACHE, "KVCache")),
        ConcatenateCodec(MLX_LM, ClassRef(_CACHE, "ConcatenateKVCache")),
        RotatingCodec(MLX_LM, ClassRef(_CACHE, "RotatingKVCache")),
        QuantizedCodec(MLX_LM, ClassRef(_CACHE, "QuantizedKVCache")),
        ChunkedCodec(MLX_LM, ClassRef(_CACHE, "ChunkedKVCache")),
        ArraysCodec(MLX_LM, ClassRef(_CACHE, "ArraysCache")),
        RecurrentAsArraysCodec(MLX_LM, ClassRef(_CACHE, "ArraysCache")),
        LayerCacheCodec(MLX_LM, _LAYER_CACHE),
        ListCodec(MLX_LM, ClassRef(_CACHE, "CacheList"), provider),
    )


@dataclass(frozen=True)
class ConcatenateCodec(KVCodec):
    """ConcatenateKVCache: appends behind all rows that its arrays have, so a loaded one has none to spare.

    After a trim it still holds, and goes on with, the rows that it was told to forget. Those are not stored.
    """

    def _rows(self, entry: HeaderEntry) -> int:
        return entry.offset

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        # In a cache list the arrays may have been allocated for another class of this kind, with room to grow.
        return super().load(entry, cut(tuple(arrays), 0, entry.offset), prototype)


@dataclass(frozen=True)
class ChunkedCodec(TokenCodec):
    """ChunkedKVCache: the tokens from start_position on.

    Until 0.31 its `maybe_trim_front` counts rows, not tokens. Where the capacity of a loaded cache differs from that
    of the saved one, those releases drop up to 255 tokens earlier or later.
    """

    kind: str = field(default="chunked", init=False)
    scalars: ClassVar[tuple[Scalar, ...]] = (
        Scalar("chunk_size", "chunkSize"),
        Scalar("start_position", "startPosition", static=False),
    )

    def _live(self, cache: Any, planes: Planes, context: SnapshotContext) -> Planes:
        return cut(planes, 0, cache.offset - cache.start_position)

    def _rows(self, entry: HeaderEntry) -> int:
        """Rounded up, but never past a chunk that is not: 0.31 would take the spare rows for tokens to drop."""
        tokens = entry.offset - int(entry.fields["startPosition"])
        chunk = int(entry.fields["chunkSize"])
        return min(token_capacity(tokens), chunk) if tokens <= chunk else token_capacity(tokens)


# ---- caches of whole arrays


@dataclass(frozen=True)
class ArraysCodec(ClassCodec):
    """ArraysCache: any number of slots, set or not; in a batch also each sequence's length and left padding.

    A snapshot reads `lengths` and `left_padding`, which evaluates these few integers.
    """

    kind: str = field(default="arrays", init=False)

    def snapshot(self, cache: Any, context: SnapshotContext) -> Snapshot:
        set_slots = _set_slots(cache, cache.cache)
        fields = _slot_fields(cache.cache)
        for name, values in (("lengths", cache.lengths), ("leftPadding", cache.left_padding)):
            if values is not None:
                fields[name] = values.tolist()
        return describe(cache, HeaderEntry(self.kind, context.token_count if set_slots else 0, fields), set_slots)

    def clone(self, cache: Any) -> Any:
        copy = type(cache)(len(cache.cache))
        copy.cache = [None if array is None else array[...] for array in cache.cache]
        copy.lengths, copy.left_padding = _copied(cache.lengths), _copied(cache.left_padding)
        carry_minimum(copy, minimum_of(cache))
        return copy

    def capacity(self, entry: HeaderEntry, index: int, prototype: Any = None) -> tuple[int, ...]:
        return entry.tensors[index].shape

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        refuse_other_structure(entry, prototype)
        if prototype is None:
            return
        refuse_different(entry, {"windowSize": getattr(prototype, "window_size", None)})
        expected, found = _slot_count(prototype), len(entry.fields["slots"])
        if expected != found:
            raise PrototypeMismatch("arrays.slots", expected, found)

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        if "windowSize" in entry.fields:
            # Both classes write this kind; without a prototype the field alone tells whose entry it is.
            return LayerCacheCodec(self.family, _LAYER_CACHE).load(entry, arrays, prototype)
        slots = _filled(entry, arrays)
        cache = self.owner.imported()(len(slots))
        cache.cache = slots
        for name, attribute in (("lengths", "lengths"), ("leftPadding", "left_padding")):
            if name in entry.fields:
                setattr(cache, attribute, mx.array(entry.fields[name], dtype=mx.int32))
        carry_minimum(cache, entry.minimum_reusable_offset)
        return cache


@dataclass(frozen=True)
class RecurrentAsArraysCodec(ArraysCodec):
    """An `ssm` entry where the model has an ArraysCache of two slots: some models write into nothing else.

    It only loads. What the cache is saved as again, `arrays`, is the other codec's.
    """

    kind: str = field(default="ssm", init=False)

    def matches(self, cache: object) -> bool:
        return False

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        refuse_other_structure(entry, prototype)
        if _slot_count(prototype) != len(entry.tensors):
            raise PrototypeMismatch("ssm.slots", _slot_count(prototype), len(entry.tensors))

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        cache = self.owner.imported()(len(arrays))
        cache.cache = list(arrays)
        carry_minimum(cache, entry.minimum_reusable_offset)
        return cache


@dataclass(frozen=True)
class LayerCacheCodec(ArraysCodec):
    """deepseek_v41's LayerCache: five arrays by name, and an offset of its own."""

    names: ClassVar[tuple[str, ...]] = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")

    def snapshot(self, cache: Any, context: SnapshotContext) -> Snapshot:
        slots = [getattr(cache, name) for name in self.names]
        fields = {**_slot_fields(slots), "windowSize": cache.window_size}
        return describe(cache, HeaderEntry(self.kind, cache.offset, fields), _set_slots(cache, slots))

    def clone(self, cache: Any) -> Any:
        slots = [_copied(getattr(cache, name)) for name in self.names]
        copy = self._build(type(cache), cache.window_size, cache.offset, slots)
        carry_minimum(copy, minimum_of(cache))
        return copy

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        owner, window_size = self.owner.imported(), entry.fields["windowSize"]
        cache = self._build(owner, window_size, entry.offset, _filled(entry, arrays))
        carry_minimum(cache, entry.minimum_reusable_offset)
        return cache

    def _build(self, owner: type[Any], window_size: int, offset: int, slots: Sequence[mx.array | None]) -> Any:
        cache = owner(window_size)
        cache.offset = offset
        for name, array in zip(self.names, slots, strict=True):
            setattr(cache, name, array)
        return cache


def _slot_fields(slots: Sequence[mx.array | None]) -> dict[str, Any]:
    return {"slots": [array is not None for array in slots]}


def _set_slots(cache: object, slots: Sequence[Any]) -> tuple[mx.array, ...]:
    """Distinct arrays for the slots that are set."""
    found = [array for array in slots if array is not None]
    for array in found:
        if not isinstance(array, mx.array):
            raise unsavable(cache, f"a slot holds {type(array).__name__}, not an array")
    return distinct(found)


def _filled(entry: HeaderEntry, arrays: Sequence[mx.array]) -> list[mx.array | None]:
    """One item for each slot: its array, or None where it was not set."""
    remaining = iter(arrays)
    return [next(remaining) if is_set else None for is_set in entry.fields["slots"]]


def _slot_count(prototype: Any) -> int:
    if hasattr(prototype, "window_size"):
        return len(LayerCacheCodec.names)
    return len(getattr(prototype, "cache", ("conv", "recurrent")))


def _copied(array: mx.array | None) -> mx.array | None:
    return None if array is None else array[...]


# ---- lists


@dataclass(frozen=True)
class ListCodec(ClassCodec):
    """CacheList: several caches of one layer. Its arrays are its children's, leaf by leaf."""

    provider: Callable[[], CodecProvider]
    kind: str = field(default="list", init=False)

    def snapshot(self, cache: Any, context: SnapshotContext) -> Snapshot:
        children = self.provider().snapshot(cache.caches, context)
        entries = tuple(child.entry for child in children)
        offset = max((entry.offset for entry in entries), default=0)
        arrays = tuple(array for child in children for array in child.arrays)
        entry = HeaderEntry(self.kind, offset, children=entries, minimum_reusable_offset=minimum_of(cache))
        return Snapshot(entry, arrays)

    def clone(self, cache: Any) -> Any:
        copy = type(cache)(*self.provider().clone(cache.caches))
        carry_minimum(copy, minimum_of(cache))
        return copy

    def capacity(self, entry: HeaderEntry, index: int, prototype: Any = None) -> tuple[int, ...]:
        """As the child's codec says, `index` counting the tensors of all leaves."""
        for codec, child, part in self._children(entry, prototype):
            count = _tensor_count(child)
            if index < count:
                return codec.capacity(child, index, part)
            index -= count
        raise IndexError("the entry has fewer tensors")

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        refuse_other_structure(entry, prototype)
        if prototype is not None and len(prototype.caches) != len(entry.children):
            raise PrototypeMismatch("list.children", len(prototype.caches), len(entry.children))
        for codec, child, part in self._children(entry, prototype):
            codec.check_prototype(child, part)

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        caches, start = [], 0
        for codec, child, part in self._children(entry, prototype):
            stop = start + _tensor_count(child)
            caches.append(codec.load(child, arrays[start:stop], part))
            start = stop
        cache = self.owner.imported()(*caches)
        carry_minimum(cache, entry.minimum_reusable_offset)
        return cache

    def _children(self, entry: HeaderEntry, prototype: Any) -> list[tuple[Codec, HeaderEntry, Any]]:
        """The codec, the entry and the prototype (or None) of each child."""
        parts = [None] * len(entry.children) if prototype is None else prototype.caches
        pairs = zip(entry.children, parts, strict=True)
        return [(self.provider().for_entry(child, part), child, part) for child, part in pairs]


def _tensor_count(entry: HeaderEntry) -> int:
    return sum(len(leaf.tensors) for leaf in leaves([entry]))
