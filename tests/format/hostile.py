"""Headers that a reader must refuse, one a line: what is wrong, the bytes, the error, the field that it names."""

import reprlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from blockstore.errors import CacheMiss, CorruptEntry, UnsupportedFormat
from format.headers import (
    REMOVED,
    Json,
    attached,
    changed,
    digest,
    entry,
    header,
    in_file,
    in_rows,
    monolith,
    nested,
    pack,
    rows,
    segments,
    tensor,
)


class Row(NamedTuple):
    fact: str
    data: bytes
    error: type[CacheMiss]
    field: str
    file_size: int | None = None


def corrupt(base: Json, path: str, value: Any, field: str | None = None) -> Row:
    shown = "removed" if value is REMOVED else reprlib.repr(value)
    return Row(f"{path} = {shown}", pack(changed(base, **{path: value})), CorruptEntry, field or path)


def of_prefix() -> Iterator[Row]:
    sound = pack(rows())
    yield Row("empty", b"", CorruptEntry, "size")
    yield Row("shorter than the prefix", sound[:25], CorruptEntry, "size")
    yield Row("JSON cut off", sound[:-1], CorruptEntry, "headerLen")
    yield Row("data shorter than the file", sound[:-1], CorruptEntry, "headerLen", len(sound))
    yield Row("foreign file", b"PK\3\4" + bytes(40), CorruptEntry, "magic")
    yield Row("older format", pack(rows(), magic=b"MLXBUNKV1\n"), UnsupportedFormat, "magic")
    yield Row("headerLen beyond the file", pack(rows(), size=2**32 - 1), CorruptEntry, "headerLen")
    yield Row("headerLen beyond the limit", pack(rows(), size=(32 << 20) + 1), UnsupportedFormat, "headerLen", 1 << 40)
    yield Row("headerLen 0", pack(rows(), size=0), CorruptEntry, "headerHash")
    yield Row("hash of other bytes", pack(rows(), hash=1), CorruptEntry, "headerHash")
    yield Row("a byte flipped", sound.replace(b'"kv"', b'"kw"', 1), CorruptEntry, "headerHash")
    yield Row("dataStart off by a page", pack(monolith(), start=32768), CorruptEntry, "dataStart")
    yield Row("dataStart 0", pack(monolith(), start=0), CorruptEntry, "dataStart")


def of_json() -> Iterator[Row]:
    for name, text in {
        "empty": b"", "not JSON": b"hello", "cut": b'{"formatVersion":5,', "a list": b"[]", "twice": b"{}{}",
        "NaN": b'{"formatVersion":NaN}', "not UTF-8": b'{"formatVersion":5,"ns":"\xff"}',
        "a name that is not UTF-8": b'{"formatVersion":5,"\xf3ns":[],"createdAt":1,"tokens":[1],"caches":[]}',
    }.items():  # fmt: skip
        field = "formatVersion" if name == "twice" else "JSON"
        yield Row(f"JSON: {name}", pack(text), CorruptEntry, field)
    yield Row("no version", pack(changed(rows(), formatVersion=REMOVED), version=5), CorruptEntry, "formatVersion")
    for version in (0, 2, 6, -1, 2**70):
        data = pack(changed(rows(), formatVersion=version), version=5)
        yield Row(f"version {version}", data, UnsupportedFormat, "formatVersion")
    lone = pack(rows()).replace(b'"ns":""', b'"ns":"\\ud800"')[26:]
    yield Row("lone surrogate", pack(lone), CorruptEntry, "JSON")
    for name in ("createdAt", "tokens", "caches"):
        yield corrupt(rows(), name, REMOVED)
        yield corrupt(rows(), name, None)
        yield corrupt(rows(), name, "x")
    for name in ("modelId", "configFingerprint", "tokenizerHash", "ns", "codecProvider"):
        yield corrupt(rows(), name, 5)
    yield corrupt(rows(), "createdAt", -1)
    yield corrupt(rows(), "createdAt", 1.5)


