"""Headers of every version that another program wrote, kept for good in tests/golden."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from blockstore.header import (
    PREFIX_BYTES,
    GenerationCheckpoint,
    Header,
    blocks_of,
    data_start,
    decode_header,
    encode_header,
    header_bytes,
    slots_of,
)
from blockstore.wyhash import wyhash64
from kvcodecs.entry import DTYPES, HeaderEntry, Slot
from kvcodecs.geometry import KINDS

GOLDEN = Path(__file__).parent.parent / "golden"
MANIFEST: dict[str, dict[str, Any]] = {
    file["file"]: file for file in json.loads((GOLDEN / "MANIFEST.json").read_text())["files"]
}
# The manifest explains this one: a header field that no reader knows.
UNKNOWN_FIELD = b'"futureField":{"any":[1,2.5,null]},'
each_file = pytest.mark.parametrize("name", MANIFEST)


def decoded(name: str) -> tuple[bytes, Header]:
    data = (GOLDEN / name).read_bytes()
    return data, decode_header(data, path=name, file_size=len(data))


def test_no_file_is_forgotten() -> None:
    assert {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.mlxkv")} == MANIFEST.keys()
    assert len(MANIFEST) == 42


@each_file
def test_no_file_was_edited(name: str) -> None:
    assert hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() == MANIFEST[name]["sha256"]


@each_file
def test_the_header_says_what_the_manifest_says(name: str) -> None:
    data, header = decoded(name)
    file = MANIFEST[name]
    assert header.format_version == file["version"]
    assert header.created_at == 1760000000123
    assert header.tokens == tuple(file["tokens"])
    assert header.codec_provider == file["codecProvider"]
    identity = {
        "modelId": header.model_id, "configFingerprint": header.config_fingerprint,
        "tokenizerHash": header.tokenizer_hash, "ns": header.ns,
    }  # fmt: skip
    assert {key: value for key, value in identity.items() if value is not None} == file["meta"]
    assert header.generation_checkpoint == checkpoint_of(file)
    assert [described(entry) for entry in header.caches] == file["caches"]
    attachments = [
        {"schema": a.schema, "metadata": a.metadata, "tensors": shapes(a.tensors)} for a in header.attachments
    ]
    assert attachments == file["attachments"]
    assert (len(data), data_start(header.format_version, file["headerBytes"])) == (file["size"], file["dataStart"])
    assert [slot.hash for slot in slots_of(header)] == file.get("tensorHashes", [""] * len(list(slots_of(header))))


def checkpoint_of(file: dict[str, Any]) -> GenerationCheckpoint | None:
    value = file.get("generationCheckpoint")
    return None if value is None else GenerationCheckpoint(*value.values())


def described(entry: HeaderEntry) -> dict[str, Any]:
    minimum = entry.minimum_reusable_offset
    more = {} if minimum is None else {"minimumReusableOffset": minimum}
    return {"kind": entry.kind, "offset": entry.offset, **entry.fields, "tensors": shapes(entry.tensors), **more}


def shapes(slots: tuple[Slot, ...]) -> list[dict[str, Any]]:
    return [{"shape": list(slot.shape), "dtype": DTYPES[slot.dtype][0], "bytes": slot.bytes} for slot in slots]


@each_file
def test_writing_what_was_read_gives_the_same_bytes(name: str) -> None:
    data, header = decoded(name)
    size = header_bytes(data[:PREFIX_BYTES], path=name, file_size=len(data))
    if UNKNOWN_FIELD in data[:size]:
        assert encode_header(header)[PREFIX_BYTES:] == data[PREFIX_BYTES:size].replace(UNKNOWN_FIELD, b"")
    else:
        assert encode_header(header) == data[:size]


def test_one_file_holds_an_unknown_field() -> None:
    assert [name for name in MANIFEST if UNKNOWN_FIELD in (GOLDEN / name).read_bytes()] == ["v3-mixed.mlxkv"]


@each_file
def test_the_part_behind_the_header_is_not_needed(name: str) -> None:
    data, header = decoded(name)
    size = header_bytes(data[:PREFIX_BYTES], path=name, file_size=len(data))
    assert decode_header(memoryview(data)[:size], path=name, file_size=len(data)) == header


@each_file
def test_blocks_and_tensors_are_where_the_header_says(name: str) -> None:
    """v5: every block has the named size and digest. v3 and v4: every tensor has the named hash."""
    data, header = decoded(name)
    for digest, size in blocks_of(header):
        block = (GOLDEN / "v5" / "blocks" / digest).read_bytes()
        assert (len(block), hashlib.sha256(block).hexdigest()) == (size, digest)
    if header.format_version == 5:
        assert sum(size for _, size in blocks_of(header)) == sum(slot.bytes for slot in slots_of(header))
        return
    for slot in slots_of(header):
        start = MANIFEST[name]["dataStart"] + slot.off
        assert f"{wyhash64(data[start : start + slot.bytes]):016x}" == slot.hash


def test_no_block_is_forgotten() -> None:
    named = {digest for name in MANIFEST for digest, _ in blocks_of(decoded(name)[1])}
    assert {path.name for path in (GOLDEN / "v5" / "blocks").iterdir()} == named


def test_every_kind_of_the_format_is_there() -> None:
    kinds = {kind for file in MANIFEST.values() for kind in file["kinds"]}
    ours_alone = {"chunked", "arrays", "list"}  # kinds that the program which wrote the files does not have
    assert kinds == KINDS.keys() - ours_alone
