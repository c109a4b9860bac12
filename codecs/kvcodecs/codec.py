"""What the codecs of concrete classes share: finding the class, describing arrays, checking a prototype."""

import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .algebra import CodecError, PrototypeMismatch, Snapshot, SnapshotContext, refuse_different, token_capacity
from .backend import mx
from .entry import HeaderEntry, Slot, slot
from .geometry import KINDS, BadEntry
from .planes import TOKEN_AXIS, Planes, cut, distinct, held, hold


@dataclass(frozen=True)
class ClassRef:
    """A class by module and name, which is looked at only once somebody has imported it."""

    module: str
    name: str

    @classmethod
    def of(cls, found: type[Any]) -> "ClassRef":
        return cls(found.__module__, found.__qualname__)

    def loaded(self) -> type[Any] | None:
        """The class, or None as long as its module has not been imported."""
        found = getattr(sys.modules.get(self.module), self.name, None)
        return found if isinstance(found, type) else None

    def imported(self) -> type[Any]:
        """The class, importing its module. Raises CodecError where that is not possible."""
        package = self.module.partition(".")[0]
        try:
            found: type[Any] = getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError) as error:
            raise CodecError(f"{self} is needed to load this cache: {error}; {_mend(error, package)}") from error
        return found

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def _mend(error: Exception, package: str) -> str:
    missing = getattr(error, "name", None)
    if isinstance(error, ModuleNotFoundError) and missing == package:
        return 'install it with `pip install "mlx-blockstore[mlx-lm]"`'
    ours = isinstance(error, AttributeError) or (missing or package).partition(".")[0] == package
    return f"a newer release of {package} may have it" if ours else f"{package} is not fully installed"


@dataclass(frozen=True)
class ClassCodec:
    """A codec of exactly one class, `owner`, of the family `family`."""

    family: str
    owner: ClassRef

    def matches(self, cache: object) -> bool:
        return type(cache) is self.owner.loaded()


# ---- snapshots


def describe(cache: Any, entry: HeaderEntry, arrays: Iterable[mx.array]) -> Snapshot:
    """`entry` with slots for `arrays` and the cache's minimum, checked by the rules that every reader applies.

    Raises CodecError where the cache is in a state that nobody could load.
    """
    taken = tuple(arrays)
    minimum = minimum_of(cache)
    full = HeaderEntry(
        kind=entry.kind,
        offset=entry.offset,
        fields=entry.fields,
        tensors=tuple(map(array_slot, taken)),
        minimum_reusable_offset=minimum,
    )
    if type(full.offset) is not int or not 0 <= (minimum or 0) <= full.offset:
        raise unsavable(cache, f"offset {full.offset!r}, minimum_reusable_offset {minimum!r}")
    try:
        KINDS[full.kind].check(full)
    except BadEntry as error:
        raise unsavable(cache, str(error)) from error
    return Snapshot(full, taken)


def array_slot(array: mx.array) -> Slot:
    return slot(array.shape, str(array.dtype).rpartition(".")[2])


def unsavable(cache: object, why: str) -> CodecError:
    name = f"{type(cache).__module__}.{type(cache).__qualname__}"
    return CodecError(f"this {name} is in a state that cannot be saved: {why}")


def minimum_of(cache: Any) -> int | None:
    """The minimum that a cache names. 0 and None (what its kind says) are told apart: both are written as they are."""
    found: int | None = getattr(cache, "minimum_reusable_offset", None)
    return found


def carry_minimum(cache: Any, minimum: int | None) -> None:
    """Set the minimum on a new cache; one of mlx-lm's gets the attribute only where there is something to say."""
    if minimum is not None:
        cache.minimum_reusable_offset = minimum


# ---- prototypes

_STRUCTURES = {"list": "list", "arrays": "arrays", "ssm": "arrays"}
# How caches with a token axis take tokens: as keys and values, or as the tensors that they keep.
_TAKES_TOKENS = ("update_and_fetch", "append")


