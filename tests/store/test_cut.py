"""Where tensors are cut: every token in exactly one block, sizes within bounds, groups from geometry alone."""

from collections import Counter
from collections.abc import Sequence
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from blockstore import cut
from kvcodecs.entry import HeaderEntry, Slot, slot
from kvcodecs.geometry import KINDS

SPANS = st.sampled_from([1, 2, 8, 64])
SIZES = st.sampled_from([64, 1024, 1 << 14])


@st.composite
def entry(draw: st.DrawFn, length: int) -> HeaderEntry:
    """One cache of any kind that has seen `length` tokens, or an empty one."""
    kind = draw(st.sampled_from(["kv", "kv", "rotating", "qkv", "chunked", "ssm", "empty"]))
    heads, dim = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 32]))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "uint8"]))
    if kind == "empty":
        return HeaderEntry("kv", 0)
    if kind == "ssm":
        return HeaderEntry("ssm", length, {}, (slot((1, dim, 3), dtype), slot((1, dim, 2, 2), "float32")))
    if kind == "rotating":
        max_size, keep = draw(st.integers(6, 40)), draw(st.integers(0, 5))
        fields, rows = ring(length, max_size, keep)
        return HeaderEntry(kind, length, fields, planes(heads, rows, (dim, dim), dtype))
    if kind == "chunked":
        start = draw(st.integers(0, length - 1))
        fields = {"chunkSize": 100, "startPosition": start}
        return HeaderEntry(kind, length, fields, planes(heads, length - start, (dim, 1), dtype))
    if kind == "qkv":
        side = (slot((1, heads, length, 4 * dim), "uint32"), *planes(heads, length, (dim, dim), "float16"))
        return HeaderEntry(kind, length, {"groupSize": 32, "bits": 4}, side * 2)
    return HeaderEntry("kv", length, {}, planes(heads, length, (dim, draw(st.sampled_from([0, dim]))), dtype))


def planes(heads: int, rows: int, dims: Sequence[int], dtype: str) -> tuple[Slot, ...]:
    return tuple(slot((1, heads, rows, dim), dtype) for dim in dims)


def ring(length: int, max_size: int, keep: int) -> tuple[dict[str, int], int]:
    if length <= max_size:
        return {"idx": length, "maxSize": max_size, "keep": keep}, length
    idx = keep + (length - max_size - 1) % (max_size - keep) + 1
    return {"idx": idx, "maxSize": max_size, "keep": keep}, max_size


@st.composite
def entries(draw: st.DrawFn) -> list[HeaderEntry]:
    length = draw(st.integers(1, 200))
    found = draw(st.lists(entry(length), min_size=1, max_size=6))
    return [part for part in found for _ in range(draw(st.sampled_from([1, 1, 3])))]


def tokens_along(part: HeaderEntry, index: int, axis: int) -> int:
    return part.tensors[index].shape[axis]


@given(entries(), SPANS, SIZES)
def test_every_token_of_every_tensor_is_in_exactly_one_block(
    leaves: list[HeaderEntry], span: int, block_bytes: int
) -> None:
    plan = cut.segments(leaves, span, block_bytes)
    seen = Counter(ref for group in plan.groups for ref in group.tensors)
    seen.update(part.tensor for part in plan.loose)
    assert seen == Counter(ref for ref, _ in cut.numbered(leaves))
    for group in plan.groups:
        assert {tokens_along(leaves[leaf], index, group.axis) for leaf, index in group.tensors} == {sum(group.counts)}
        assert min(group.counts) > 0
    for part in plan.loose:
        leaf, index = part.tensor
        assert sum(part.counts) == prod(leaves[leaf].tensors[index].shape)


@given(entries(), SPANS, SIZES)
def test_no_block_passes_twice_the_target_unless_it_is_a_single_token(
    leaves: list[HeaderEntry], span: int, block_bytes: int
) -> None:
    plan = cut.segments(leaves, span, block_bytes)
    for group in plan.groups:
        per_token = sum(cut.token_bytes(leaves[leaf].tensors[index], group.axis) for leaf, index in group.tensors)
        assert group.span == 1 or group.span * per_token <= 2 * block_bytes
        assert max(group.counts) <= group.span <= span
        assert span % group.span == 0
    for part in plan.loose:
        leaf, index = part.tensor
        assert max(part.counts, default=0) * leaves[leaf].tensors[index].item_size <= block_bytes


@given(entries(), SPANS, SIZES)
def test_cuts_fall_at_multiples_of_the_span_and_where_the_order_breaks(
    leaves: list[HeaderEntry], span: int, block_bytes: int
) -> None:
    for group in cut.segments(leaves, span, block_bytes).groups:
        leaf = leaves[group.tensors[0][0]]
        positions = [p for run in KINDS[leaf.kind].runs(leaf) for p in range(run.position, run.position + run.length)]
        at = 0
        for count in group.counts[:-1]:
            at += count
            assert positions[at] % group.span == 0 or positions[at] != positions[at - 1] + 1
        inside = {at for at in range(1, len(positions)) if positions[at] % group.span == 0}
        assert inside <= {sum(group.counts[:i]) for i in range(len(group.counts))}


@given(st.data(), SPANS, SIZES)
def test_groups_do_not_depend_on_how_many_tokens_there_are(data: st.DataObject, span: int, block_bytes: int) -> None:
    layers = data.draw(st.lists(st.sampled_from([1, 2, 32, 64]), min_size=1, max_size=8))

    def plan(length: int) -> list[tuple[int, tuple[cut.Ref, ...]]]:
        leaves = [HeaderEntry("kv", length, {}, planes(2, length, (dim, dim), "float32")) for dim in layers]
        return [(group.span, group.tensors) for group in cut.segments(leaves, span, block_bytes).groups]

    assert plan(data.draw(st.integers(1, 500))) == plan(data.draw(st.integers(1, 500)))


@given(entries(), SPANS, SIZES)
def test_a_group_holds_one_class_and_equal_positions(leaves: list[HeaderEntry], span: int, block_bytes: int) -> None:
    for group in cut.segments(leaves, span, block_bytes).groups:
        parts = [leaves[leaf] for leaf, _ in group.tensors]
        assert len({(part.kind, *(part.fields.get(name) for name in KINDS[part.kind].static)) for part in parts}) == 1
        assert len({KINDS[part.kind].runs(part) for part in parts}) == 1


def test_layers_of_other_kinds_between_them_do_not_split_a_class() -> None:
    full = HeaderEntry("kv", 8, {}, planes(1, 8, (4, 4), "float32"))
    sliding = HeaderEntry("rotating", 8, {"idx": 8, "maxSize": 16}, planes(1, 8, (4, 4), "float32"))
    groups = cut.segments([full, sliding, full, sliding], 4, 1 << 20).groups
    assert [group.tensors for group in groups] == [((0, 0), (0, 1), (2, 0), (2, 1)), ((1, 0), (1, 1), (3, 0), (3, 1))]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8]), st.integers(4, 64))
def test_rows_restart_at_every_row(shape: list[int], item_size: int, block_bytes: int) -> None:
    tensor = slot(shape, {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}[item_size])
    [plan] = cut.rows([((0, 0), tensor)], block_bytes).loose
    assert sum(plan.counts) == prod(shape)
    row = prod(shape[-2:])
    bounds = {sum(plan.counts[:i]) for i in range(len(plan.counts))}
    assert set(range(0, prod(shape), row or 1)) <= bounds or not plan.counts
    assert max(plan.counts, default=0) * item_size <= max(block_bytes, item_size)
