"""What must hold of a header before anything is allocated for it or written from it (FORMAT: what a reader checks).

Every rule raises `Refused`, which names the field, what was expected and what was found; whoever reads a file adds the
path. The rules look at the structs alone, so that the writer obeys the same ones as the reader.
"""

import re
import reprlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

from blockstore.digest import HASHERS, is_digest
from blockstore.jsontext import MAX_INTEGER
from blockstore.records import HEX_DIGITS, Group, Header
from kvcodecs.entry import DTYPES, HeaderEntry, Slot, leaves
from kvcodecs.geometry import KINDS, BadEntry

VERSIONS = (3, 4, 5)
BLOCKS_VERSION = 5
PAGE_BYTES = 16384
MAX_RANK = 32
# Array libraries keep a dimension in 32 bits.
MAX_DIMENSION = (1 << 31) - 1
LIST_KIND = "list"
MAX_LIST_DEPTH = 8
MAX_SPAN_TOKENS = 1 << 20
# What every header entry has; all else in it is geometry.
ENTRY_FIELDS = frozenset({"kind", "offset", "tensors", "minimumReusableOffset"})
_HEX = re.compile("[0-9a-f]*")
_TENSOR_HASH = re.compile("[0-9a-f]{16}")


class Refused(ValueError):
    """A header that breaks a rule. `unsupported`: it may be sound, but this release does not read it."""

    def __init__(self, field: str, expected: object, found: object, *, unsupported: bool = False) -> None:
        super().__init__(f"{field[:200]}: expected {expected}, found {_brief(found)!r}")
        self.field, self.expected, self.found, self.unsupported = field[:200], expected, _brief(found), unsupported


def _brief(found: object) -> object:
    """`found` as an error shows it: a hostile file must not fill a log."""
    if isinstance(found, int):
        return found if found.bit_length() <= 64 else f"an integer of {found.bit_length()} bits"
    if isinstance(found, str):
        return found if len(found) <= 80 else f"{found[:60]}… ({len(found)} characters)"
    return found if found is None or isinstance(found, float) else reprlib.repr(found)


def check(header: Header) -> None:
    """Raise Refused unless a writer could have made `header`; where its tensors are is for `check_layout`."""
    check_version(header.format_version)
    natural("createdAt", header.created_at)
    _check_tokens(header.tokens)
    for index, entry in enumerate(header.caches):
        _check_entry(entry, f"caches[{index}]", header, depth=1)
    for index, attachment in enumerate(header.attachments):
        _check_slots(attachment.tensors, f"attachments[{index}].tensors", header.format_version)
    _check_checkpoint(header)
    if header.format_version == BLOCKS_VERSION:
        _check_block_hash(header.block_hash)
        _check_segments(header)
    else:
        _check_alignment(header)


def check_version(version: int) -> None:
    if version not in VERSIONS:
        raise Refused("formatVersion", "3, 4 or 5", version, unsupported=True)


def natural(field: str, value: int, most: int = MAX_INTEGER) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise Refused(field, f"an integer from 0 to {most}", value)


def _check_tokens(tokens: Sequence[int]) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_INTEGER):
        index = next(index for index, token in enumerate(tokens) if not 0 <= token <= MAX_INTEGER)
        natural(f"tokens[{index}]", tokens[index])


def _check_checkpoint(header: Header) -> None:
    checkpoint = header.generation_checkpoint
    if checkpoint is None:
        return
    natural("generationCheckpoint.originalPromptTokens", checkpoint.original_prompt_tokens)
    natural("generationCheckpoint.generatedTokens", checkpoint.generated_tokens)
    natural("generationCheckpoint.pendingToken", checkpoint.pending_token)
    if abs(checkpoint.seed) > MAX_INTEGER:
        raise Refused("generationCheckpoint.seed", "an integer of at most 53 bits", checkpoint.seed)


# ---- header entries


def _check_entry(entry: HeaderEntry, where: str, header: Header, depth: int) -> None:
    if entry.kind == LIST_KIND and depth > MAX_LIST_DEPTH:
        raise Refused(f"{where}.kind", f"lists nested at most {MAX_LIST_DEPTH} deep", entry.kind)
    if not entry.kind:
        raise Refused(f"{where}.kind", "a name", entry.kind)
    for name in ENTRY_FIELDS & entry.fields.keys():
        raise Refused(f"{where}.{name}", "no further field of this name", entry.fields[name])
    natural(f"{where}.offset", entry.offset)
    if entry.minimum_reusable_offset is not None:
        natural(f"{where}.minimumReusableOffset", entry.minimum_reusable_offset, most=entry.offset)
    for index, child in enumerate(entry.children):
        _check_entry(child, f"{where}.children[{index}]", header, depth + 1)
    _check_slots(entry.tensors, f"{where}.tensors", header.format_version)
    _check_offset(entry, where, len(header.tokens))
    _check_geometry(entry, where)


