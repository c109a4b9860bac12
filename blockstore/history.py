"""Known history: what an entry says of the caches that continue it, so that its blocks need not be made again.

Kinds with a token axis are append-only, so a block that lies wholly inside the tokens which both have is the same
block. That is taken from the header, or from what a save or a load left with the cache objects, and never believed
without a look: a sample of the blocks is made and compared with its digest (saving).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from kvcodecs.entry import HeaderEntry, leaves
from kvcodecs.geometry import KINDS, Run, group_class

from . import cut
from .prefixes import pack_tokens
from .records import Header

_ATTRIBUTE: Final = "_blockstore_history"


@dataclass(frozen=True)
class KnownGroup:
    """Tensors that were cut together, and the digests of their blocks; `key` is equal where blocks may be."""

    key: tuple[object, ...]
    counts: tuple[int, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Taken:
    """What is taken over of one group: the digests of its first blocks, which hold its first `tokens` tokens."""

    digests: tuple[bytes, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class History:
    """An entry of the store at `root`. The caches at hand continue its first `length` tokens; `tokens` is packed."""

    root: str
    entry_id: str
    tokens: bytes
    length: int
    groups: tuple[KnownGroup, ...]

    def __deepcopy__(self, memo: object) -> "History":
        """Itself: it never changes, and servers copy caches deeply."""
        return self

    def taken(self, packed: bytes, plan: cut.CutPlan, flat: Sequence[HeaderEntry]) -> tuple[Taken, ...]:
        """One for each group of a plan: its leading blocks that lie wholly inside the tokens which both have."""
        common = common_tokens(self.tokens[: 4 * self.length], packed)
        known = {group.key: group for group in self.groups}
        return tuple(_leading(group.counts, known.get(_key(group, flat)), common) for group in plan.groups)


def of_header(root: str, entry_id: str, header: Header, length: int | None = None) -> History:
    """What a header says; `length`: how many of its tokens the caches continue (None: all)."""
    flat = list(leaves(header.caches))
    groups = []
    for group in header.segments or ():
        leaf, index = group.tensors[0]
        slot = flat[leaf].tensors[index]
        if slot.axis is not None:
            counts = group.counts(slot.shape[slot.axis])
            plan = cut.GroupPlan(group.span, slot.axis, group.tensors, counts)
            groups.append((plan, bytes.fromhex(group.hashes)))
    tokens = pack_tokens(header.tokens)
    return History(root, entry_id, tokens, len(header.tokens) if length is None else length, _known(groups, flat))


def of_plan(
    root: str, entry_id: str, packed: bytes, plan: cut.CutPlan, caches: Sequence[HeaderEntry], digests: Sequence[bytes]
) -> History:
    """What a save has just stored: `digests` of all blocks, numbered through the plan."""
    groups, at = [], 0
    for group in plan.groups:
        groups.append((group, b"".join(digests[at : at + len(group.counts)])))
        at += len(group.counts)
    return History(root, entry_id, packed, len(packed) // 4, _known(groups, list(leaves(caches))))


def remember(caches: Sequence[object], history: History) -> None:
    """Leave the history with the cache objects; one that takes no attribute goes without."""
    for cache in caches:
        with contextlib.suppress(AttributeError, TypeError):
            setattr(cache, _ATTRIBUTE, history)


def forget(caches: Sequence[object]) -> None:
    for cache in caches:
        with contextlib.suppress(AttributeError, TypeError):
            delattr(cache, _ATTRIBUTE)


def remembered(root: str, caches: Sequence[object]) -> History | None:
    """What was left with the caches, where all of them have the same of this store."""
    found = {id(history): history for history in (getattr(cache, _ATTRIBUTE, None) for cache in caches)}
    history: Any = next(iter(found.values()), None)
    return history if len(found) == 1 and isinstance(history, History) and history.root == root else None


def common_tokens(one: bytes, other: bytes) -> int:
    """How many leading tokens two packed lists share."""
    low, high = 0, min(len(one), len(other)) // 4
    if one[: 4 * high] == other[: 4 * high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _leading(counts: Sequence[int], known: KnownGroup | None, common: int) -> Taken:
    if known is None:
        return Taken()
    number = tokens = 0
    for ours, theirs, end in zip(counts, known.counts, accumulate(counts), strict=False):
        if ours != theirs or end > common:
            break
        number, tokens = number + 1, end
    return Taken(known.digests[:number], tokens)


def _known(groups: Sequence[tuple[cut.GroupPlan, bytes]], flat: Sequence[HeaderEntry]) -> tuple[KnownGroup, ...]:
    return tuple(
        KnownGroup(_key(group, flat), group.counts, tuple(_split(joined)))
        for group, joined in groups
        if all(_is_straight(flat[leaf]) for leaf, _ in group.tensors)
    )


def _key(group: cut.GroupPlan, flat: Sequence[HeaderEntry]) -> tuple[object, ...]:
    """What must be equal for blocks of equal tokens to be equal: the cut, and each tensor's class, dtype and shape."""
    described = []
    for leaf, index in group.tensors:
        slot = flat[leaf].tensors[index]
        shape = (*slot.shape[: group.axis], *slot.shape[group.axis + 1 :])
        described.append((leaf, index, group_class(flat[leaf]), slot.dtype, shape, _is_straight(flat[leaf])))
    return (group.span, group.axis, *described)


def _is_straight(entry: HeaderEntry) -> bool:
    """True where row i holds token i, so that what is there stays as it is when tokens come."""
    runs = [run for run in KINDS[entry.kind].runs(entry) if run.length]
    return len(runs) == 1 and runs[0] == Run(0, runs[0].length)


def _split(joined: bytes) -> Iterator[bytes]:
    return (joined[start : start + 32] for start in range(0, len(joined), 32))
