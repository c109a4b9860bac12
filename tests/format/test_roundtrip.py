"""Generated headers: what is written reads back as it was; whatever is damaged is a miss, never another error."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockstore.errors import CacheMiss, InvalidInput
from blockstore.header import (
    Attachment,
    GenerationCheckpoint,
    Group,
    Header,
    blocks_of,
    data_start,
    decode_header,
    encode_header,
    scope_of,
)
from format.headers import attached, changed, in_rows, monolith, nested, pack, rows, segments
from kvcodecs.entry import BlockRef, HeaderEntry, Slot, leaves, slot

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
TEXT = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(-1e15, 1e15) | st.text('aé\\"\n'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=5,
)
# Damage needs more tries than the rest; the soak profile has more still.
many = settings(max_examples=max(300, settings().max_examples))
NAMES = ("float16", "bfloat16", "float32", "uint8")


@st.composite
def slots_in_rows(draw: st.DrawFn, *shape: int) -> Slot:
    plain = slot(shape, draw(st.sampled_from(NAMES)))
    sizes, left = [], plain.bytes
    while left:
        sizes.append(draw(st.integers((left + 3) // 4, left)))
        left -= sizes[-1]
    return replaced(plain, blocks=tuple(BlockRef(draw(DIGESTS), size) for size in sizes))


def replaced(plain: Slot, **changes: Any) -> Slot:
    return Slot(**{**{name: getattr(plain, name) for name in plain.__struct_fields__}, **changes})


@st.composite
def leaf_entries(draw: st.DrawFn, tokens: int, *, grouped: bool) -> HeaderEntry:
    """A cache of a kind with or without a token axis, or one that holds nothing."""
    kind = draw(st.sampled_from(["kv", "chunked", "rotating", "arrays", "future", "empty"]))
    if kind == "empty" or tokens == 0:
        return HeaderEntry(kind="kv", offset=0)
    if kind in ("arrays", "future"):
        flags = draw(st.lists(st.booleans(), min_size=1, max_size=3)) if kind == "arrays" else [True]
        tensors = tuple(draw(slots_in_rows(2, draw(st.integers(0, 3)))) for flag in flags if flag)
        fields: dict[str, Any] = {"slots": flags} if kind == "arrays" else {"anything": draw(JSON_VALUES)}
        return HeaderEntry(kind=kind, offset=tokens if tensors else 0, fields=fields, tensors=tensors)
    stored, fields = draw(token_axes(kind, tokens))
    shape = (1, draw(st.integers(1, 2)), stored, draw(st.integers(1, 3)))
    if grouped:
        tensors = tuple(replaced(slot(shape, draw(st.sampled_from(NAMES))), axis=2) for _ in range(2))
    else:
        tensors = (draw(slots_in_rows(*shape)), draw(slots_in_rows(*shape)))
    minimum = draw(st.none() | st.integers(0, tokens))
    return HeaderEntry(kind, tokens, fields, tensors, minimum_reusable_offset=minimum)


@st.composite
def token_axes(draw: st.DrawFn, kind: str, tokens: int) -> tuple[int, dict[str, Any]]:
    """How many rows a cache stores, and its fields."""
    if kind == "chunked":
        start = draw(st.integers(0, tokens - 1))
        return tokens - start, {"chunkSize": 8, "startPosition": start}
    if kind == "rotating":
        size = draw(st.integers(1, 9))
        rows_stored = min(tokens, size)
        idx = draw(st.integers(0, rows_stored)) if tokens > rows_stored else tokens
        return rows_stored, {"idx": idx, "maxSize": size}
    return tokens, {}


@st.composite
def groups_of(draw: st.DrawFn, caches: tuple[HeaderEntry, ...]) -> tuple[Group, ...]:
    """One group for each cache with a token axis, cut at a span or at sizes of its own."""
    groups = []
    for index, entry in enumerate(leaves(caches)):
        if not entry.tensors or entry.tensors[0].axis is None:
            continue
        length, span = entry.tensors[0].shape[2], draw(st.sampled_from([1, 2, 4, 64]))
        counts = draw(st.none() | st.just(tuple([1] * length)))
        blocks = length if counts else -(-length // span)
        hashes = "".join(draw(st.lists(DIGESTS, min_size=blocks, max_size=blocks)))
        groups.append(Group(span, ((index, 0), (index, 1)), hashes, counts))
    return tuple(groups)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    tokens = draw(st.lists(st.integers(0, 2**53 - 1), max_size=12))
    grouped = draw(st.booleans())
    leaf = leaf_entries(len(tokens), grouped=grouped)
    tree = st.recursive(leaf, lambda inner: st.lists(inner, max_size=2).map(lambda of: list_of(of, len(tokens))))
    caches = tuple(draw(st.lists(tree, max_size=4)))
    checkpoint = GenerationCheckpoint("k", "", 3, 2, 1, draw(st.integers(0, 2**53 - 1)), True)
    attachment = st.builds(Attachment, st.text("ab"), JSON_VALUES, st.tuples(slots_in_rows(3), slots_in_rows(0, 2)))
    return Header(
        format_version=5,
        created_at=draw(st.integers(0, 2**53 - 1)),
        model_id=draw(TEXT),
        config_fingerprint=draw(TEXT),
        tokenizer_hash=draw(TEXT),
        ns=draw(TEXT),
        codec_provider=draw(TEXT),
        tokens=tuple(tokens),
        caches=caches,
        attachments=tuple(draw(st.lists(attachment, max_size=2))),
        generation_checkpoint=draw(st.none() | st.just(checkpoint)),
        block_hash=draw(st.sampled_from([None, "blake3", "sha256"])),
        segments=draw(groups_of(caches)) if grouped else None,
        made_with=draw(st.none() | st.dictionaries(st.sampled_from(["mlx", "machine"]), st.text("ab1."))),
    )


def list_of(children: list[HeaderEntry], tokens: int) -> HeaderEntry:
    whole = HeaderEntry("list", tokens, children=tuple(children))
    return HeaderEntry("list", 0, children=tuple(children)) if whole.is_empty else whole


@given(headers())
def test_what_is_written_reads_back(header: Header) -> None:
    data = encode_header(header)
    found = decode_header(data, path="p", file_size=len(data))
    assert found == header
    assert encode_header(found) == data


@given(headers())
def test_blocks_add_up_to_the_tensors(header: Header) -> None:
    slots = [one for entry in leaves(header.caches) for one in entry.tensors]
    slots += [one for attachment in header.attachments for one in attachment.tensors]
    assert sum(size for _, size in blocks_of(header)) == sum(one.bytes for one in slots)


def test_blocks_of_segments_in_order() -> None:
    """Groups come after the blocks of single slots; a block's size is its tokens over all tensors of the group."""
    one, two = in_rows(3)["blocks"]
    attachment = {"schema": "s", "metadata": {}, "tensors": [in_rows(3)]}
    header = decode_header(pack({**segments(), "attachments": [attachment]}), path="p")
    first, second = header.segments or ()
    expected = [(one["hash"], one["bytes"]), (two["hash"], two["bytes"])]
    expected += list(zip(first.digests(), [4 * 4 * 8, 1 * 4 * 8], strict=True))
    expected += list(zip(second.digests(), [1 * 2 * 8, 2 * 2 * 8], strict=True))
    assert list(blocks_of(header)) == expected


