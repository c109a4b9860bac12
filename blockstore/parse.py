"""From the JSON bytes of a header to structs, in bounded memory (FORMAT: the JSON).

What is parsed is limited before it is parsed: the number of values, strings and brackets, and their depth. So no JSON
of at most 32 MiB takes more than about 250 MiB to read.
"""

import re
from typing import Any

import msgspec
from msgspec import Raw

from blockstore.jsontext import MAX_DEPTH, MAX_INTEGER
from blockstore.records import Attachment, GenerationCheckpoint, Group, Header
from blockstore.rules import BLOCKS_VERSION, ENTRY_FIELDS, LIST_KIND, MAX_LIST_DEPTH, Refused, check_version
from kvcodecs.entry import HeaderEntry, Slot

# How often a JSON may hold each of these bytes, and what they count. Four million tokens fit, and 260,000 blocks of
# single slots, each an object with six quotes.
_LIMITS = (
    (b",", 1 << 22, "values"),
    (b'"', 1 << 21, "quotes"),
    (b"[", 1 << 17, "lists"),
    (b"{", 1 << 18, "objects"),
)
_STRING = re.compile(rb'"[^"]*+"')
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_LONG_INTEGER = re.compile(rb"[0-9]{16}")
_PROBLEM = re.compile(
    r"(?:Expected (?P<expected>.+?), got (?P<found>.+?)|Object missing required field `(?P<missing>.+?)`|(?P<what>.+?))"
    r"(?: - at `(?P<path>.+)`)?"
)


class _Version(msgspec.Struct, rename="camel"):
    format_version: int


class _Header(msgspec.Struct, rename="camel"):
    format_version: int
    created_at: int
    tokens: tuple[int, ...]
    caches: tuple[Raw, ...]
    model_id: str | None = None
    config_fingerprint: str | None = None
    tokenizer_hash: str | None = None
    ns: str | None = None
    codec_provider: str | None = None
    attachments: tuple[Raw, ...] | None = None
    generation_checkpoint: GenerationCheckpoint | None = None
    block_hash: Raw = Raw(b"null")
    segments: Raw = Raw(b"null")
    made_with: Raw = Raw(b"null")


class _Attachment(msgspec.Struct):
    schema: str
    metadata: Raw
    tensors: tuple[Slot, ...]


class _Entry(msgspec.Struct, rename="camel"):
    kind: str
    offset: int
    tensors: tuple[Slot, ...] | None = None
    children: Raw = Raw(b"[]")
    minimum_reusable_offset: int | None = None


def parse(data: bytes) -> Header:
    """The header that the JSON `data` spells; its rules are not checked yet. Raises rules.Refused."""
    check_size(data)
    _check_text(data)
    _check_depth(data)
    version = _decode(data, _Version, "").format_version
    check_version(version)
    raw = _decode(data, _Header, "")
    has_blocks = version == BLOCKS_VERSION
    return Header(
        format_version=version,
        created_at=raw.created_at,
        model_id=raw.model_id,
        config_fingerprint=raw.config_fingerprint,
        tokenizer_hash=raw.tokenizer_hash,
        ns=raw.ns,
        codec_provider=raw.codec_provider,
        tokens=raw.tokens,
        caches=tuple(_entry(part, f"caches[{index}]", has_blocks, 1) for index, part in enumerate(raw.caches)),
        attachments=tuple(
            _attachment(part, f"attachments[{index}]", has_blocks) for index, part in enumerate(raw.attachments or ())
        ),
        generation_checkpoint=raw.generation_checkpoint,
        block_hash=_decode(raw.block_hash, str | None, "blockHash") if has_blocks else None,
        segments=_decode(raw.segments, tuple[Group, ...] | None, "segments") if has_blocks else None,
        made_with=_made_with(raw.made_with) if has_blocks else None,
    )


def _made_with(data: Raw) -> dict[str, str] | None:
    """Versions by name, or None: a field of this name that holds something else is another writer's."""
    try:
        return msgspec.json.decode(data, type=dict[str, str] | None)
    except msgspec.DecodeError:
        return None


# ---- limits


def check_size(data: bytes) -> None:
    """Raise Refused where `data` holds more of anything than a reader takes in."""
    for mark, most, what in _LIMITS:
        found = data.count(mark)
        if found > most:
            raise Refused("JSON", f"at most {most} {what}", found, unsupported=True)