def of_tokens_and_offsets() -> Iterator[Row]:
    yield corrupt(rows(), "tokens[1]", -1)
    yield corrupt(rows(), "tokens[4]", 2**53)
    yield corrupt(rows(), "tokens[1]", 1.5)
    yield corrupt(rows(), "tokens[1]", True)
    yield corrupt(rows(), "tokens[5]", 7, "caches[0].offset")
    yield corrupt(rows(), "caches[1].offset", 4)
    yield corrupt(rows(), "caches[1].offset", -1)
    yield corrupt(rows(), "caches[1].offset", 2**53)
    yield corrupt(rows(), "caches[1].offset", "5")
    yield corrupt(rows(), "caches[0].minimumReusableOffset", -1)
    yield corrupt(rows(), "caches[0].minimumReusableOffset", 6)
    yield corrupt(rows(), "caches[0].minimumReusableOffset", 1.5)
    mtp = header(5, 5, [entry("mtp-mla", 3, [in_rows(1, 3, 4), in_rows(1, 3, 2)])])
    yield Row("mtp-mla trails by two", pack(mtp), CorruptEntry, "caches[0].offset")
    empty = header(5, 5, [entry("kv", 5, [])])
    yield Row("nothing stored, offset 5", pack(empty), CorruptEntry, "caches[0].offset")
    unknown = header(5, 5, [entry("future", 5, [])])
    yield Row("unknown kind, nothing stored, offset 5", pack(unknown), CorruptEntry, "caches[0].offset")
    yield corrupt(nested(1), "caches[0].offset", 4)


def of_slots() -> Iterator[Row]:
    slot = "caches[0].tensors[0]"
    for name in ("bytes", "shape", "dtype"):
        yield corrupt(rows(), f"{slot}.{name}", REMOVED)
    yield corrupt(rows(), f"{slot}.dtype", 14)
    yield corrupt(rows(), f"{slot}.dtype", -1)
    yield corrupt(rows(), f"{slot}.dtype", "float16")
    yield corrupt(rows(), f"{slot}.off", -1)
    yield corrupt(rows(), f"{slot}.off", 2**53)
    yield corrupt(rows(), f"{slot}.bytes", 39)
    yield corrupt(rows(), f"{slot}.bytes", 2**70)
    yield corrupt(rows(), f"{slot}.shape", [1, 1, -5, -2])
    yield corrupt(rows(), f"{slot}.shape", [2**31, 0])
    yield corrupt(rows(), f"{slot}.shape", [2**31 - 1, 2**31 - 1, 0])
    yield corrupt(rows(), f"{slot}.shape", [1] * 33)
    yield corrupt(rows(), f"{slot}.shape", [1, 1, 5.0, 2], f"{slot}.shape[2]")
    yield corrupt(rows(), "attachments[0].tensors[0].bytes", 0)
    yield corrupt(rows(), "attachments[0].schema", REMOVED)
    yield corrupt(rows(), "generationCheckpoint.pendingToken", -1)
    yield corrupt(rows(), "generationCheckpoint.seed", 2**53)
    yield corrupt(rows(), "generationCheckpoint.key", REMOVED)


def of_blocks() -> Iterator[Row]:
    slot = "caches[0].tensors[0]"
    yield corrupt(rows(), f"{slot}.blocks", REMOVED)
    yield corrupt(rows(), f"{slot}.blocks", [])
    yield corrupt(rows(), f"{slot}.blocks[1].bytes", 5, f"{slot}.blocks")
    yield corrupt(rows(), f"{slot}.blocks[1].bytes", 0)
    yield corrupt(rows(), f"{slot}.blocks[0].bytes", -4)
    for name in ("A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n", "../" + "a" * 61, "", "à" + "a" * 63):
        yield corrupt(rows(), f"{slot}.blocks[0].hash", name)
    yield corrupt(rows(), f"{slot}.axis", 2)
    zero = "attachments[0].tensors[1]"
    yield corrupt(rows(), f"{zero}.blocks", [{"hash": digest(1), "bytes": 4}])
    data = pack(changed(rows(), blockHash="md5"))
    yield Row("unknown block hash", data, UnsupportedFormat, "blockHash")


