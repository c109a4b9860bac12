"""Save: from a cache list to a committed entry (DESIGN 4, Save).

prepare() touches mlx, on the caller's thread; commit() sees plain memory only and may run on any thread.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvcodecs import geometry
from kvcodecs.algebra import CodecError, CodecProvider, SnapshotContext
from kvcodecs.backend import mx
from kvcodecs.codec import array_slot
from kvcodecs.entry import HeaderEntry, leaves

from . import collect, cut, records
from .buffers import host_views
from .digest import digest
from .entries import implied_row
from .errors import BlockstoreError, InvalidInput, StoreFull
from .fs import is_full
from .header import encode_header
from .index_rows import EntryRow
from .leases import Lease
from .meta import Attachment, Meta
from .packing import Packer, Prepared
from .placing import companions
from .prefixes import pack_tokens
from .records import GenerationCheckpoint, scope_of
from .rooms import MARGINS, Rooms
from .workers import spread

_CHECK_BYTES: Final = 4 << 20


class Saved(msgspec.Struct, frozen=True):
    """What a save did. logical_bytes are those of all tensors; written_bytes those of new blocks and the header."""

    entry_id: str
    path: str
    token_count: int
    logical_bytes: int
    written_bytes: int
    reused_bytes: int
    blocks_written: int
    blocks_reused: int
    seconds: float


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
) -> Prepared:
    """Snapshot `caches`, evaluate the snapshot and take byte views. Call on the thread that made the arrays.

    layout "segments" takes only rows that hold tokens; "rows" and "monolith" keep rings as they lie ("monolith" cuts
    nothing). Raises InvalidInput where the caches cannot be saved or do not encode `tokens`.
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
    entries = tuple(snapshot.entry for snapshot in snapshots)
    _check_entries(entries, context.token_count)
    attachments = tuple(_described(attachment) for attachment in meta.attachments)
    flat = [*leaves(entries), *companions(attachments)]
    arrays = [array for snapshot in snapshots for array in snapshot.arrays]
    arrays += [array for attachment in meta.attachments for array in attachment.tensors]
    views = dict(zip((ref for ref, _ in cut.numbered(flat)), host_views(arrays), strict=True))
    return Prepared(
        identity=meta.identity,
        provider_id=provider_id or provider.id,
        tokens=packed,
        caches=entries,
        attachments=attachments,
        generation_checkpoint=meta.generation_checkpoint,
        created_at_ms=meta.created_at_ms,
        plan=cut.plan(layout, flat, span, block_bytes),
        views=views,
        pinned=pinned,
    )


def commit(rooms: Rooms, prepared: Prepared) -> Saved:
    """Write what is new of `prepared` and publish it. A failure undoes everything and is raised."""
    began = time.perf_counter()
    try:
        lease = rooms.leases.take()
        try:
            return _Saver(rooms, prepared, lease, began).run()
        except BaseException:
            with _left_to_gc():
                rooms.index.reap(lease.id, rooms.unlink_header)
            raise
        finally:
            with _left_to_gc():
                lease.release()
    except OSError as error:
        if is_full(error):
            raise StoreFull("no space is left for the entry", path=rooms.layout.root) from error
        raise


def _left_to_gc() -> contextlib.suppress:
    """Around what the next collection finishes where it fails now: it must not turn a committed save into an error."""
    return contextlib.suppress(BlockstoreError, OSError)