def _check_offset(entry: HeaderEntry, where: str, tokens: int) -> None:
    if entry.is_empty:
        if entry.offset != 0:
            raise Refused(f"{where}.offset", "0, since the cache holds no tensor", entry.offset)
    elif not 0 <= tokens - entry.offset <= _may_trail(entry):
        raise Refused(f"{where}.offset", f"{tokens}, the number of tokens", entry.offset)


def _may_trail(entry: HeaderEntry) -> int:
    """By how many tokens the cache may be behind the entry; a list by as many as all that it holds."""
    if entry.children:
        return min(_may_trail(child) for child in entry.children if not child.is_empty)
    geometry = KINDS.get(entry.kind)
    return geometry.may_trail if geometry is not None else 0


def _check_geometry(entry: HeaderEntry, where: str) -> None:
    geometry = KINDS.get(entry.kind)
    if geometry is None:
        return
    try:
        geometry.check(entry)
    except BadEntry as problem:
        raise Refused(f"{where}.{problem.where}", problem.expected, problem.found) from None


# ---- slots


def _check_slots(slots: Sequence[Slot], where: str, version: int) -> None:
    for index, slot in enumerate(slots):
        _check_slot(slot, f"{where}[{index}]")
        if version == BLOCKS_VERSION:
            _check_blocks(slot, f"{where}[{index}]")
        elif _TENSOR_HASH.fullmatch(slot.hash) is None:
            raise Refused(f"{where}[{index}].hash", "16 lower-case hex digits", slot.hash)


def _check_slot(slot: Slot, where: str) -> None:
    if not 0 <= slot.dtype < len(DTYPES):
        raise Refused(f"{where}.dtype", f"a code from 0 to {len(DTYPES) - 1}", slot.dtype)
    natural(f"{where}.off", slot.off)
    if len(slot.shape) > MAX_RANK:
        raise Refused(f"{where}.shape", f"at most {MAX_RANK} dimensions", len(slot.shape))
    size, span = slot.item_size, slot.item_size
    for dimension in slot.shape:
        natural(f"{where}.shape", dimension, most=MAX_DIMENSION)
        size, span = size * dimension, span * max(dimension, 1)
    if span > MAX_INTEGER:
        raise Refused(f"{where}.shape", f"at most {MAX_INTEGER} bytes", list(slot.shape))
    if slot.bytes != size:
        raise Refused(f"{where}.bytes", f"{size}, which shape and dtype make", slot.bytes)


def _check_blocks(slot: Slot, where: str) -> None:
    """A slot has blocks of its own or an axis, which puts it into a group; the groups are counted elsewhere."""
    if slot.blocks is None:
        if slot.axis is None:
            raise Refused(f"{where}.blocks", "blocks, or an axis and a place in one group", None)
        return
    if slot.axis is not None:
        raise Refused(f"{where}.axis", "none, since the slot has blocks of its own", slot.axis)
    for index, block in enumerate(slot.blocks):
        if not is_digest(block.hash):
            raise Refused(f"{where}.blocks[{index}].hash", f"{HEX_DIGITS} lower-case hex digits", block.hash)
        if block.bytes < 1:
            raise Refused(f"{where}.blocks[{index}].bytes", "more than 0", block.bytes)
    total = sum(block.bytes for block in slot.blocks)
    if total != slot.bytes:
        raise Refused(f"{where}.blocks", f"{slot.bytes} bytes in all", total)


# ---- v3 and v4: where tensors are in the file


def _named_slots(header: Header) -> Iterator[tuple[str, Slot, bool]]:
    """Every slot with its name in errors and whether it is the first of the attachments, which may be unaligned."""
    for cache, entry in enumerate(leaves(header.caches)):
        for index, slot in enumerate(entry.tensors):
            yield _slot_name(cache, index), slot, False
    first = True
    for number, attachment in enumerate(header.attachments):
        for index, slot in enumerate(attachment.tensors):
            yield f"attachments[{number}].tensors[{index}]", slot, first
            first = False


def _slot_name(cache: int, index: int) -> str:
    # Not caches[i]: groups count the leaves of nested lists.
    return f"cache {cache}, tensors[{index}]"