@given(st.integers(1, 300), st.sampled_from([1, 4, 64, 128]))
def test_counts_cover_every_token(total: int, span: int) -> None:
    counts = Group(span, ((0, 0),), "").counts(total)
    assert sum(counts) == total
    assert set(counts[:-1]) <= {span}
    assert 1 <= counts[-1] <= span


def test_keys_stand_in_the_documented_order() -> None:
    value = {**segments(), "attachments": rows()["attachments"], "generationCheckpoint": rows()["generationCheckpoint"]}
    value["madeWith"] = {"mlx": "0.32.4"}
    text = encode_header(decode_header(pack(value), path="p"))[26:]
    found = json.loads(text)
    assert list(found) == [
        "formatVersion", "createdAt", "modelId", "configFingerprint", "tokenizerHash", "ns", "generationCheckpoint",
        "attachments", "codecProvider", "blockHash", "madeWith", "segments", "tokens", "caches",
    ]  # fmt: skip
    assert list(found["caches"][2]) == ["kind", "offset", "idx", "maxSize", "tensors"]
    assert list(found["caches"][0]["tensors"][0]) == ["off", "bytes", "shape", "dtype", "hash", "axis"]
    assert list(found["attachments"][0]["tensors"][0]) == ["off", "bytes", "shape", "dtype", "hash", "blocks"]
    assert list(found["segments"][1]) == ["span", "tensors", "hashes", "tokens"]
    nested_entry = json.loads(encode_header(decode_header(pack(nested(1)), path="p"))[26:])["caches"][0]
    assert list(nested_entry) == ["kind", "offset", "children", "tensors"]