def _check_text(data: bytes) -> None:
    """Refuse what is not UTF-8, also where nobody reads it: a field that is skipped, or its name."""
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise Refused("JSON", "UTF-8", f"byte {error.start} is not") from None


def _check_depth(data: bytes) -> None:
    """Refuse deep nesting here: further down it would depend on how deep the caller's own stack is."""
    depth = 0
    for bracket in _brackets(data):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise Refused("JSON", f"at most {MAX_DEPTH} levels", f"{depth} or more")


def _brackets(data: bytes) -> bytes:
    """Every bracket outside of strings. Without escapes a string ends at the next quote."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _STRING.sub(b"", data).translate(None, _NO_BRACKET)


# ---- JSON to structs


def _decode(data: bytes | Raw, kind: Any, where: str) -> Any:
    """Decode one part strictly, as msgspec does; its complaint becomes Refused, with `where` before the path."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as problem:
        raise _refusal(str(problem), where) from None


def _refusal(text: str, where: str) -> Refused:
    match = _PROBLEM.fullmatch(text)
    assert match is not None, "the pattern takes any text"
    field = (where + (match["path"] or "").removeprefix("$")).removeprefix(".") or "JSON"
    if match["missing"]:
        return Refused(f"{field}.{match['missing']}".removeprefix("JSON."), "a value", None)
    if match["expected"]:
        return Refused(field, match["expected"].replace("`", ""), match["found"].replace("`", ""))
    return Refused(field, "JSON as the format describes it", match["what"].replace("`", ""))


def _entry(data: Raw, where: str, has_blocks: bool, depth: int) -> HeaderEntry:
    raw: _Entry = _decode(data, _Entry, where)
    is_list = raw.kind == LIST_KIND
    if raw.tensors is None and not is_list:
        raise Refused(f"{where}.tensors", "a list of tensors", None)
    return HeaderEntry(
        kind=raw.kind,
        offset=raw.offset,
        fields=_fields(data, ENTRY_FIELDS | {"children"} if is_list else ENTRY_FIELDS, where),
        tensors=_slots(raw.tensors or (), has_blocks),
        children=_children(raw.children, where, has_blocks, depth) if is_list else (),
        minimum_reusable_offset=raw.minimum_reusable_offset,
    )


def _children(data: Raw, where: str, has_blocks: bool, depth: int) -> tuple[HeaderEntry, ...]:
    if depth > MAX_LIST_DEPTH:
        raise Refused(f"{where}.kind", f"lists nested at most {MAX_LIST_DEPTH} deep", LIST_KIND)
    parts: tuple[Raw, ...] = _decode(data, tuple[Raw, ...], f"{where}.children")
    return tuple(_entry(part, f"{where}.children[{i}]", has_blocks, depth + 1) for i, part in enumerate(parts))


def _fields(data: Raw, known: frozenset[str], where: str) -> dict[str, Any]:
    """What an entry holds beside the fields that every kind has, in the order in which the file has it."""
    parts: dict[str, Raw] = _decode(data, dict[str, Raw], where)
    names = [name for name in parts if name not in known]
    return {name: _value(parts[name], f"{where}.{name}") for name in names}


def _attachment(data: Raw, where: str, has_blocks: bool) -> Attachment:
    raw: _Attachment = _decode(data, _Attachment, where)
    return Attachment(raw.schema, _value(raw.metadata, f"{where}.metadata"), _slots(raw.tensors, has_blocks))


def _value(data: Raw, where: str) -> Any:
    value = _decode(data, Any, where)
    return _as_javascript(value, where) if _LONG_INTEGER.search(data) else value


def _slots(slots: tuple[Slot, ...], has_blocks: bool) -> tuple[Slot, ...]:
    """Blocks and axes mean something in v5 only; elsewhere they are unknown fields, which readers pass over."""
    if has_blocks or all(slot.blocks is None and slot.axis is None for slot in slots):
        return slots
    return tuple(msgspec.structs.replace(slot, blocks=None, axis=None) for slot in slots)


def _as_javascript(value: Any, where: str) -> Any:
    """Integers beyond 2^53 - 1 become floats, as they are where the format was born: 1e20 prints as an integer."""
    if type(value) is int:
        return value if -MAX_INTEGER <= value <= MAX_INTEGER else _as_float(value, where)
    if isinstance(value, list):
        return [_as_javascript(item, where) for item in value]
    if isinstance(value, dict):
        return {name: _as_javascript(item, where) for name, item in value.items()}
    return value


def _as_float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise Refused(where, "a number of double precision", value) from None
