"""Arrays `[…, tokens, D]` that are written, grown and cut together: the *planes* of a cache.

A plain cache has two, keys and values. A quantized one has six: packed, scales and biases of the keys, then of the
values (FORMAT 5). Every function here returns new array objects and leaves its arguments alone, but `write` and `hold`.
"""

from collections.abc import Iterable
from typing import Any

from .backend import mx

Planes = tuple[mx.array, ...]
TOKEN_AXIS = -2


def held(cache: Any) -> Planes:
    """The planes that `cache` holds in `keys` and `values`: its own array objects, or () where it has none yet."""
    if cache.keys is None:
        return ()
    if isinstance(cache.keys, mx.array):
        return (cache.keys, cache.values)
    return (*cache.keys, *cache.values)


def hold(cache: Any, planes: Planes) -> None:
    """Set `keys` and `values` of `cache`: arrays where there are two planes, triples where there are six."""
    cache.keys, cache.values = paired(planes) if planes else (None, None)


def paired(planes: Planes) -> tuple[Any, Any]:
    """Keys and values as attention wants them: two arrays, or two triples."""
    half = len(planes) // 2
    return (planes[0], planes[1]) if half == 1 else (planes[:half], planes[half:])


def rows(planes: Planes) -> int:
    return planes[0].shape[TOKEN_AXIS] if planes else 0


def cut(planes: Planes, start: int, stop: int) -> Planes:
    """Rows start to stop of each plane, as views. A cut at full length is a new object over the same memory, too."""
    return tuple(plane[..., start:stop, :] for plane in planes)


def distinct(arrays: Iterable[mx.array]) -> Planes:
    """New array objects over the same memory: in-place assignment to one leaves the other's bytes as they were."""
    return tuple(array[...] for array in arrays)


def blank(like: Planes, count: int) -> Planes:
    """Zeros for `count` tokens, in the dtypes and other dimensions of `like`."""
    return tuple(mx.zeros((*plane.shape[:TOKEN_AXIS], count, plane.shape[-1]), dtype=plane.dtype) for plane in like)


def join(*parts: Planes) -> Planes:
    """`parts` one behind the other along the token axis."""
    return tuple(mx.concatenate(list(column), axis=TOKEN_AXIS) for column in zip(*parts, strict=True))


def write(planes: Planes, start: int, new: Planes) -> None:
    """Assign `new` to the rows from `start` on, in place."""
    for plane, part in zip(planes, new, strict=True):
        plane[..., start : start + part.shape[TOKEN_AXIS], :] = part


def quantize(plain: Planes, group_size: int, bits: int) -> Planes:
    """The six planes of two plain ones. Groups run along D, so that every row is quantized by itself."""
    triples = (mx.quantize(plane, group_size=group_size, bits=bits) for plane in plain)
    return tuple(part for triple in triples for part in triple)