class _Saver:
    """One save: stage blocks in the lease's folder, reserve, place, publish."""

    def __init__(self, rooms: Rooms, prepared: Prepared, lease: Lease, began: float) -> None:
        identity = prepared.identity
        self.rooms = rooms
        self.prepared = prepared
        self.lease = lease
        self.began = began
        self.scope = scope_of(
            identity.model_id, identity.config_fingerprint, identity.tokenizer_hash, identity.ns, prepared.provider_id
        )
        self.packer = Packer(prepared)
        self.digests: list[bytes] = [b""] * len(self.packer)
        self.made_from: dict[bytes, int] = {}
        self.staged: set[bytes] = set()
        self.staged_bytes = 0
        self.placed: set[bytes] = set()
        self._lock = threading.Lock()

    def run(self) -> Saved:
        spread(range(len(self.packer)), self._stage, MARGINS.threads)
        sizes = {name: self.packer.size(number) for name, number in self.made_from.items()}
        now_ms = time.time_ns() // 1_000_000
        header = self.packer.header(self.digests, block_hash=self.rooms.blocks.hash_name, created_at_ms=now_ms)
        data = encode_header(header)
        relative = self.rooms.relative_header(self.scope, self.lease.id)
        hits = self.rooms.index.reserve(self.lease.id, relative, sizes)
        collect.make_room(self.rooms, sum(map(self.rooms.index.on_disk, sizes.values())), len(data))
        self._place([d for d in sizes if d not in hits or not self.rooms.blocks.has(d, sizes[d])])
        self._write_header(data)
        self._publish(implied_row(header, len(data), pinned=self.prepared.pinned))
        written = sum(sizes[name] for name in self.placed)
        return Saved(
            entry_id=self.lease.id,
            path=self.rooms.layout.header_path(self.scope, self.lease.id),
            token_count=len(header.tokens),
            logical_bytes=self.prepared.logical_bytes,
            written_bytes=written + len(data),
            reused_bytes=self.prepared.logical_bytes - written,
            blocks_written=len(self.placed),
            blocks_reused=len(sizes) - len(self.placed),
            seconds=time.perf_counter() - self.began,
        )

    def _stage(self, number: int) -> None:
        """Pack and digest one block; write it to a temporary unless the index knows it or this save made it before."""
        data = self.packer.pack(number)
        name = digest(self.rooms.blocks.hash_name, data)
        self.digests[number] = name
        with self._lock:
            if self.made_from.setdefault(name, number) != number:
                return
        if not self.rooms.index.believed(name):
            self._write_temporary(name, data)

    def _write_temporary(self, name: bytes, data: memoryview) -> None:
        self.rooms.fs.write_new(self.lease.temporary(name.hex()), [data])
        with self._lock:
            self.staged.add(name)
            self.staged_bytes += len(data)
            staged = self.staged_bytes
        # Asked now and then: whatever no eviction makes room for must not be written out first.
        if staged // _CHECK_BYTES != (staged - len(data)) // _CHECK_BYTES:
            collect.check_can_fit(self.rooms, staged)

    def _place(self, names: Sequence[bytes]) -> None:
        """Bring blocks into blocks/: synced first, then renamed, then the directory synced."""
        if not names:
            return
        spread(names, self._ready, MARGINS.threads)
        for name in names:
            self.rooms.blocks.publish(self.lease.temporary(name.hex()), name)
            self.staged.discard(name)
        self.placed.update(names)
        if self.rooms.layout.durable:
            self.rooms.blocks.sync()

    def _ready(self, name: bytes) -> None:
        if name not in self.staged:
            self._write_temporary(name, self.packer.pack(self.made_from[name]))
        if self.rooms.layout.durable:
            self.rooms.fs.sync_file(self.lease.temporary(name.hex()))

    def _write_header(self, header: bytes) -> None:
        fs, durable = self.rooms.fs, self.rooms.layout.durable
        path = self.rooms.layout.header_path(self.scope, self.lease.id)
        temporary = self.lease.temporary("header")
        fs.write_new(temporary, [header], sync=durable)
        if fs.make_dir(os.path.dirname(path)) and durable:
            fs.sync_dir(self.rooms.layout.entries_folder)
        fs.rename(temporary, path)
        if durable:
            fs.sync_dir(os.path.dirname(path))

    def _publish(self, entry: EntryRow) -> None:
        while True:
            done = self.rooms.index.publish(self.lease.id, entry, self.prepared.tokens, self.placed)
            if not done.lost:
                break
            self._place(done.lost)
        with _left_to_gc():
            self.rooms.finish_doomed((entry_id, self.scope) for entry_id in done.replaced)


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
