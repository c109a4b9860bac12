"""A header as bytes: the 26-byte prefix and the JSON behind it (FORMAT: the prefix, the JSON)."""

import struct
from typing import Any

from blockstore import jsontext
from blockstore.errors import CorruptEntry, InvalidInput, UnsupportedFormat
from blockstore.parse import check_size, parse
from blockstore.records import (
    ROWS_PROVIDER,
    SEGMENTS_PROVIDER,
    Attachment,
    GenerationCheckpoint,
    Group,
    Header,
    blocks_of,
    scope_of,
    slots_of,
    token_bytes,
)
from blockstore.rules import BLOCKS_VERSION, LIST_KIND, PAGE_BYTES, Refused, check, check_layout
from blockstore.wyhash import wyhash64
from kvcodecs.entry import HeaderEntry, Slot

__all__ = [
    "MAX_JSON_BYTES",
    "PREFIX_BYTES",
    "ROWS_PROVIDER",
    "SEGMENTS_PROVIDER",
    "Attachment",
    "GenerationCheckpoint",
    "Group",
    "Header",
    "blocks_of",
    "data_start",
    "decode_header",
    "encode_header",
    "header_bytes",
    "scope_of",
    "slots_of",
    "token_bytes",
]

MAGIC = b"MLXBUNKV2\n"
OLDER_MAGIC = b"MLXBUNKV1\n"
PREFIX_BYTES = 26
MAX_JSON_BYTES = 32 << 20
_PREFIX = struct.Struct("<10sIIQ")
# The one kind whose fields stand behind its tensors.
_FIELDS_LAST = "paged"