@pytest.mark.parametrize("value", [7, "x", ["mlx"], {"mlx": 1}])
def test_another_writers_made_with_is_an_unknown_field(value: object) -> None:
    assert decode_header(pack({**segments(), "madeWith": value}), path="p").made_with is None


def test_data_start_is_a_page_before_v5_only() -> None:
    assert [data_start(version, size) for version, size in [(3, 16358), (4, 16359), (5, 16359)]] == [
        16384,
        32768,
        16385,
    ]


# ---- damage


def places(value: Any, where: str = "") -> list[str]:
    """Every path in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in items for path in [f"{where}.{key}", *places(item, f"{where}.{key}")]]


SOUND = [rows(), segments(), monolith(), attached(), nested(2)]
WORDS = ["kv", "list", "qkv", "arrays", "mla", "a" * 64, [[]], -1]
HOSTILE = JSON_VALUES | st.integers() | st.floats() | st.sampled_from(WORDS)


@given(st.sampled_from(SOUND), st.data())
@many
def test_a_changed_value_is_a_miss_or_a_header(base: dict[str, Any], data: st.DataObject) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from(places(base)), HOSTILE, min_size=1, max_size=2))
    try:
        value = changed(base, **changes)
    except (TypeError, KeyError, IndexError):  # the second place lay in what the first one replaced
        return
    expect_miss_or_header(pack(value, version=base["formatVersion"]))


@given(st.sampled_from(SOUND), st.integers(0, 4000), st.binary(max_size=4), st.integers(0, 4))
@example(rows(), 26, b"\xff", 1)
@many
def test_changed_bytes_with_a_fitting_hash_are_a_miss_or_a_header(
    base: dict[str, Any], at: int, new: bytes, removed: int
) -> None:
    text = pack(base)[26:]
    at %= len(text)
    expect_miss_or_header(pack(text[:at] + new + text[at + removed :], version=base["formatVersion"]))


@given(st.sampled_from(SOUND), st.integers(0, 5000), st.integers(1, 255))
def test_a_flipped_byte_is_a_miss(base: dict[str, Any], at: int, flip: int) -> None:
    """In v5 nothing reads dataStart; every other byte counts."""
    data = bytearray(pack(base))
    at %= len(data)
    data[at] ^= flip
    if base["formatVersion"] == 5 and 14 <= at < 18:
        assert decode_header(bytes(data), path="p") == decode_header(pack(base), path="p")
    else:
        with pytest.raises(CacheMiss):
            decode_header(bytes(data), path="p")


def expect_miss_or_header(data: bytes) -> None:
    """What is accepted can be written, and reads back as it is."""
    try:
        header = decode_header(data, path="p", file_size=65536)
    except CacheMiss:
        return
    assert decode_header(encode_header(header), path="p", file_size=65536) == header


# ---- writing


def test_what_no_reader_takes_is_not_written() -> None:
    sound = decode_header(pack(rows()), path="p")
    for change in (
        {"format_version": 2},
        {"tokens": (1, 2)},
        {"tokens": (1, 2, 3, 4, -5)},
        {"model_id": "\ud800"},
        {"block_hash": "md5"},
        {"ns": "x" * (33 << 20)},
        {"caches": (HeaderEntry("future", 0, {"kind": "other"}),)},
        {"attachments": (Attachment("s", {"a": float("nan")}, ()),)},
        {"segments": (Group(4, ((0, 0),), "00" * 32),)},
    ):
        fields = {name: getattr(sound, name) for name in sound.__struct_fields__}
        with pytest.raises(InvalidInput):
            encode_header(Header(**{**fields, **change}))


# ---- scope


def test_scope_is_the_documented_digest() -> None:
    from blake3 import blake3

    text = b"\1\1\0\0\0m" + b"\0" + b"\1\0\0\0\0" + b"\1\2\0\0\0\xc3\xa9" + b"\1\x0c\0\0\0mlx-cache-v5"
    assert scope_of("m", None, "", "é", "mlx-cache-v5") == blake3(text).hexdigest()[:32]


def test_scopes_differ_where_any_field_does() -> None:
    known: list[tuple[str | None, ...]] = [("m", "c", "t", "n", "p")]
    for index in range(5):
        for value in (None, "", "x"):
            fields = list(known[0])
            fields[index] = value
            known.append(tuple(fields))
    known += [("mc", "", "t", "n", "p"), ("", "mc", "t", "n", "p")]
    assert len({scope_of(*fields) for fields in known}) == len(known)
    with pytest.raises(InvalidInput):
        scope_of("\ud800", None, None, None, None)
