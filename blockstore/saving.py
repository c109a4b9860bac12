"""Save: from a cache list to a committed entry (DESIGN 4, Save).

prepare() touches mlx, on the caller's thread; commit() sees plain memory only and may run on any thread.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from kvcodecs import geometry
from kvcodecs.algebra import CodecError, CodecProvider, SnapshotContext
from kvcodecs.entry import BlockRef, HeaderEntry, Slot, leaves, replace_leaves

from . import collect, cut
from .buffers import ByteArray, Scratch, flat_views, host_views
from .digest import digest
from .entries import implied_row
from .errors import BlockstoreError, InvalidInput, StoreFull
from .fs import is_full
from .header import encode_header
from .identity import Identity, versions_of
from .index_rows import EntryRow
from .leases import Lease
from .prefixes import pack_tokens, unpack_tokens
from .records import Group, Header, scope_of
from .rooms import MARGINS, Rooms
from .workers import spread

_VERSION: Final = 5
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


@dataclass(frozen=True)
class Prepared:
    """A snapshot of a cache list: what the caches do afterwards changes nothing here.

    It shares the caches' memory, so their next step in place copies them; commit it, or drop it, soon.
    """

    identity: Identity
    provider_id: str
    tokens: bytes
    caches: tuple[HeaderEntry, ...]
    plan: cut.CutPlan
    views: dict[cut.Ref, ByteArray]
    pinned: bool

    @property
    def logical_bytes(self) -> int:
        return sum(view.nbytes for view in self.views.values())


@dataclass(frozen=True)
class _Job:
    """One block to make: tokens start … stop of a group, or elements start … stop of one tensor."""

    plan: cut.Part
    start: int
    stop: int


def prepare(
    provider: CodecProvider,
    tokens: Sequence[int] | Any,
    caches: Sequence[object],
    identity: Identity,
    *,
    span: int,
    block_bytes: int,
    layout: str = "segments",
    pinned: bool = False,
) -> Prepared:
    """Snapshot `caches`, evaluate the snapshot and take byte views. Call on the thread that made the arrays.

    Raises InvalidInput where the caches cannot be saved or do not encode `tokens`.
    """
    if not isinstance(caches, Sequence):
        raise InvalidInput("caches must be a list, one cache a layer", field="caches", found=type(caches).__name__)
    packed = pack_tokens(tokens)
    if not packed:
        raise InvalidInput("an entry needs at least one token", field="tokens", found=[])
    if layout not in ("segments", "rows"):
        raise InvalidInput("unknown cut", field="layout", expected=["segments", "rows"], found=layout)
    context = SnapshotContext(len(packed) // 4, whole_ring=layout == "rows")
    try:
        snapshots = provider.snapshot(caches, context)
    except CodecError as error:
        raise InvalidInput(str(error), field="caches") from error
    entries = tuple(snapshot.entry for snapshot in snapshots)
    _check_entries(entries, context.token_count)
    arrays = [array for snapshot in snapshots for array in snapshot.arrays]
    flat = list(leaves(entries))
    plan = cut.segments(flat, span, block_bytes) if layout == "segments" else cut.rows(cut.numbered(flat), block_bytes)
    refs = [ref for ref, _ in cut.numbered(flat)]
    views = dict(zip(refs, host_views(arrays), strict=True))
    return Prepared(identity, provider.id, packed, entries, plan, views, pinned)


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
        self.rooms = rooms
        self.prepared = prepared
        self.lease = lease
        self.began = began
        identity = prepared.identity
        self.scope = scope_of(
            identity.model_id, identity.config_fingerprint, identity.tokenizer_hash, identity.ns, prepared.provider_id
        )
        self.jobs = list(_jobs(prepared.plan))
        self.digests: list[bytes] = [b""] * len(self.jobs)
        self.made_from: dict[bytes, int] = {}
        self.staged: set[bytes] = set()
        self.staged_bytes = 0
        self.placed: set[bytes] = set()
        self._scratch = Scratch()
        self._lock = threading.Lock()

    def run(self) -> Saved:
        spread(range(len(self.jobs)), self._stage, MARGINS.threads)
        sizes = {digest_: self._size(job) for digest_, job in self.made_from.items()}
        header = self._header()
        data = encode_header(header)
        relative = self.rooms.relative_header(self.scope, self.lease.id)
        hits = self.rooms.index.reserve(self.lease.id, relative, sizes)
        collect.make_room(self.rooms, sum(map(self.rooms.index.on_disk, sizes.values())), len(data))
        self._place([d for d in sizes if d not in hits or not self.rooms.blocks.has(d, sizes[d])])
        self._write_header(data)
        self._publish(implied_row(header, len(data), pinned=self.prepared.pinned))
        written = sum(sizes[digest_] for digest_ in self.placed)
        return Saved(
            entry_id=self.lease.id,
            path=self.rooms.layout.header_path(self.scope, self.lease.id),
            token_count=len(self.prepared.tokens) // 4,
            logical_bytes=self.prepared.logical_bytes,
            written_bytes=written + len(data),
            reused_bytes=self.prepared.logical_bytes - written,
            blocks_written=len(self.placed),
            blocks_reused=len(sizes) - len(self.placed),
            seconds=time.perf_counter() - self.began,
        )

    def _stage(self, number: int) -> None:
        """Pack and digest one block; write it to a temporary unless the index knows it or this save made it before."""
        data = self._pack(number)
        name = digest(self.rooms.blocks.hash_name, data)
        self.digests[number] = name
        with self._lock:
            if self.made_from.setdefault(name, number) != number:
                return
        if not self.rooms.index.believed(name):
            self._write_temporary(name, data)

    def _pack(self, number: int) -> memoryview:
        out = self._scratch.take(self._size(number))
        at = 0
        for part in self._parts(self.jobs[number]):
            np.copyto(out[at : at + part.nbytes].view(part.dtype).reshape(part.shape), part)
            at += part.nbytes
        return out.data

    def _parts(self, job: _Job) -> Iterator[ByteArray]:
        views = self.prepared.views
        if isinstance(job.plan, cut.LoosePlan):
            yield from flat_views(views[job.plan.tensor], job.start, job.stop)
            return
        for ref in job.plan.tensors:
            before: tuple[slice, ...] = (slice(None),) * job.plan.axis
            yield views[ref][(*before, slice(job.start, job.stop))]

    def _size(self, number: int) -> int:
        job, views = self.jobs[number], self.prepared.views
        if isinstance(job.plan, cut.LoosePlan):
            return (job.stop - job.start) * views[job.plan.tensor].itemsize
        axis = job.plan.axis
        return sum((job.stop - job.start) * (views[ref].nbytes // views[ref].shape[axis]) for ref in job.plan.tensors)

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
            self._write_temporary(name, self._pack(self.made_from[name]))
        if self.rooms.layout.durable:
            self.rooms.fs.sync_file(self.lease.temporary(name.hex()))

    def _header(self) -> Header:
        prepared, identity = self.prepared, self.prepared.identity
        return Header(
            format_version=_VERSION,
            created_at=time.time_ns() // 1_000_000,
            model_id=identity.model_id,
            config_fingerprint=identity.config_fingerprint,
            tokenizer_hash=identity.tokenizer_hash,
            ns=identity.ns,
            codec_provider=prepared.provider_id,
            tokens=tuple(unpack_tokens(prepared.tokens)),
            caches=self._cut_entries(),
            block_hash=self.rooms.blocks.hash_name,
            segments=self._groups(),
            made_with=_made_with(),
        )

    def _groups(self) -> tuple[Group, ...]:
        groups = []
        for plan, digests in self._digests_by_plan():
            if isinstance(plan, cut.GroupPlan):
                hashes = b"".join(digests).hex()
                usual = plan.counts == cut.default_counts(sum(plan.counts), plan.span)
                groups.append(Group(plan.span, plan.tensors, hashes, None if usual else plan.counts))
        return tuple(groups)

    def _cut_entries(self) -> tuple[HeaderEntry, ...]:
        """The entries with every slot saying where its bytes are: a token axis, or blocks of its own."""
        slots: dict[cut.Ref, Slot] = dict(cut.numbered(list(leaves(self.prepared.caches))))
        for plan, digests in self._digests_by_plan():
            if isinstance(plan, cut.GroupPlan):
                for ref in plan.tensors:
                    slots[ref] = msgspec.structs.replace(slots[ref], axis=plan.axis)
            else:
                slot = slots[plan.tensor]
                sizes = (count * slot.item_size for count in plan.counts)
                blocks = tuple(BlockRef(d.hex(), size) for d, size in zip(digests, sizes, strict=True))
                slots[plan.tensor] = msgspec.structs.replace(slot, blocks=blocks)
        new = (
            msgspec.structs.replace(entry, tensors=tuple(slots[leaf, i] for i in range(len(entry.tensors))))
            for leaf, entry in enumerate(leaves(self.prepared.caches))
        )
        return replace_leaves(self.prepared.caches, new)

    def _digests_by_plan(self) -> Iterator[tuple[cut.Part, list[bytes]]]:
        at = 0
        for plan in self.prepared.plan.parts:
            yield plan, self.digests[at : at + len(plan.counts)]
            at += len(plan.counts)

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


@functools.cache
def _made_with() -> dict[str, str]:
    """Looked up once a process: what is imported does not change."""
    return versions_of()


def _jobs(plan: cut.CutPlan) -> Iterator[_Job]:
    for part in plan.parts:
        start = 0
        for count in part.counts:
            yield _Job(part, start, start + count)
            start += count


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