def of_groups() -> Iterator[Row]:
    group = "segments[0]"
    for span in (0, -4, 3, 2**21):
        yield corrupt(segments(), f"{group}.span", span)
    yield corrupt(segments(), f"{group}.tensors", [])
    for pair in ([9, 0], [0, 9], [-1, 0], [0, -1]):
        yield corrupt(segments(), f"{group}.tensors[0]", pair, f"{group}.tensors")
    yield corrupt(segments(), f"{group}.tensors[0]", [0])
    yield corrupt(segments(), f"{group}.tensors[1]", [0, 0], f"{group}.tensors")
    yield corrupt(segments(), "segments[1].tensors", [[2, 0], [2, 1], [0, 0]])
    yield corrupt(segments(), f"{group}.tensors", [[0, 0], [0, 1], [1, 0], [2, 0]])
    yield corrupt(segments(), f"{group}.tensors", [[0, 0], [0, 1], [1, 0]], "cache 1, tensors[1].axis")
    yield corrupt(segments(), "segments", REMOVED, "cache 0, tensors[0].axis")
    yield corrupt(segments(), "caches[0].tensors[0].axis", REMOVED, "caches[0].tensors[0].blocks")
    yield corrupt(segments(), "caches[0].tensors[0].axis", 3, f"{group}.tensors: axis of a slot")
    yield corrupt(segments(), "caches[0].tensors[0]", in_rows(1, 1, 5, 2), f"{group}.tensors: axis of a slot")
    for hashes in ("", digest(1), digest(1) * 3, digest(1) + digest(2)[1:], digest(1) + "A" * 64):
        yield corrupt(segments(), f"{group}.hashes", hashes)
    yield corrupt(segments(), "segments[1].tokens", [1, 1])
    yield corrupt(segments(), "segments[1].tokens", [3, 0], "segments[1].tokens[1]")
    yield corrupt(segments(), "segments[1].tokens", [5, -2], "segments[1].tokens[0]")
    yield corrupt(segments(), "segments[1].tokens", [1, 1, 1], "segments[1].hashes")
    lone = header(5, 5, [entry("ssm", 5, [tensor(1, 3, axis=1), tensor(2, axis=0)])], segments=[])
    group_of_ssm = changed(lone, **{"segments[0]": {"span": 4, "tensors": [[0, 0]], "hashes": digest(1)}})
    yield Row("a kind without a token axis", pack(group_of_ssm), CorruptEntry, f"{group}.tensors: axis of a slot")
    future = header(5, 5, [entry("future", 5, [tensor(5, 0, axis=0)])], segments=[])
    empty = changed(future, **{"segments[0]": {"span": 8, "tensors": [[0, 0]], "hashes": digest(1)}})
    yield Row("an empty tensor in a group", pack(empty), CorruptEntry, f"{group}.tensors")
    attachment = {"schema": "s", "metadata": {}, "tensors": [tensor(5, axis=0)]}
    yield corrupt(segments(), "attachments", [attachment], "attachments[0].tensors[0].axis")


def of_kinds() -> Iterator[Row]:
    yield corrupt(rows(), "caches[0].kind", "")
    yield corrupt(rows(), "caches[0].kind", 7)
    yield corrupt(rows(), "caches[0].tensors", REMOVED)
    yield corrupt(rows(), "caches[0].tensors", [in_rows(1, 1, 5, 2)])
    yield corrupt(rows(), "caches[0].tensors[1]", in_rows(1, 5, 2), "caches[0].tensors[1].shape")
    yield corrupt(rows(), "caches[0].tensors[1]", in_rows(1, 1, 4, 2), "caches[0].tensors[1].shape")
    yield corrupt(rows(), "caches[1].tensors", [], "caches[1].offset")
    yield corrupt(segments(), "caches[2].idx", 4)
    yield corrupt(segments(), "caches[2].maxSize", REMOVED)
    yield corrupt(segments(), "caches[2].keep", 3)
    chunked = entry("chunked", 5, [in_rows(1, 1, 3, 2), in_rows(1, 1, 3, 2)], chunkSize=4, startPosition=3)
    yield Row("chunked: tokens", pack(header(5, 5, [chunked])), CorruptEntry, "caches[0].tensors[0].shape")
    arrays = entry("arrays", 5, [in_rows(2)], slots=[True, True])
    yield Row("arrays: slots", pack(header(5, 5, [arrays])), CorruptEntry, "caches[0].slots")
    three = [in_rows(1, 1, 5, 8, dtype=3), in_rows(1, 1, 5, 2), in_rows(1, 1, 5, 3)]
    qkv = entry("qkv", 5, three * 2, groupSize=32, bits=4)
    yield Row("qkv: biases", pack(header(5, 5, [qkv])), CorruptEntry, "caches[0].tensors[2].shape")
    yield Row("lists too deep", pack(nested(9)), CorruptEntry, "caches[0]" + ".children[0]" * 8 + ".kind")
    yield corrupt(nested(1), "caches[0].children", 5, "caches[0].children")
    yield corrupt(nested(1), "caches[0].children[0].offset", 4)
    yield corrupt(nested(1), "caches[0].tensors", [in_rows(2)])