def _check_alignment(header: Header) -> None:
    placed = []
    for name, slot, is_first_attached in _named_slots(header):
        if slot.off % PAGE_BYTES and not is_first_attached and slot.bytes:
            raise Refused(f"{name}.off", f"a multiple of {PAGE_BYTES}", slot.off)
        if slot.bytes:
            placed.append((slot.off, slot.off + slot.bytes, name))
    for (_, end, before), (start, _, name) in pairwise(sorted(placed)):
        if start < end:
            raise Refused(f"{name}.off", f"at least {end}, where {before} ends", start)


def check_layout(header: Header, data_start: int, file_size: int) -> None:
    """Raise Refused unless a v3/v4 file of `file_size` bytes holds every tensor that is not empty."""
    for name, slot, _ in _named_slots(header):
        end = data_start + slot.off + slot.bytes
        if slot.bytes and end > file_size:
            raise Refused(f"{name}.off", f"a tensor that ends within the file's {file_size} bytes", end)


# ---- v5: segments


def _check_block_hash(name: str | None) -> None:
    if name is not None and name not in HASHERS:
        raise Refused("blockHash", " or ".join(sorted(HASHERS)), name, unsupported=True)


def _check_segments(header: Header) -> None:
    entries = list(leaves(header.caches))
    taken: set[str] = set()
    for number, group in enumerate(header.segments or ()):
        where = f"segments[{number}]"
        _check_span(group, where)
        members = [_member(pair, entries, taken, where) for pair in group.tensors]
        _check_group(group, members, where)
    for name, slot, _ in _named_slots(header):
        if slot.axis is not None and name not in taken:
            raise Refused(f"{name}.axis", "none, since no group names the slot", slot.axis)


def _check_span(group: Group, where: str) -> None:
    if not 1 <= group.span <= MAX_SPAN_TOKENS or group.span & (group.span - 1):
        raise Refused(f"{where}.span", f"a power of two up to {MAX_SPAN_TOKENS}", group.span)
    if not group.tensors:
        raise Refused(f"{where}.tensors", "at least one tensor", [])


def _member(
    pair: tuple[int, int], entries: Sequence[HeaderEntry], taken: set[str], where: str
) -> tuple[HeaderEntry, Slot]:
    """The slot that a group names by leaf cache and slot index, with its entry; its name goes into `taken`."""
    cache, index = pair
    if not (0 <= cache < len(entries) and 0 <= index < len(entries[cache].tensors)):
        raise Refused(f"{where}.tensors", "pairs of an existing cache and slot", list(pair))
    name = _slot_name(cache, index)
    if name in taken:
        raise Refused(f"{where}.tensors", "each slot in one group only", list(pair))
    taken.add(name)
    return entries[cache], entries[cache].tensors[index]


def _check_group(group: Group, members: Sequence[tuple[HeaderEntry, Slot]], where: str) -> None:
    lengths = [_token_length(entry, slot, where) for entry, slot in members]
    if len(set(lengths)) != 1:
        raise Refused(f"{where}.tensors", f"{lengths[0]} tokens in every tensor", lengths)
    blocks = _count_blocks(group, lengths[0], where)
    if len(group.hashes) != blocks * HEX_DIGITS:
        raise Refused(f"{where}.hashes", f"{blocks} digests of {HEX_DIGITS} hex digits", len(group.hashes) / HEX_DIGITS)
    if _HEX.fullmatch(group.hashes) is None:
        raise Refused(f"{where}.hashes", "lower-case hex digits", group.hashes)


def _token_length(entry: HeaderEntry, slot: Slot, where: str) -> int:
    """How many tokens stand along the token axis of a slot in a group."""
    geometry = KINDS.get(entry.kind)
    axis = slot.axis
    if axis is None or not 0 <= axis < len(slot.shape) or (geometry is not None and axis != geometry.axis):
        expected = "an index into the shape" if geometry is None else f"{geometry.axis}, the token axis of {entry.kind}"
        raise Refused(f"{where}.tensors: axis of a slot", expected, axis)
    if slot.bytes == 0:
        raise Refused(f"{where}.tensors", "tensors that are not empty", list(slot.shape))
    return slot.shape[axis]


def _count_blocks(group: Group, total_tokens: int, where: str) -> int:
    if group.tokens is None:
        return -(-total_tokens // group.span)
    for index, tokens in enumerate(group.tokens):
        if not 1 <= tokens <= group.span:
            raise Refused(f"{where}.tokens[{index}]", f"from 1 to the span, {group.span}", tokens)
    if sum(group.tokens) != total_tokens:
        raise Refused(f"{where}.tokens", f"{total_tokens} tokens in all", sum(group.tokens))
    return len(group.tokens)