def data_start(version: int, json_bytes: int) -> int:
    """Where the tensors of a v3/v4 file begin; in v5, where the header ends."""
    end = PREFIX_BYTES + json_bytes
    return end if version == BLOCKS_VERSION else -(-end // PAGE_BYTES) * PAGE_BYTES


# ---- reading


def data_start_in(prefix: bytes) -> int:
    """Where the tensors of a v3/v4 file begin, by its prefix; decode_header has checked it."""
    start: int = _PREFIX.unpack_from(prefix)[2]
    return start


def header_bytes(prefix: bytes | memoryview, *, path: str, file_size: int) -> int:
    """How many bytes of a file of `file_size` bytes prefix and JSON take, from its first 26 bytes.

    Read this much and no more. Raises CorruptEntry or UnsupportedFormat.
    """
    return PREFIX_BYTES + _prefix_of(prefix, path, file_size)[0]


def decode_header(data: bytes | memoryview, *, path: str, file_size: int | None = None) -> Header:
    """Parse and check prefix and JSON, which `data` begins with; what follows them is not looked at.

    `path` is for errors alone. `file_size`, where known, must cover every tensor of a v3/v4 file. Raises CorruptEntry
    or UnsupportedFormat with path, field, expected and found; memory stays below 300 MiB for any `data`.
    """
    size, start, expected_hash = _prefix_of(data, path, len(data) if file_size is None else file_size)
    if len(data) < PREFIX_BYTES + size:
        raise _corrupt(path, "headerLen", f"{size} bytes of JSON", len(data) - PREFIX_BYTES)
    text = bytes(memoryview(data)[PREFIX_BYTES : PREFIX_BYTES + size])
    found_hash = wyhash64(text)
    if found_hash != expected_hash:
        raise _corrupt(path, "headerHash", f"{expected_hash:016x}", f"{found_hash:016x}")
    try:
        header = parse(text)
        check(header)
        if header.format_version != BLOCKS_VERSION:
            _check_data_start(header.format_version, size, start)
            if file_size is not None:
                check_layout(header, start, file_size)
    except Refused as problem:
        kind = UnsupportedFormat if problem.unsupported else CorruptEntry
        message = "the header breaks a rule of the format"
        raise kind(message, path=path, field=problem.field, expected=problem.expected, found=problem.found) from None
    return header


def _prefix_of(data: bytes | memoryview, path: str, file_size: int) -> tuple[int, int, int]:
    """headerLen, dataStart and headerHash of a file of `file_size` bytes that begins with `data`."""
    if len(data) < PREFIX_BYTES:
        raise _corrupt(path, "size", f"at least {PREFIX_BYTES} bytes", len(data))
    magic, size, start, expected_hash = _PREFIX.unpack_from(data)
    if magic == OLDER_MAGIC:
        raise UnsupportedFormat("an older, unsupported format", path=path, field="magic", expected=MAGIC, found=magic)
    if magic != MAGIC:
        raise _corrupt(path, "magic", MAGIC, magic)
    if size > file_size - PREFIX_BYTES:
        raise _corrupt(path, "headerLen", f"at most {file_size - PREFIX_BYTES}, which the file holds", size)
    if size > MAX_JSON_BYTES:
        raise UnsupportedFormat(
            "the header is too long", path=path, field="headerLen", expected=f"at most {MAX_JSON_BYTES}", found=size
        )
    return size, start, expected_hash


def _check_data_start(version: int, size: int, start: int) -> None:
    if start != data_start(version, size):
        raise Refused("dataStart", data_start(version, size), start)


def _corrupt(path: str, field: str, expected: object, found: object) -> CorruptEntry:
    return CorruptEntry("not a sound header", path=path, field=field, expected=expected, found=found)


# ---- writing


def encode_header(header: Header) -> bytes:
    """Prefix and JSON, byte for byte as FORMAT.md orders them. A v3/v4 file goes on at `data_start`.

    Raises InvalidInput for a header that `decode_header` would refuse, so that nothing unreadable is written.
    """
    try:
        check(header)
        text = jsontext.encode(_header_fields(header))
        check_size(text)
    except Refused as problem:
        message = "no sound header can be written"
        raise InvalidInput(message, field=problem.field, expected=problem.expected, found=problem.found) from None
    except ValueError as problem:
        raise InvalidInput(f"the header has no JSON form: {problem}") from None
    if len(text) > MAX_JSON_BYTES:
        raise InvalidInput("the header is too long", expected=f"at most {MAX_JSON_BYTES} bytes", found=len(text))
    return _PREFIX.pack(MAGIC, len(text), data_start(header.format_version, len(text)), wyhash64(text)) + text


def _header_fields(header: Header) -> dict[str, Any]:
    checkpoint, attachments = header.generation_checkpoint, header.attachments
    segments = header.segments
    has_blocks = header.format_version == BLOCKS_VERSION
    return {
        "formatVersion": header.format_version,
        "createdAt": header.created_at,
        **_present("modelId", header.model_id),
        **_present("configFingerprint", header.config_fingerprint),
        **_present("tokenizerHash", header.tokenizer_hash),
        **_present("ns", header.ns),
        **_present("generationCheckpoint", None if checkpoint is None else _checkpoint_fields(checkpoint)),
        **_present("attachments", [_attachment_fields(a, has_blocks) for a in attachments] or None),
        **_present("codecProvider", header.codec_provider),
        **_present("blockHash", header.block_hash),
        **_present("madeWith", header.made_with if has_blocks else None),
        **_present("segments", None if segments is None else [_group_fields(group) for group in segments]),
        "tokens": header.tokens,
        "caches": [_entry_fields(entry, has_blocks) for entry in header.caches],
    }


def _present(name: str, value: object) -> dict[str, object]:
    return {} if value is None else {name: value}


def _checkpoint_fields(checkpoint: GenerationCheckpoint) -> dict[str, object]:
    return {
        "key": checkpoint.key,
        "cacheNs": checkpoint.cache_ns,
        "originalPromptTokens": checkpoint.original_prompt_tokens,
        "generatedTokens": checkpoint.generated_tokens,
        "pendingToken": checkpoint.pending_token,
        "seed": checkpoint.seed,
        "seedWasExplicit": checkpoint.seed_was_explicit,
    }


def _attachment_fields(attachment: Attachment, has_blocks: bool) -> dict[str, object]:
    tensors = [_slot_fields(slot, has_blocks) for slot in attachment.tensors]
    return {"schema": attachment.schema, "metadata": attachment.metadata, "tensors": tensors}


def _group_fields(group: Group) -> dict[str, object]:
    return {
        "span": group.span,
        "tensors": group.tensors,
        "hashes": group.hashes,
        **_present("tokens", group.tokens),
    }


def _entry_fields(entry: HeaderEntry, has_blocks: bool) -> dict[str, object]:
    tensors = {"tensors": [_slot_fields(slot, has_blocks) for slot in entry.tensors]}
    children = {}
    if entry.kind == LIST_KIND:
        children = {"children": [_entry_fields(child, has_blocks) for child in entry.children]}
    before, after = ({}, entry.fields) if entry.kind == _FIELDS_LAST else (entry.fields, {})
    return {
        "kind": entry.kind,
        "offset": entry.offset,
        **before,
        **children,
        **tensors,
        **after,
        **_present("minimumReusableOffset", entry.minimum_reusable_offset),
    }


def _slot_fields(slot: Slot, has_blocks: bool) -> dict[str, object]:
    fields: dict[str, object] = {
        "off": slot.off,
        "bytes": slot.bytes,
        "shape": slot.shape,
        "dtype": slot.dtype,
        "hash": slot.hash,
    }
    if has_blocks and slot.blocks is not None:
        fields["blocks"] = [{"hash": block.hash, "bytes": block.bytes} for block in slot.blocks]
    if has_blocks and slot.axis is not None:
        fields["axis"] = slot.axis
    return fields