def refuse_other_structure(entry: HeaderEntry, prototype: object) -> None:
    """Raise PrototypeMismatch where no model could use `entry` in place of `prototype`.

    A list, whole arrays and a token axis do not replace each other. Within those a kind may differ from the
    prototype's: a cache may have been quantized while running. A prototype that names its `only_kind` takes no other.
    """
    if prototype is None:
        return
    only = getattr(prototype, "only_kind", entry.kind)
    if only != entry.kind:
        raise PrototypeMismatch("kind", only, entry.kind)
    if hasattr(prototype, "caches"):
        structure = "list"
    else:
        structure = "tokens" if any(hasattr(prototype, name) for name in _TAKES_TOKENS) else "arrays"
    if _STRUCTURES.get(entry.kind, "tokens") != structure:
        raise PrototypeMismatch("kind", type(prototype).__name__, entry.kind)


# ---- caches with a token axis


@dataclass(frozen=True)
class Scalar:
    """A number beside the arrays: an attribute of the cache and a field of the header entry.

    static: given to the constructor, and equal in every cache that may stand in the same layer.
    omit_zero: the field is written only where it is not 0.
    """

    attribute: str
    name: str
    static: bool = True
    omit_zero: bool = False


@dataclass(frozen=True)
class TokenCodec(ClassCodec):
    """A cache of planes with `keys`, `values` and `offset`, and the numbers in `scalars`, in header order."""

    kind: str = field(init=False)
    scalars: ClassVar[tuple[Scalar, ...]] = ()

    def snapshot(self, cache: Any, context: SnapshotContext) -> Snapshot:
        planes = held(cache)
        if any(plane.ndim != 4 for plane in planes):
            raise unsavable(cache, f"keys and values are not [B, H, S, D]: {[plane.shape for plane in planes]}")
        if type(cache.offset) is not int:
            raise unsavable(cache, f"offset {cache.offset!r} is not an int")
        entry = HeaderEntry(self.kind, cache.offset, self._fields(cache))
        live = () if cache.offset == 0 else self._live(cache, planes, context)
        return describe(cache, entry, live)

    def clone(self, cache: Any) -> Any:
        values = {scalar.attribute: getattr(cache, scalar.attribute) for scalar in self.scalars}
        copy = self._build(type(cache), values, cache.offset, distinct(held(cache)))
        carry_minimum(copy, minimum_of(cache))
        return copy

    def capacity(self, entry: HeaderEntry, index: int, prototype: Any = None) -> tuple[int, ...]:
        shape = entry.tensors[index].shape
        return (*shape[:TOKEN_AXIS], self._rows(entry), *shape[TOKEN_AXIS + 1 :])

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        refuse_other_structure(entry, prototype)
        shared = [scalar for scalar in self.scalars if scalar.static and hasattr(prototype, scalar.attribute)]
        expected = {scalar.name: getattr(prototype, scalar.attribute) for scalar in shared}
        omitted = {scalar.name for scalar in shared if scalar.omit_zero}
        refuse_different(entry, {name: value or None if name in omitted else value for name, value in expected.items()})

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        values = {scalar.attribute: entry.fields.get(scalar.name, 0) for scalar in self.scalars}
        cache = self._build(self.owner.imported(), values, entry.offset, tuple(arrays))
        carry_minimum(cache, entry.minimum_reusable_offset)
        return cache

    def _fields(self, cache: Any) -> dict[str, Any]:
        values = ((scalar, getattr(cache, scalar.attribute)) for scalar in self.scalars)
        return {scalar.name: value for scalar, value in values if value or not scalar.omit_zero}

    def _build(self, owner: type[Any], values: dict[str, Any], offset: int, planes: Planes) -> Any:
        cache = owner(**{scalar.attribute: values[scalar.attribute] for scalar in self.scalars if scalar.static})
        for scalar in self.scalars:
            setattr(cache, scalar.attribute, values[scalar.attribute])
        cache.offset = offset
        hold(cache, planes)
        return cache

    def _live(self, cache: Any, planes: Planes, context: SnapshotContext) -> Planes:
        """The rows that are stored. Not called for a cache at offset 0, which holds nothing."""
        return cut(planes, 0, cache.offset)

    def _rows(self, entry: HeaderEntry) -> int:
        """How many rows to allocate for a cache that goes on from `entry`."""
        return token_capacity(entry.offset)
