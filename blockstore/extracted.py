"""Rows that mlx-lm takes out of a batch, seen where they lie.

`BatchKVCache.extract` copies a sequence's rows, lazily: who evaluates the copy to save its last few tokens pays for all
of them, while a batch waits. So what is taken out carries a view of the batch's own rows along, which costs nothing. It
must be gone before the batch's next step, which would have to copy the whole batch otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

_ATTRIBUTE: Final = "_blockstore_rows"


@contextmanager
def viewed_extractions() -> Iterator[None]:
    """While this is open, caches that mlx-lm extracts from a batch carry a view of their rows for taken_views()."""
    from mlx_lm.models.cache import BatchKVCache

    original: Callable[[Any, int], Any] = BatchKVCache.extract

    def extract(self: Any, idx: int) -> Any:
        cache = original(self, idx)
        start = self._idx - cache.offset
        rows = (slice(idx, idx + 1), slice(None), slice(start, self._idx))
        setattr(cache, _ATTRIBUTE, (self.keys[rows], self.values[rows]))
        return cache

    BatchKVCache.extract = extract
    try:
        yield
    finally:
        BatchKVCache.extract = original


def taken_views(caches: Sequence[Any]) -> list[Any]:
    """`caches`, with another one over the batch's own rows for each that carries them; it does so no more."""
    return [_over_view(cache) for cache in caches]


def shorten_views(views: Sequence[Any], caches: Sequence[Any]) -> None:
    """Bring what taken_views() made of `caches` to where those stand now."""
    for view, cache in zip(views, caches, strict=True):
        if view is not cache:
            view.offset = cache.offset


def _over_view(cache: Any) -> Any:
    rows = getattr(cache, _ATTRIBUTE, None)
    if rows is None:
        return cache
    delattr(cache, _ATTRIBUTE)
    view = type(cache)()
    view.keys, view.values = rows
    view.offset = view.keys.shape[2]
    return view
