"""What a server's cache list encodes: where its caches and its key disagree, the least that all of them hold."""

from collections.abc import Iterator, Sequence
from typing import Any


def agreed(tokens: Sequence[Any], caches: Sequence[Any]) -> int:
    """Trim `caches`, in place, to what all of them hold of `tokens`; how many tokens that is.

    Speculative decoding leaves the key ahead of the model, and the model ahead of its draft; a generation that ends at
    its limit leaves the last token unfed. 0, with nothing trimmed, where the caches cannot be brought to one length.
    """
    leaves = [leaf for cache in caches for leaf in leaves_of(cache)]
    held = [(leaf, offset) for leaf in leaves if (offset := offset_of(leaf)) is not None]
    if not held:
        return len(tokens)
    least = min(len(tokens), *(offset for _, offset in held))
    ahead = [(leaf, offset - least) for leaf, offset in held if offset > least]
    # A state without an offset stands where the model stood: nobody can take it back.
    if ahead and (len(held) < len(leaves) or not all(leaf.is_trimmable() for leaf, _ in ahead)):
        return 0
    for leaf, surplus in ahead:
        leaf.trim(surplus)
    return least


def offset_of(leaf: Any) -> int | None:
    """How many tokens a cache says that it holds; None for one that does not say."""
    offset = getattr(leaf, "offset", None)
    return offset if type(offset) is int else None


def leaves_of(cache: Any) -> Iterator[Any]:
    """The caches of a composed cache, else the cache itself."""
    children = getattr(cache, "caches", None)
    if isinstance(children, (list, tuple)):
        for child in children:
            yield from leaves_of(child)
    else:
        yield cache
