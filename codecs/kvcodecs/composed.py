"""Composed caches: caches that wrap another one, their storage, and add behaviour but no state of their own.

What is saved and cloned is the storage. A loaded storage is composed again by the prototype of its layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from .entry import HeaderEntry

if TYPE_CHECKING:
    from .algebra import Codec, Snapshot, SnapshotContext
    from .backend import mx


class Composed(Protocol):
    """What a cache offers to be taken as composed. Any object with these two methods is."""

    def storage(self) -> Any:
        """The cache that holds the state, itself one that the provider handles; each time the same object."""
        ...

    def over(self, storage: Any) -> "Composed":
        """A new cache like this one over `storage`, which may be of another kind than this one's."""
        ...


def is_composed(cache: object) -> TypeGuard[Composed]:
    offers = (getattr(cache, name, None) for name in ("storage", "over"))
    return not isinstance(cache, type) and all(map(callable, offers))


@dataclass(frozen=True)
class ComposedCodec:
    """Does to the storage of a composed cache what `inner` does, and composes the result again."""

    inner: "Codec"

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def family(self) -> str:
        return self.inner.family

    def matches(self, cache: object) -> bool:
        return is_composed(cache)

    def snapshot(self, cache: Any, context: "SnapshotContext") -> "Snapshot":
        return self.inner.snapshot(cache.storage(), context)

    def clone(self, cache: Any) -> Any:
        return cache.over(self.inner.clone(cache.storage()))

    def capacity(self, entry: HeaderEntry, index: int, prototype: Any = None) -> tuple[int, ...]:
        return self.inner.capacity(entry, index, prototype.storage())

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        self.inner.check_prototype(entry, prototype.storage())

    def load(self, entry: HeaderEntry, arrays: "Sequence[mx.array]", prototype: Any) -> Any:
        return prototype.over(self.inner.load(entry, arrays, prototype.storage()))
