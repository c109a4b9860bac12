"""What a header holds, as frozen structs, and the questions that the store asks of them (FORMAT: JSON, segments)."""

from collections.abc import Iterator
from typing import Any

import msgspec

from blockstore.digest import digest
from blockstore.errors import InvalidInput
from kvcodecs.entry import HeaderEntry, Slot, leaves

HEX_DIGITS = 64
ROWS_PROVIDER = "mlx-cache-v3"
SEGMENTS_PROVIDER = "mlx-cache-v5"


class Group(msgspec.Struct, frozen=True):
    """Tensors that are cut together along their token axes.

    `span` is in tokens, `tensors` are pairs of leaf cache index and slot index, `hashes` is the hex digests of all
    blocks end to end, `tokens` says how many tokens each block holds where that is not always `span`.
    """

    span: int
    tensors: tuple[tuple[int, int], ...]
    hashes: str
    tokens: tuple[int, ...] | None = None

    def digests(self) -> list[str]:
        """The hex digest of every block, in order."""
        return [self.hashes[start : start + HEX_DIGITS] for start in range(0, len(self.hashes), HEX_DIGITS)]

    def counts(self, total_tokens: int) -> tuple[int, ...]:
        """How many tokens each block holds, where the token axes are `total_tokens` long."""
        if self.tokens is not None:
            return self.tokens
        full, rest = divmod(total_tokens, self.span)
        return (self.span,) * full + ((rest,) if rest else ())


class Attachment(msgspec.Struct, frozen=True):
    """Companion state of a generation method. `metadata` is any JSON value."""

    schema: str
    metadata: Any
    tensors: tuple[Slot, ...]


class GenerationCheckpoint(msgspec.Struct, frozen=True, rename="camel"):
    """Where a generation stood: `pending_token` was sampled from the saved state and not yet given out."""

    key: str
    cache_ns: str
    original_prompt_tokens: int
    generated_tokens: int
    pending_token: int
    seed: int
    seed_was_explicit: bool


class Header(msgspec.Struct, frozen=True):
    """One entry. `created_at` is in milliseconds since 1970; identity fields that are None are absent in the file.

    `block_hash` is "blake3" or "sha256"; None means sha256. `segments` is None where every slot has its own blocks.
    `made_with` names the versions that computed the tensors: for people, nothing depends on it.
    """

    format_version: int
    created_at: int
    model_id: str | None
    config_fingerprint: str | None
    tokenizer_hash: str | None
    ns: str | None
    codec_provider: str | None
    tokens: tuple[int, ...]
    caches: tuple[HeaderEntry, ...]
    attachments: tuple[Attachment, ...] = ()
    generation_checkpoint: GenerationCheckpoint | None = None
    block_hash: str | None = None
    segments: tuple[Group, ...] | None = None
    made_with: dict[str, str] | None = None


def scope_of(
    model_id: str | None,
    config_fingerprint: str | None,
    tokenizer_hash: str | None,
    ns: str | None,
    codec_provider: str | None,
) -> str:
    """The folder of all entries of one identity: 32 hex digits. Raises InvalidInput for text without a UTF-8 form."""
    fields = (model_id, config_fingerprint, tokenizer_hash, ns, codec_provider)
    try:
        return digest("blake3", b"".join(map(_presence, fields))).hex()[:32]
    except UnicodeEncodeError as error:
        raise InvalidInput("an identity field holds a lone surrogate", found=error.object) from None


def _presence(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    data = text.encode()
    return b"\1" + len(data).to_bytes(4, "little") + data


def slots_of(header: Header) -> Iterator[Slot]:
    """Every tensor in the order in which files hold them: those of the caches, leaf by leaf, then the attachments'."""
    for entry in leaves(header.caches):
        yield from entry.tensors
    for attachment in header.attachments:
        yield from attachment.tensors


def token_bytes(slot: Slot) -> int:
    """Bytes that one token takes in a slot with a token axis."""
    assert slot.axis is not None, "only slots of a group have a token axis"
    return slot.bytes // slot.shape[slot.axis]


def blocks_of(header: Header) -> Iterator[tuple[str, int]]:
    """The hex digest and size in bytes of every block that the header names, repeated ones again.

    First the blocks of single slots, in the order of `slots_of`, then group after group.
    """
    for slot in slots_of(header):
        for block in slot.blocks or ():
            yield block.hash, block.bytes
    entries = list(leaves(header.caches))
    for group in header.segments or ():
        slots = [entries[cache].tensors[index] for cache, index in group.tensors]
        yield from _group_blocks(group, slots)


def _group_blocks(group: Group, slots: list[Slot]) -> Iterator[tuple[str, int]]:
    size = sum(map(token_bytes, slots))
    axis = slots[0].axis
    assert axis is not None, "only slots of a group have a token axis"
    for name, tokens in zip(group.digests(), group.counts(slots[0].shape[axis]), strict=True):
        yield name, tokens * size
