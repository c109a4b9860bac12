"""Kind `paged`: the tokens of one sequence in pages of a pool, found through a table.

A pool is stored whole, also the pages that no token stands in: what is read back is the pool that was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .algebra import CodecError, Snapshot, SnapshotContext, refuse_different
from .backend import mx
from .codec import ClassCodec, array_slot, carry_minimum, describe, refuse_other_structure
from .entry import DTYPES, HeaderEntry
from .planes import Planes, distinct, quantize, rows
from .token_cache import TokenCache

_NAMES = ("keys", "values", "key_scales", "key_biases", "value_scales", "value_biases")
# From the order of `quantize` (keys, their scales and biases, then the values') to that of a pool, and back.
_POOL_ORDER = (0, 3, 1, 2, 4, 5)
_KEY_SIDE, _VALUE_SIDE = (0, 2, 3), (1, 4, 5)


class PagedKVCache(TokenCache):
    """Keys and values of one sequence (batch 1) in pools `[num_blocks, H, block_size, D]`.

    capacity_tokens: what the pool is made for at the first append; a full pool grows by half.
    quantization: (group_size, bits), or None for plain pages. Not attributes `group_size` and `bits`: by those mlx-lm
        knows a cache that returns triples, and this one returns arrays.
    keys, values: the pools, packed uint32 `[…, D * bits / 32]` where quantized; key_scales, key_biases, value_scales
        and value_biases `[…, D / group_size]` are None where plain.
    block_table: the page that holds tokens i * block_size and up, for each i; what lies behind the offset is spare.
    head_dim, v_head_dim, dtype: of the keys and values that it takes; 0, 0 and None before the first.
    direct: that attention reads the pages where they are; carried for those that do.
    """

    def __init__(
        self,
        capacity_tokens: int,
        block_size: int = 256,
        quantization: tuple[int, int] | None = None,
        direct: bool = False,
    ) -> None:
        if capacity_tokens < 0 or block_size < 1:
            raise ValueError(f"a pool for {capacity_tokens} tokens in pages of {block_size} cannot be made")
        super().__init__()
        self.capacity_tokens, self.block_size = capacity_tokens, block_size
        self.quantization = quantization
        self.direct = direct
        self.block_table: list[int] = []
        self.head_dim = self.v_head_dim = 0
        self.dtype: mx.Dtype | None = None
        self.key_scales: mx.array | None = None
        self.key_biases: mx.array | None = None
        self.value_scales: mx.array | None = None
        self.value_biases: mx.array | None = None

    @property
    def pools(self) -> Planes:
        """The cache's own arrays, in header order; () while it holds nothing."""
        found = (getattr(self, name) for name in _NAMES)
        return tuple(pool for pool in found if pool is not None)

    def hold(self, pools: Sequence[mx.array]) -> None:
        """Take over pools in header order: two plain ones, or six."""
        for name, pool in zip(_NAMES[: len(pools)], pools, strict=True):
            setattr(self, name, pool)

    @property
    def num_blocks(self) -> int:
        return self.pools[0].shape[0] if self.pools else max(1, self._blocks(self.capacity_tokens))

    @property
    def state(self) -> list[mx.array]:
        return list(self.pools)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pools."""
        return sum(pool.nbytes for pool in self.pools)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append, and gather all live tokens."""
        self.append(keys, values)
        return self.gather()

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Write the tokens of `keys` and `values`, `[1, H, S, D]`, into pages, those of the lowest numbers first.

        Raises ValueError where they do not fit what the cache holds.
        """
        self._check(keys, values)
        new = self._encode(keys, values)
        self.head_dim, self.v_head_dim, self.dtype = keys.shape[3], values.shape[3], keys.dtype
        stop = self.offset + rows(new)
        self._reserve(self._blocks(stop), new)
        while self.offset < stop:
            self._write_page(new, self.offset - stop + rows(new))

    def gather(self) -> tuple[mx.array, mx.array]:
        """New arrays `[1, H, offset, D]` of the live keys and values in order, dequantized where need be."""
        if not self.pools:
            raise ValueError("the cache holds nothing yet")
        if self.quantization is None:
            return self._gathered(self.pools[0]), self._gathered(self.pools[1])
        return self._dequantized(_KEY_SIDE), self._dequantized(_VALUE_SIDE)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all there are; pages without a token are free again. Returns how many."""
        n = super().trim(n)
        del self.block_table[self._blocks(self.offset) :]
        return n

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _encode(self, keys: mx.array, values: mx.array) -> Planes:
        if self.quantization is None:
            return (keys, values)
        six = quantize((keys, values), *self.quantization)
        return tuple(six[i] for i in _POOL_ORDER)

    def _check(self, keys: mx.array, values: mx.array) -> None:
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[0] != 1 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"expected keys and values [1, H, S, D], found {keys.shape} and {values.shape}")
        found = (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)
        expected: tuple[object, ...] = (*found[:-1], keys.dtype)
        if self.pools:
            expected = (self.pools[0].shape[1], self.head_dim, self.v_head_dim, self.dtype, self.dtype)
        if found != expected:
            raise ValueError(f"expected heads, widths and dtypes {expected}, found {found}")

    def _reserve(self, pages: int, like: Planes) -> None:
        """Make the pools if there are none, and see to it that the table names `pages` pages."""
        if not self.pools:
            self.hold([_blank(self.num_blocks, self.block_size, plane) for plane in like])
        if pages > self.num_blocks:
            more = max(pages - self.num_blocks, self.num_blocks // 2)
            added = (_blank(more, self.block_size, plane) for plane in like)
            self.hold([mx.concatenate(list(pair)) for pair in zip(self.pools, added, strict=True)])
        taken = set(self.block_table)
        free = (page for page in range(self.num_blocks) if page not in taken)
        while len(self.block_table) < pages:
            self.block_table.append(next(free))

    def _write_page(self, new: Planes, start: int) -> None:
        """Write the tokens of `new` from `start` on into the page of the next token, as many as it has room for."""
        page, row = self.block_table[self.offset // self.block_size], self.offset % self.block_size
        count = min(self.block_size - row, rows(new) - start)
        for pool, part in zip(self.pools, new, strict=True):
            pool[page, :, row : row + count] = part[0, :, start : start + count]
        self.offset += count

    def _dequantized(self, side: tuple[int, int, int]) -> mx.array:
        assert self.quantization is not None, "plain pages are gathered as they are"
        group_size, bits = self.quantization
        packed, scales, biases = (self._gathered(self.pools[i]) for i in side)
        return mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)

    def _gathered(self, pool: mx.array) -> mx.array:
        used = mx.array(self.block_table[: self._blocks(self.offset)], dtype=mx.int32)
        pages = mx.take(pool, used, axis=0).transpose(1, 0, 2, 3)
        heads, count, size, width = pages.shape
        return pages.reshape(1, heads, count * size, width)[:, :, : self.offset]


def _blank(pages: int, block_size: int, like: mx.array) -> mx.array:
    return mx.zeros((pages, like.shape[1], block_size, like.shape[3]), dtype=like.dtype)


@dataclass(frozen=True)
class PagedCodec(ClassCodec):
    """Whole pools and the table. Cut to a prefix, only the offset changes."""

    kind: str = field(default="paged", init=False)

    def snapshot(self, cache: Any, context: SnapshotContext) -> Snapshot:
        pools = distinct(_pools(cache))
        return describe(cache, HeaderEntry(self.kind, cache.offset, _fields(cache)), pools)

    def clone(self, cache: Any) -> Any:
        pools = distinct(_pools(cache))
        copy = type(cache)(cache.capacity_tokens, cache.block_size, cache.quantization, cache.direct)
        copy.head_dim, copy.v_head_dim, copy.dtype = cache.head_dim, cache.v_head_dim, cache.dtype
        copy.block_table, copy.offset = list(cache.block_table), cache.offset
        copy.hold(pools)
        carry_minimum(copy, cache.minimum_reusable_offset)
        return copy

    def capacity(self, entry: HeaderEntry, index: int, prototype: Any = None) -> tuple[int, ...]:
        return entry.tensors[index].shape

    def check_prototype(self, entry: HeaderEntry, prototype: Any) -> None:
        """Any cache with a token axis will do; pages of another size or quantization would not fit the same layer."""
        refuse_other_structure(entry, prototype)
        if not self.matches(prototype):
            return
        refuse_different(HeaderEntry(entry.kind, 0, entry.fields["paged"]), {"blockSize": prototype.block_size})
        if prototype.quantization is not None and "bits" in entry.fields:
            refuse_different(entry, _quantization_fields(prototype))

    def load(self, entry: HeaderEntry, arrays: Sequence[mx.array], prototype: Any) -> Any:
        layout, fields = entry.fields["paged"], entry.fields
        quantization = (fields["groupSize"], fields["bits"]) if fields.get("bits") is not None else None
        owner = self.owner.imported()
        cache = owner(layout["capacityTokens"], layout["blockSize"], quantization, layout["direct"])
        cache.head_dim, cache.v_head_dim = layout["headDim"], layout["vHeadDim"]
        cache.dtype = _dtype(layout["dtype"])
        cache.block_table, cache.offset = list(layout["blockTable"]), entry.offset
        cache.hold(arrays)
        carry_minimum(cache, entry.minimum_reusable_offset)
        return cache


def _pools(cache: Any) -> Planes:
    pools: Planes = cache.pools
    if not pools or cache.offset == 0:
        raise CodecError("a cache of kind paged that has seen no token has nothing to save or clone: make a new one")
    return pools


def _fields(cache: Any) -> dict[str, Any]:
    layout = {
        "capacityTokens": cache.capacity_tokens,
        "blockSize": cache.block_size,
        "blockTable": list(cache.block_table),
        "numBlocks": cache.num_blocks,
        "headDim": cache.head_dim,
        "vHeadDim": cache.v_head_dim,
        "dtype": array_slot(mx.zeros(0, dtype=cache.dtype)).dtype,
        "direct": cache.direct,
    }
    return {**_quantization_fields(cache), "paged": layout}


def _quantization_fields(cache: Any) -> dict[str, int]:
    if cache.quantization is None:
        return {}
    group_size, bits = cache.quantization
    return {"bits": bits, "groupSize": group_size}


def _dtype(code: int) -> mx.Dtype:
    name = DTYPES[code][0]
    found: mx.Dtype = getattr(mx, "bool_" if name == "bool" else name)
    return found
