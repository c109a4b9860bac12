"""What each kind of cache demands of its header entry beyond ranks and token counts; for `geometry` alone.

Every `verify_…` raises BadEntry for an entry that no cache of the kind could have written.
"""

from collections.abc import Mapping
from typing import Any

from .entry import DTYPES, HeaderEntry, Slot


class BadEntry(ValueError):
    """A header entry that no cache could have written. `where` names the field, with what was expected and found."""

    def __init__(self, where: str, expected: object, found: object) -> None:
        super().__init__(f"{where}: expected {expected}, found {found!r}")
        self.where, self.expected, self.found = where, expected, found


def natural(entry: HeaderEntry, name: str, least: int = 0) -> int:
    """The integer field `name` of `entry`, at least `least`; BadEntry where it is missing or something else."""
    return _natural_in(entry.fields, name, name, least)


def _natural_in(fields: Mapping[str, Any], name: str, where: str, least: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value < 1 << 53:
        raise BadEntry(where, f"an integer ≥ {least}", value)
    return value


def _is(tensor: Slot, index: int, shape: tuple[int, ...], dtype: str | None = None) -> None:
    """Raise BadEntry unless tensor `index` has this shape, and this dtype where one is demanded."""
    if tensor.shape != shape:
        raise BadEntry(f"tensors[{index}].shape", list(shape), list(tensor.shape))
    if dtype is not None and DTYPES[tensor.dtype][0] != dtype:
        raise BadEntry(f"tensors[{index}].dtype", dtype, DTYPES[tensor.dtype][0])


# ---- keys and values


def verify_same_batch(entry: HeaderEntry) -> None:
    first = entry.tensors[0].shape
    for i, tensor in enumerate(entry.tensors):
        if tensor.shape[:1] != first[:1]:
            raise BadEntry(f"tensors[{i}].shape", f"batch {first[0]}", list(tensor.shape))


def verify_quantized(entry: HeaderEntry) -> None:
    """Check packed, scales and biases of both sides against group size and bits (groups run along D)."""
    group, bits = _quantization(entry)
    for side in (0, 3):
        packed, scales, biases = entry.tensors[side : side + 3]
        if scales.shape != biases.shape or packed.shape[:-1] != scales.shape[:-1]:
            raise BadEntry(f"tensors[{side + 2}].shape", f"as scales {list(scales.shape)}", list(biases.shape))
        if packed.shape[-1] * 32 != scales.shape[-1] * group * bits:
            width = scales.shape[-1] * group * bits // 32
            raise BadEntry(f"tensors[{side}].shape", f"{width} words for groups of {group}", list(packed.shape))


def _quantization(entry: HeaderEntry) -> tuple[int, int]:
    group, bits = natural(entry, "groupSize", 1), natural(entry, "bits", 1)
    if bits > 32:
        raise BadEntry("bits", "at most 32", bits)
    return group, bits


# ---- rings


def ring_rows(entry: HeaderEntry) -> int:
    """How many rows the ring of a rotating entry has as stored."""
    return entry.tensors[0].shape[2]


def verify_ring(entry: HeaderEntry) -> None:
    max_size, idx = natural(entry, "maxSize", 1), natural(entry, "idx")
    keep = natural(entry, "keep") if "keep" in entry.fields else 0
    rows = ring_rows(entry)
    if keep >= max_size:
        raise BadEntry("keep", f"less than maxSize {max_size}", keep)
    if idx > rows:
        raise BadEntry("idx", f"at most {rows}, the rows of the ring", idx)
    if entry.offset < rows and idx != entry.offset:
        raise BadEntry("idx", f"{entry.offset}, the offset, in a ring that is not full", idx)
    if entry.offset > rows and idx < keep:
        raise BadEntry("idx", f"at least keep {keep} in a ring that has dropped tokens", idx)


def verify_quantized_ring(entry: HeaderEntry) -> None:
    verify_ring(entry)
    verify_quantized(entry)


# ---- mlx-lm's own


def verify_chunked(entry: HeaderEntry) -> None:
    natural(entry, "chunkSize", 1)


def verify_arrays(entry: HeaderEntry) -> None:
    slots = entry.fields.get("slots")
    if not isinstance(slots, list) or any(type(flag) is not bool for flag in slots):
        raise BadEntry("slots", "a list of true and false, one for each slot", slots)
    if sum(slots) != len(entry.tensors):
        raise BadEntry("slots", f"{len(entry.tensors)} of them set, one for each tensor", slots)
    for name in ("lengths", "leftPadding"):
        values = entry.fields.get(name, [])
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise BadEntry(name, "a list of integers", values)


# ---- turboquant

TURBOQUANT_GROUP = 32
"""Elements of a head that share one scale."""


def verify_turboquant(entry: HeaderEntry) -> None:
    k_bits, v_bits = (natural(entry, name, 1) for name in ("kBits", "vBits"))
    for name, bits in (("kBits", k_bits), ("vBits", v_bits)):
        if bits > 8:
            raise BadEntry(name, "at most 8", bits)
    head_dim = natural(entry, "headDim", 1)
    if head_dim % TURBOQUANT_GROUP:
        raise BadEntry("headDim", f"a multiple of {TURBOQUANT_GROUP}", head_dim)
    leading, groups = entry.tensors[0].shape[:-1], head_dim // TURBOQUANT_GROUP
    packed = ("int8" if k_bits == 8 else "uint8", head_dim * k_bits // 8), ("uint8", head_dim * v_bits // 8)
    scale = ("float16", groups)
    for i, (dtype, width) in enumerate((packed[0], scale, scale, packed[1], scale)):
        _is(entry.tensors[i], i, (*leading, width), dtype)


# ---- latent attention


def verify_latent(entry: HeaderEntry) -> None:
    widths = [natural(entry, "kvLoraRank", 1), natural(entry, "ropeHeadDim", 1)]
    if entry.kind == "mla-dsa":
        widths.append(natural(entry, "dsaHeadDim", 1))
    elif "dsaHeadDim" in entry.fields:
        raise BadEntry("dsaHeadDim", f"none in kind {entry.kind}", entry.fields["dsaHeadDim"])
    max_tokens = natural(entry, "maxTokens", 1)
    if entry.offset > max_tokens:
        raise BadEntry("offset", f"at most maxTokens {max_tokens}", entry.offset)
    leading = entry.tensors[0].shape[:-1]
    for i, width in enumerate(widths):
        _is(entry.tensors[i], i, (*leading, width), "float32")


# ---- pages


def verify_paged(entry: HeaderEntry) -> None:
    """Check the layout, the table, and that every pool has the shape that the layout says."""
    layout = entry.fields.get("paged")
    if not isinstance(layout, dict):
        raise BadEntry("paged", "the layout of the pages", layout)
    if type(layout.get("direct")) is not bool:
        raise BadEntry("paged.direct", "true or false", layout.get("direct"))
    _layout_number(layout, "capacityTokens", 0)
    dtype = _layout_number(layout, "dtype", 0)
    if dtype >= len(DTYPES):
        raise BadEntry("paged.dtype", f"a code up to {len(DTYPES) - 1}", dtype)
    _verify_table(layout, entry.offset)
    pages, heads = _layout_number(layout, "numBlocks", 1), entry.tensors[0].shape[1]
    for i, width in enumerate(_page_widths(entry, layout)):
        _is(entry.tensors[i], i, (pages, heads, _layout_number(layout, "blockSize", 1), width))


def _verify_table(layout: Mapping[str, Any], offset: int) -> None:
    table, pages = layout.get("blockTable"), _layout_number(layout, "numBlocks", 1)
    if not isinstance(table, list) or any(type(page) is not int or not 0 <= page < pages for page in table):
        raise BadEntry("paged.blockTable", f"a list of pages below {pages}", table)
    if len(set(table)) != len(table):
        raise BadEntry("paged.blockTable", "every page once at most", table)
    needed = -(-offset // _layout_number(layout, "blockSize", 1))
    if len(table) < needed:
        raise BadEntry("paged.blockTable", f"at least {needed} pages for {offset} tokens", table)


def _page_widths(entry: HeaderEntry, layout: Mapping[str, Any]) -> tuple[int, ...]:
    """The last dimension of each pool, in header order."""
    dims = _layout_number(layout, "headDim", 0), _layout_number(layout, "vHeadDim", 0)
    if len(entry.tensors) == len(dims):
        return dims
    group, bits = _quantization(entry)
    for name, dim in zip(("headDim", "vHeadDim"), dims, strict=True):
        if dim % group or dim * bits % 32:
            raise BadEntry(f"paged.{name}", f"a multiple of groupSize {group} that fills words at {bits} bits", dim)
    key, value = dims
    return (key * bits // 32, value * bits // 32, *[key // group] * 2, *[value // group] * 2)


def _layout_number(layout: Mapping[str, Any], name: str, least: int) -> int:
    return _natural_in(layout, name, f"paged.{name}", least)
