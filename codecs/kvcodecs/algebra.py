"""The codec algebra: how a cache object becomes a header entry and arrays, and how it comes back.

A codec is one frozen object for one class of caches. Save, clone, load and eligibility go through codecs alone: there
is no `isinstance` chain anywhere else. This module knows no concrete class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from .backend import mx
from .composed import ComposedCodec, is_composed
from .entry import HeaderEntry

OURS = "kvcodecs"
MLX_LM = "mlx-lm"
# What a header means that names no codec provider (FORMAT 2).
FIRST_PROVIDER_ID = "mlx-cache-v3"


class CodecError(ValueError):
    """A cache or an entry that the provider cannot handle; the text says how to go on."""


class UnmatchedCache(CodecError):
    """No codec, or more than one, matches a cache object."""


class UnknownKind(CodecError):
    """No codec of the provider writes or reads this kind."""


class PrototypeMismatch(CodecError):
    """An entry that does not fit the prototype of its layer. Fields: `field`, `expected`, `found`."""

    def __init__(self, field: str, expected: object, found: object) -> None:
        super().__init__(f"{field}: the model's cache has {expected!r}, the stored one {found!r}")
        self.field, self.expected, self.found = field, expected, found


@dataclass(frozen=True)
class SnapshotContext:
    """What a snapshot is taken for.

    token_count: how many tokens the cache list encodes; what a cache without an offset of its own records as offset.
    whole_ring: keep a ring as it is laid out, with rows that hold nothing yet (rows cut, monoliths); otherwise only
        the rows that hold tokens are taken.
    """

    token_count: int
    whole_ring: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A header entry and the arrays of its tensors, leaf by leaf, in header order.

    The arrays are distinct from the cache's own: what the cache does next leaves their bytes alone. They share its
    memory until then, and are not evaluated yet.
    """

    entry: HeaderEntry
    arrays: tuple[mx.array, ...]


@runtime_checkable
class Codec(Protocol):
    """One class of caches. Implementations are frozen dataclasses without state.

    kind: the header kind. family: whose class it is (`kvcodecs`, `mlx-lm`, or a provider's own name).
    """

    @property
    def kind(self) -> str: ...
    @property
    def family(self) -> str: ...

    def matches(self, cache: object) -> bool:
        """True where `cache` is of exactly this codec's class (a subclass may hold state that nobody would save)."""
        ...

    def snapshot(self, cache: Any, context: SnapshotContext) -> Snapshot:
        """Describe `cache` and slice its live tokens. Never changes the cache. Raises CodecError."""
        ...

    def clone(self, cache: Any) -> Any:
        """A cache that shares the arrays' memory; going on with either leaves the other as it was."""
        ...

    def capacity(self, entry: HeaderEntry, index: int, prototype: Any = None) -> tuple[int, ...]:
        """The shape in which tensor `index` of `entry` is allocated, so that the next append grows nothing."""
        ...

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        """Raise PrototypeMismatch unless `entry` may be loaded where `prototype` (or None) stands."""
        ...

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        """A new cache of this codec's class over `arrays`, which have the shapes that `capacity` named."""
        ...


@dataclass(frozen=True)
class CodecProvider:
    """A fixed table of codecs under a name.

    `id` is what a header's codecProvider says; `reads` are further ids whose entries this provider reads. A codec
    whose class comes from an optional package joins the table when that package is imported.
    """

    id: str
    codecs: tuple[Codec, ...]
    reads: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        name: object = self.id
        reads: object = self.reads
        if not (isinstance(name, str) and name.strip()):
            raise CodecError(f"a codec provider needs a non-empty id, not {name!r}")
        if isinstance(reads, str):
            raise CodecError("reads takes a set of ids, not one of them")
        # A list that somebody still holds is not a fixed table.
        object.__setattr__(self, "codecs", tuple(self.codecs))
        object.__setattr__(self, "reads", frozenset(self.reads))
        for codec in self.codecs:
            if not isinstance(codec, Codec):
                raise CodecError(f"{codec!r} is no codec")

    def reads_id(self, name: str | None) -> bool:
        """True where this provider reads entries of codecProvider `name`; absence means `mlx-cache-v3`."""
        return (FIRST_PROVIDER_ID if name is None else name) in (self.id, *self.reads)

    def for_cache(self, cache: object) -> Codec:
        """The one codec that matches `cache`, or its storage if it is composed. Raises UnmatchedCache."""
        found = [codec for codec in self.codecs if codec.matches(cache)]
        if is_composed(cache):
            found.append(ComposedCodec(self.for_cache(cache.storage())))
        if len(found) == 1:
            return found[0]
        raise UnmatchedCache(_why_unmatched(cache, found, self))

    def for_entry(self, entry: HeaderEntry, prototype: object = None) -> Codec:
        """The codec that loads `entry` where `prototype` stands in the model's own list.

        The class of the prototype decides; then its family (a cache may have been quantized while running); without
        a prototype our own class of that kind, and mlx-lm's for the kinds that only mlx-lm has. Where the prototype is
        composed, all that holds of its storage.
        """
        candidates = [codec for codec in self.codecs if codec.kind == entry.kind]
        if not candidates:
            known = ", ".join(sorted({codec.kind for codec in self.codecs}))
            raise UnknownKind(f"provider {self.id} has no codec for kind {entry.kind!r}; it knows {known}")
        family = OURS
        if is_composed(prototype):
            self.for_cache(prototype)  # raises where a codec of the table matches it, too
            return ComposedCodec(self.for_entry(entry, prototype.storage()))
        if prototype is not None:
            same = [codec for codec in candidates if codec.matches(prototype)]
            if same:
                return same[0]
            family = self.for_cache(prototype).family
        return next((codec for codec in candidates if codec.family == family), candidates[0])

    def snapshot(self, caches: Sequence[object], context: SnapshotContext) -> list[Snapshot]:
        return [self.for_cache(cache).snapshot(cache, context) for cache in caches]

    def clone(self, caches: Sequence[object]) -> list[Any]:
        """New cache objects over the same memory, one for each of `caches`."""
        return [self.for_cache(cache).clone(cache) for cache in caches]

    def handles(self, cache: object) -> bool:
        try:
            self.for_cache(cache)
        except UnmatchedCache:
            return False
        return True


def _why_unmatched(cache: object, found: Sequence[Codec], provider: CodecProvider) -> str:
    name = f"{type(cache).__module__}.{type(cache).__qualname__}"
    if found:
        return f"{len(found)} codecs of provider {provider.id} match {name}: {', '.join(map(repr, found))}"
    if type(cache).__name__.startswith("Batch"):
        return f"{name} holds several sequences; save each row by itself: caches = [c.extract(row) for c in batch]"
    known = ", ".join(sorted({f"{codec.family} {codec.kind}" for codec in provider.codecs}))
    return f"no codec of provider {provider.id} matches {name}; it handles {known}"


def refuse_different(entry: HeaderEntry, expected: Mapping[str, object]) -> None:
    """Raise PrototypeMismatch where a field of `entry` (or its absence) differs from what the prototype has."""
    for name, value in expected.items():
        found = entry.fields.get(name)
        if found != value:
            raise PrototypeMismatch(f"{entry.kind}.{name}", value, found)


def token_capacity(tokens: int, step: int = 256) -> int:
    """`tokens` rounded up to a multiple of `step` with at least one token free (FORMAT 5)."""
    return (tokens // step + 1) * step