def of_layout() -> Iterator[Row]:
    yield corrupt(monolith(), "caches[0].tensors[1].hash", "A" * 16)
    yield corrupt(monolith(), "caches[0].tensors[1].off", 0, "cache 0, tensors[1].off")
    yield corrupt(monolith(), "caches[0].tensors[1].off", 16383, "cache 0, tensors[1].off")
    yield corrupt(attached(), "attachments[0].tensors[0].off", 16420)
    yield corrupt(attached(), "attachments[0].tensors[1].off", 32769)
    yield Row("file a byte short", pack(monolith()), CorruptEntry, "cache 0, tensors[1].off", 32768 + 39)
    far = changed(monolith(), **{"caches[0].tensors[1]": in_file(2**52, 1, 1, 5, 2)})
    yield Row("tensor far outside", pack(far), CorruptEntry, "cache 0, tensors[1].off", 32768 + 40)


def of_memory() -> Iterator[Row]:
    """As many bytes as a header may have, made to cost as much memory as they can."""
    room = (32 << 20) - 4096
    shapes = {
        "empty lists": (b"[" + b"[]," * (room // 3) + b"[]]", UnsupportedFormat, "JSON"),
        "a list of small numbers": (b"[" + b"1," * (room // 2) + b"1]", UnsupportedFormat, "JSON"),
        "a list of short strings": (b"[" + b'"ab",' * (5 << 20) + b'""]', UnsupportedFormat, "JSON"),
        "many small objects": (b"[" + b'{"a":1},' * (1 << 20) + b"1]", UnsupportedFormat, "JSON"),
        "an object of many keys": (
            b"{" + b",".join(b'"%07x":0' % i for i in range(11 << 17)) + b"}", UnsupportedFormat, "JSON",
        ),
        "deep lists": (b"[" * 100_000 + b"]" * 100_000, CorruptEntry, "JSON"),
        "deep objects": (b'{"a":' * (100 << 10) + b"1" + b"}" * (100 << 10), CorruptEntry, "JSON"),
        "deep lists, never closed": (b"[" * 100_000, CorruptEntry, "JSON"),
        "a huge integer": (b"7" * room, CorruptEntry, "caches[0].extra"),
        "a huge fraction": (b"0." + b"7" * (4 << 20), CorruptEntry, "caches[0].offset"),
        "a huge exponent": (b"1e" + b"7" * (4 << 20), CorruptEntry, "caches[0].extra"),
    }  # fmt: skip
    for name, (text, error, field) in shapes.items():
        yield Row(f"memory: {name}", around(text), error, field)
    for name, text in within_limits():
        yield Row(f"memory within limits: {name}", around(text), CorruptEntry, "caches[0].offset")


def within_limits() -> Iterator[tuple[str, bytes]]:
    """As much as the limits let through: these are parsed, and refused for the offset alone."""
    yield "giant string", b'"' + b"x" * (30 << 20) + b'"'
    yield "backslashes", b'"' + b"\\\\" * (4 << 20) + b'"'
    yield "wide string", b'"' + "𝄞".encode() * (2 << 20) + b'"'
    yield "numbers", b"[" + b",".join(b"%d" % number for number in range(1000, 4_190_000)) + b"]"
    yield "floats", b"[" + b"1.5," * 4_190_000 + b"1]"
    yield "long numbers", b"[" + b"9999999999999999," * 500_000 + b"1]"
    yield "strings", b"[" + b'"\xc3\xa4",' * 1_000_000 + b'""]'
    yield "lists", b"[" + b"[1]," * 131_000 + b"1]"
    yield "keys", b"{" + b",".join(b'"%x":0' % number for number in range(1_000_000)) + b"}"
    objects = b'{"a":1001,"b":1002},' * 262_000
    yield "all of it", b"[" + objects + b'"\xc3\xa4",' * 500_000 + b"[1]," * 131_000 + b"1234," * 3_000_000 + b"1]"


def around(text: bytes) -> bytes:
    """A header whose one cache holds `text` as a field, and a wrong offset."""
    plain = pack(header(5, 5, [entry("future", 4, [in_rows(2)], extra=0)]))[26:]
    return pack(plain.replace(b'"extra":0', b'"extra":' + text))


CHEAP = [
    row
    for rows_of in (of_prefix, of_json, of_tokens_and_offsets, of_slots, of_blocks, of_groups, of_kinds, of_layout)
    for row in rows_of()
]
