"""The half of a save that touches mlx: a snapshot of a cache list, checked, evaluated, as byte views.

Where the caches continue an entry of the store, only what is new of them is looked at, and copied if they are to go on.
"""

import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from kvcodecs import geometry
from kvcodecs.algebra import CodecError, CodecProvider, SnapshotContext
from kvcodecs.backend import mx
from kvcodecs.codec import array_slot
from kvcodecs.entry import HeaderEntry, leaves

from . import cut, entries, history, records
from .buffers import ByteArray, host_views
from .digest import digest
from .errors import CacheMiss, InvalidInput
from .history import History, Taken
from .identity import Identity
from .layout import MOST_BLOCK_BYTES
from .leases import is_id
from .listing import Match
from .meta import Attachment, Meta, SaveOptions
from .packing import Packer, Prepared
from .placing import companions
from .prefixes import pack_tokens
from .records import GenerationCheckpoint
from .rooms import Rooms

# What is copied so that the caches may go on is memory beyond the arrays.
_COPY_BYTES: Final = 48 << 20
_SAMPLE: Final = 4
_SAMPLE_SHARE: Final = 100
_RANDOM: Final = random.SystemRandom()  # a program that seeded its own goes on as it would without a save


@dataclass(frozen=True)
class _Choices:
    """SaveOptions with their defaults; an unknown name is a TypeError, as for any call."""

    layout: str = "segments"
    block_bytes: int | None = None
    pinned: bool = False
    attachments: Any = ()
    generation_checkpoint: GenerationCheckpoint | None = None
    parent: Any = None

    def __post_init__(self) -> None:
        size = self.block_bytes
        if size is not None and (type(size) is not int or not 1 <= size <= MOST_BLOCK_BYTES):
            raise InvalidInput("block_bytes must be from 1 byte to 32 MiB", field="block_bytes", found=size)
        if self.layout not in ("segments", "rows"):
            raise InvalidInput("unknown cut", field="layout", expected=["segments", "rows"], found=self.layout)
        if not isinstance(self.attachments, Sequence):
            found = type(self.attachments).__name__
            raise InvalidInput("attachments must be a list", field="attachments", found=found)


def prepare_for(
    rooms: Rooms,
    provider: CodecProvider,
    tokens: Sequence[int] | Any,
    caches: Sequence[object],
    identity: Identity,
    options: SaveOptions,
    *,
    continues: bool = True,
    copy: bool = False,
) -> Prepared:
    """prepare() as a store does it. Raises InvalidInput.

    continues: look for an entry that the caches continue. copy: leave the caches free to go on, see prepare().
    """
    chosen = _Choices(**options)
    meta = Meta(
        model_id=identity.model_id,
        config_fingerprint=identity.config_fingerprint,
        tokenizer_hash=identity.tokenizer_hash,
        ns=identity.ns,
        attachments=tuple(chosen.attachments),
        generation_checkpoint=chosen.generation_checkpoint,
    )
    config = rooms.layout.config
    _check_arguments(caches, meta)
    known = _history(rooms, chosen.parent, caches) if continues and chosen.layout == "segments" else None
    if known is not None and known.entry_id in rooms.lost:
        known = None
    return prepare(
        provider,
        tokens,
        caches,
        meta,
        span=config.span,
        block_bytes=chosen.block_bytes or config.block_bytes,
        layout=chosen.layout,
        pinned=chosen.pinned,
        known=known,
        hash_name=config.block_hash,
        copy=copy,
    )


def _history(rooms: Rooms, parent: Any, caches: Sequence[object]) -> History | None:
    """What is known of the entry that the caches continue: the parent that is named, or what they remember."""
    root = rooms.layout.root
    if parent is None:
        return history.remembered(root, caches)
    entry_id = parent if isinstance(parent, str) else getattr(parent, "entry_id", None)
    if not isinstance(entry_id, str) or not is_id(entry_id):
        raise InvalidInput(
            "parent names an entry", field="parent", expected="a Match, Saved, Loaded or an entry id", found=parent
        )
    length = parent.length if isinstance(parent, Match) else getattr(parent, "token_count", None)
    try:
        return history.of_header(root, entry_id, entries.read_standing(rooms, entry_id), length)
    except CacheMiss:  # it went meanwhile; then everything is looked at
        return None


