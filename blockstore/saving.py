"""Save: from a cache list to a committed entry (DESIGN 4, Save).

prepare() touches mlx, on the caller's thread; commit() sees plain memory only and may run on any thread.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcodecs import geometry
from kvcodecs.algebra import CodecError, CodecProvider, SnapshotContext
from kvcodecs.backend import mx
from kvcodecs.codec import array_slot
from kvcodecs.entry import HeaderEntry, leaves

from . import admission, cut, records
from .buffers import host_views
from .digest import digest
from .entries import implied_row
from .errors import BlockstoreError, InvalidInput, StoreFull
from .fs import is_full
from .header import encode_header
from .identity import Identity
from .index_rows import EntryRow
from .layout import StoreConfig
from .leases import Lease
from .meta import Attachment, Meta, SaveOptions
from .packing import Packer, Prepared
from .placing import companions
from .prefixes import pack_tokens
from .records import GenerationCheckpoint, scope_of
from .rooms import MARGINS, Rooms
from .workers import spread


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


@dataclass(frozen=True)
class _Choices:
    """SaveOptions with their defaults; an unknown name is a TypeError, as for any call."""

    layout: str = "segments"
    block_bytes: int | None = None
    pinned: bool = False
    attachments: Any = ()
    generation_checkpoint: GenerationCheckpoint | None = None

    def __post_init__(self) -> None:
        if self.block_bytes is not None and (type(self.block_bytes) is not int or self.block_bytes < 1):
            raise InvalidInput("block_bytes must be a number of bytes", field="block_bytes", found=self.block_bytes)
        if self.layout not in ("segments", "rows"):
            raise InvalidInput("unknown cut", field="layout", expected=["segments", "rows"], found=self.layout)
        if not isinstance(self.attachments, Sequence):
            found = type(self.attachments).__name__
            raise InvalidInput("attachments must be a list", field="attachments", found=found)


def prepare_for(
    config: StoreConfig,
    provider: CodecProvider,
    tokens: Sequence[int] | Any,
    caches: Sequence[object],
    identity: Identity,
    options: SaveOptions,
) -> Prepared:
    """prepare() as a store does it. Raises InvalidInput."""
    chosen = _Choices(**options)
    meta = Meta(
        model_id=identity.model_id,
        config_fingerprint=identity.config_fingerprint,
        tokenizer_hash=identity.tokenizer_hash,
        ns=identity.ns,
        attachments=tuple(chosen.attachments),
        generation_checkpoint=chosen.generation_checkpoint,
    )
    return prepare(
        provider,
        tokens,
        caches,
        meta,
        span=config.span,
        block_bytes=chosen.block_bytes or config.block_bytes,
        layout=chosen.layout,
        pinned=chosen.pinned,
    )


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
        self.roomy = False
        self.placed: set[bytes] = set()
        self._lock = threading.Lock()

    def run(self) -> Saved:
        self.roomy = admission.has_room(self.rooms, self._most_bytes())
        spread(range(len(self.packer)), self._stage, MARGINS.threads_for(self.packer.largest))
        sizes = {name: self.packer.size(number) for name, number in self.made_from.items()}
        now_ms = time.time_ns() // 1_000_000
        header = self.packer.header(self.digests, block_hash=self.rooms.blocks.hash_name, created_at_ms=now_ms)
        data = encode_header(header)
        relative = self.rooms.relative_header(self.scope, self.lease.id)
        header_bytes = self._header_bytes(len(data))
        admission.check_quota(self.rooms, self.prepared.identity.model_id, sizes, header_bytes)
        hits = self.rooms.index.reserve(self.lease.id, relative, sizes)
        missing = [name for name in sizes if name not in hits or not self.rooms.blocks.has(name, sizes[name])]
        unwritten = self._on_disk(sizes[name] for name in missing if name not in self.staged)
        admission.make_room(self.rooms, self._on_disk(sizes.values()), header_bytes, unwritten)
        self._place(missing)
        self._write_header(data)
        self._publish(implied_row(header, len(data), pinned=self.prepared.pinned, used_at_ms=now_ms))
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
        # Where something may have to go first, blocks are written when that is done, and packed once more.
        if self.roomy and not self.rooms.index.believed(name):
            self._write_temporary(name, data)

    def _write_temporary(self, name: bytes, data: memoryview) -> None:
        self.rooms.fs.write_new(self.lease.temporary(name.hex()), [data])
        with self._lock:
            self.staged.add(name)

    def _most_bytes(self) -> int:
        """What the save takes if nothing of it is there yet; its header apart, for which room is made later."""
        return self._on_disk(map(self.packer.size, range(len(self.packer))))

    def _header_bytes(self, length: int) -> int:
        """What a header takes on the disk, with a folder if it is the first of its identity."""
        folder = os.path.dirname(self.rooms.layout.header_path(self.scope, self.lease.id))
        return self._on_disk([length] if self.rooms.fs.exists(folder) else [length, 1])

    def _on_disk(self, sizes: Iterable[int]) -> int:
        return sum(map(self.rooms.index.on_disk, sizes))

    def _place(self, names: Sequence[bytes]) -> None:
        """Bring blocks into blocks/: synced first, then renamed, then the directory synced."""
        if not names:
            return
        spread(names, self._ready, MARGINS.threads_for(self.packer.largest))
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
        while not self._placed_header(temporary, path):
            pass
        if durable:
            fs.sync_dir(os.path.dirname(path))

    def _placed_header(self, temporary: str, path: str) -> bool:
        """Rename the header into its identity's folder; False where a removal took the empty folder away meanwhile."""
        fs, folder = self.rooms.fs, os.path.dirname(path)
        fs.make_own_dir(folder, self.rooms.layout.quarantine_folder)
        if self.rooms.layout.durable:  # always: whoever made the folder may have failed before its name was durable
            fs.sync_dir(self.rooms.layout.entries_folder)
        try:
            fs.rename(temporary, path)
        except FileNotFoundError:
            if fs.exists(folder):
                raise
            return False
        return True

    def _publish(self, entry: EntryRow) -> None:
        while True:
            done = self.rooms.index.publish(self.lease.id, entry, self.prepared.tokens, self.placed)
            if not done.lost:
                break
            self._place(done.lost)
        with _left_to_gc():
            self.rooms.finish_doomed((entry_id, self.scope) for entry_id in done.replaced)
            admission.keep_quota(self.rooms, entry.model_id, self.lease.id)


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