def prepare(
    provider: CodecProvider,
    tokens: Sequence[int] | Any,
    caches: Sequence[object],
    meta: Meta,
    *,
    provider_id: str | None = None,
    span: int,
    block_bytes: int,
    layout: str = "segments",
    pinned: bool = False,
    known: History | None = None,
    hash_name: str = "blake3",
    copy: bool = False,
) -> Prepared:
    """Snapshot `caches`, evaluate the snapshot and take byte views. Call on the thread that made the arrays.

    layout "segments" takes only rows that hold tokens; "rows" and "monolith" keep rings as they lie ("monolith" cuts
    nothing). known: the entry that the caches continue, of a store with blocks of `hash_name`. copy: take the bytes out
    where an entry is continued and they are few, so that the caches' next step costs no copy of theirs. Raises
    InvalidInput where the caches cannot be saved or do not encode `tokens`.
    """
    _check_arguments(caches, meta)
    packed = pack_tokens(tokens)
    if not packed:
        raise InvalidInput("an entry needs at least one token", field="tokens", found=[])
    context = SnapshotContext(len(packed) // 4, whole_ring=layout != "segments")
    try:
        snapshots = provider.snapshot(caches, context)
    except CodecError as error:
        raise InvalidInput(str(error), field="caches") from error
    described = tuple(snapshot.entry for snapshot in snapshots)
    _check_entries(described, context.token_count)
    attachments = tuple(_described(attachment) for attachment in meta.attachments)
    flat = [*leaves(described), *companions(attachments)]
    arrays = [array for snapshot in snapshots for array in snapshot.arrays]
    arrays += [array for attachment in meta.attachments for array in attachment.tensors]
    whole = Prepared(
        identity=meta.identity,
        provider_id=provider_id or provider.id,
        tokens=packed,
        caches=described,
        attachments=attachments,
        generation_checkpoint=meta.generation_checkpoint,
        created_at_ms=meta.created_at_ms,
        plan=cut.plan(layout, flat, span, block_bytes),
        views=dict(zip((ref for ref, _ in cut.numbered(flat)), host_views(arrays), strict=True)),
        pinned=pinned,
        sources=tuple(_references(caches)),
    )
    return whole if known is None else _continued(whole, known, hash_name, copy)


def _continued(whole: Prepared, known: History, hash_name: str, copy: bool) -> Prepared:
    """The snapshot without what is taken over from the entry that it continues, if a sample of that is what it says."""
    taken = known.taken(whole.tokens, whole.plan, whole.flat)
    if not any(group.tokens for group in taken) or not _sample_holds(whole, taken, hash_name):
        return whole
    views = dict(whole.views)
    for group, first in zip(whole.plan.groups, taken, strict=True):
        for ref in group.tensors:
            views[ref] = views[ref][(*(slice(None),) * group.axis, slice(first.tokens, None))]
    if copy and sum(view.nbytes for view in views.values()) <= _COPY_BYTES:
        views = {ref: _copied(view) for ref, view in views.items()}
    return replace(whole, views=views, taken=taken, parent=known.entry_id)


def _sample_holds(whole: Prepared, taken: Sequence[Taken], hash_name: str) -> bool:
    """Whether the last block taken over of each group, and some at random, have the bytes of their digests."""
    packer = Packer(whole)
    return all(digest(hash_name, packer.pack(number)) == name for number, name in _sampled(whole.plan, taken))


def _sampled(plan: cut.CutPlan, taken: Sequence[Taken]) -> Iterator[tuple[int, bytes]]:
    every, last, first = list[tuple[int, bytes]](), list[tuple[int, bytes]](), 0
    for group, known in zip(plan.groups, taken, strict=True):
        every += enumerate(known.digests, first)
        last += every[-1:] if known.digests else []
        first += len(group.counts)
    count = min(len(every), max(_SAMPLE, len(every) // _SAMPLE_SHARE))
    return iter(dict([*last, *_RANDOM.sample(every, count)]).items())


def _copied(view: ByteArray) -> ByteArray:
    copied = np.array(view, order="C")
    copied.flags.writeable = False
    return copied


def _references(caches: Sequence[object]) -> Iterator["weakref.ref[Any]"]:
    for cache in caches:
        try:
            yield weakref.ref(cache)
        except TypeError:  # a class without room for it; it will not remember what it was saved as
            continue


def _check_arguments(caches: object, meta: object) -> None:
    """Raise InvalidInput for what no header could hold, or no reader would take."""
    if not isinstance(caches, Sequence) or isinstance(caches, str):
        raise InvalidInput("caches must be a list, one for each layer", field="caches", found=type(caches).__name__)
    if not isinstance(meta, Meta):
        raise InvalidInput("meta must be a Meta", field="meta", found=type(meta).__name__)
    _check_attachments(meta.attachments)
    if meta.generation_checkpoint is not None:
        _check_checkpoint(meta.generation_checkpoint)


def _check_attachments(attachments: Any) -> None:
    if not isinstance(attachments, Sequence):
        found = type(attachments).__name__
        raise InvalidInput("attachments must be a list", field="attachments", found=found)
    for number, attachment in enumerate(attachments):
        field = f"attachments[{number}]"
        if not isinstance(attachment, Attachment) or type(attachment.schema) is not str:
            raise InvalidInput("attachments are Attachments with a text as schema", field=field, found=attachment)
        tensors: Any = attachment.tensors
        if not isinstance(tensors, Sequence) or not all(isinstance(tensor, mx.array) for tensor in tensors):
            found = type(tensors).__name__
            raise InvalidInput("tensors must be a list of mlx arrays", field=f"{field}.tensors", found=found)


def _check_checkpoint(checkpoint: object) -> None:
    field = "generation_checkpoint"
    if not isinstance(checkpoint, GenerationCheckpoint):
        found = type(checkpoint).__name__
        raise InvalidInput("a checkpoint must be a GenerationCheckpoint", field=field, found=found)
    try:
        msgspec.convert(msgspec.to_builtins(checkpoint), GenerationCheckpoint)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidInput(f"not a sound checkpoint: {error}", field=field) from error


def _described(attachment: Attachment) -> records.Attachment:
    return records.Attachment(attachment.schema, attachment.metadata, tuple(map(array_slot, attachment.tensors)))


def _check_entries(entries: Sequence[HeaderEntry], token_count: int) -> None:
    if not entries:
        raise InvalidInput("there is no cache to save", field="caches", found=[])
    if all(entry.is_empty for entry in entries):
        raise InvalidInput("every cache is empty; prefill first", field="caches")
    for layer, entry in enumerate(leaves(entries)):
        geometry_ = geometry.KINDS.get(entry.kind)
        if geometry_ is not None:
            try:
                geometry_.check(entry)
            except geometry.BadEntry as error:
                raise InvalidInput(f"cache {layer} ({entry.kind}) is not sound: {error}", field="caches") from error
        behind = token_count - entry.offset
        if entry.tensors and not 0 <= behind <= (geometry_.may_trail if geometry_ is not None else 0):
            raise InvalidInput(
                f"cache {layer} ({entry.kind}) does not encode the tokens given",
                field="tokens",
                expected=f"{entry.offset} tokens, the cache's offset",
                found=f"{token_count} tokens",
                hint="Pass the tokens that the caches hold: prompt and generated, without the last sampled one.",
            )
