"""From snapshots to the bytes of blocks, and to the header that names them. No mlx: plain memory only."""

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvcodecs.entry import BlockRef, HeaderEntry, Slot, leaves, replace_leaves

from . import cut, records
from .buffers import ByteArray, Scratch, Turns, flat_views
from .history import Taken
from .identity import Identity
from .placing import companions
from .prefixes import unpack_tokens
from .records import GenerationCheckpoint, Group, Header
from .rules import PAGE_BYTES
from .versions import versions_of

_VERSION = 5


@dataclass(frozen=True)
class Prepared:
    """A snapshot of a cache list: what the caches do afterwards changes nothing here.

    It shares the caches' memory, so their next step in place copies them; commit it, or drop it, soon. `tokens` are
    packed as u32 LE, `attachments` described without blocks; `views` has one array of unsigned integers for each
    tensor, those of the attachments numbered as leaves behind the caches'. `taken` says for each group (or for none)
    what is taken over from `parent`, an entry that the caches continue: the views of its tensors begin behind that.
    `sources` are the cache objects, which learn of the entry once it is committed.
    """

    identity: Identity
    provider_id: str
    tokens: bytes
    caches: tuple[HeaderEntry, ...]
    attachments: tuple[records.Attachment, ...]
    generation_checkpoint: GenerationCheckpoint | None
    created_at_ms: int | None
    plan: cut.CutPlan
    views: dict[cut.Ref, ByteArray]
    pinned: bool = False
    taken: tuple[Taken, ...] = ()
    parent: str = ""
    sources: tuple["weakref.ref[Any]", ...] = ()

    @property
    def logical_bytes(self) -> int:
        return sum(slot.bytes for entry in self.flat for slot in entry.tensors)

    @property
    def flat(self) -> list[HeaderEntry]:
        """The caches' leaves, and the attachments as further ones."""
        return [*leaves(self.caches), *companions(self.attachments)]


class _Job(NamedTuple):
    """One block to make, of `size` bytes: tokens start … stop of a group, or elements start … stop of one tensor.

    Both count from the first row that the views have. A block with a digest is taken over, and cannot be made.
    """

    part: cut.Part
    start: int
    stop: int
    size: int
    digest: bytes | None = None


def placed(prepared: Prepared) -> Iterator[tuple[cut.Ref, Slot]]:
    """Every slot with the place that it has in one file; the first writer names it in v5 as well, where it is unused.

    Cache tensors begin at multiples of a page. The first attachment tensor follows the last cache tensor directly.
    """
    flat = [*leaves(prepared.caches), *companions(prepared.attachments)]
    first_companion = len(flat) - len(prepared.attachments)
    end, attached = 0, False
    for (leaf, index), slot in cut.numbered(flat):
        follows = leaf >= first_companion and not attached
        attached = leaf >= first_companion
        off = end if follows else -(-end // PAGE_BYTES) * PAGE_BYTES
        end = off + slot.bytes
        yield (leaf, index), msgspec.structs.replace(slot, off=off)


def header_of(
    prepared: Prepared,
    format_version: int,
    caches: tuple[HeaderEntry, ...],
    attachments: tuple[records.Attachment, ...],
    *,
    created_at_ms: int,
) -> Header:
    """The header that any version has, over entries that say where their bytes are.

    `created_at_ms` serves a snapshot that names no time of its own.
    """
    identity, created = prepared.identity, prepared.created_at_ms
    return Header(
        format_version=format_version,
        created_at=created if created is not None else created_at_ms,
        model_id=identity.model_id,
        config_fingerprint=identity.config_fingerprint,
        tokenizer_hash=identity.tokenizer_hash,
        ns=identity.ns,
        codec_provider=prepared.provider_id,
        tokens=tuple(unpack_tokens(prepared.tokens)),
        caches=caches,
        attachments=attachments,
        generation_checkpoint=prepared.generation_checkpoint,
    )


class Packer:
    """Makes the blocks of a snapshot, by number, and then its header. pack() may be called from several threads."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self._jobs = list(_jobs(prepared))
        # Not a cached_property: before Python 3.12 that has a lock, which a fork may find held.
        self.largest = max((job.size for job in self._jobs), default=0)  # bytes of a block
        self._scratch = Scratch(self.largest)
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._jobs)

    def size(self, number: int) -> int:
        """Bytes of a block."""
        return self._jobs[number].size

    def taken(self) -> dict[int, bytes]:
        """Number and digest of the blocks that are taken over, and need not (and cannot) be packed."""
        return {number: job.digest for number, job in enumerate(self._jobs) if job.digest is not None}

    def pack(self, number: int) -> memoryview:
        """The bytes of a block, in this thread's buffer until its next call."""
        job = self._jobs[number]
        out = self._scratch.take(job.size)
        if isinstance(job.part, cut.GroupPlan):
            index = (*(slice(None),) * job.part.axis, slice(job.start, job.stop))
            parts = [self.prepared.views[ref][index] for ref in job.part.tensors]
            into = self._into(out, job, parts)
        else:
            parts = list(flat_views(self.prepared.views[job.part.tensor], job.start, job.stop))
            into = _laid_out(out, parts)
        with self._turns.copying(len(parts), job.size):
            for place, part in zip(into, parts, strict=True):
                place[...] = part  # not np.copyto, whose way through Python costs more than a small part
        return out.data

    def _into(self, out: ByteArray, job: _Job, parts: Sequence[ByteArray]) -> list[ByteArray]:
        """Where each tensor's part stands in a block. A thread packs all blocks into one buffer: its views are kept."""
        key = (id(job.part), job.stop - job.start)
        views = self._scratch.views.get(key)
        if views is None:
            views = self._scratch.views[key] = _laid_out(out, parts)
        return views

    def header(
        self, digests: Sequence[bytes], *, block_hash: str | None, created_at_ms: int, ours: bool = True
    ) -> Header:
        """The v5 header over blocks with these digests, in order. `ours`: with what only our own readers know."""
        plain = header_of(self.prepared, _VERSION, *self._cut_entries(digests, ours), created_at_ms=created_at_ms)
        return msgspec.structs.replace(
            plain,
            block_hash=block_hash,
            segments=self._groups(digests) if ours else None,
            made_with=_made_with() if ours else None,
        )

    def _by_part(self, digests: Sequence[bytes]) -> Iterator[tuple[cut.Part, Sequence[bytes]]]:
        at = 0
        for part in self.prepared.plan.parts:
            yield part, digests[at : at + len(part.counts)]
            at += len(part.counts)

    def _groups(self, digests: Sequence[bytes]) -> tuple[Group, ...]:
        groups = []
        for part, own in self._by_part(digests):
            if isinstance(part, cut.GroupPlan):
                usual = part.counts == cut.default_counts(sum(part.counts), part.span)
                groups.append(Group(part.span, part.tensors, b"".join(own).hex(), None if usual else part.counts))
        return tuple(groups)

    def _cut_entries(
        self, digests: Sequence[bytes], ours: bool
    ) -> tuple[tuple[HeaderEntry, ...], tuple[records.Attachment, ...]]:
        """Entries and attachments with every slot saying where its bytes are: a token axis, or blocks of its own."""
        prepared = self.prepared
        flat = prepared.flat
        slots: dict[cut.Ref, Slot] = dict(cut.numbered(flat) if ours else placed(prepared))
        for part, own in self._by_part(digests):
            if isinstance(part, cut.GroupPlan):
                for ref in part.tensors:
                    slots[ref] = msgspec.structs.replace(slots[ref], axis=part.axis)
            else:
                slot = slots[part.tensor]
                sizes = (count * slot.item_size for count in part.counts)
                blocks = tuple(BlockRef(digest.hex(), size) for digest, size in zip(own, sizes, strict=True))
                slots[part.tensor] = msgspec.structs.replace(slot, blocks=blocks)
        tensors = [tuple(slots[leaf, i] for i in range(len(entry.tensors))) for leaf, entry in enumerate(flat)]
        new = (msgspec.structs.replace(entry, tensors=own) for entry, own in zip(flat, tensors, strict=True))
        caches = replace_leaves(prepared.caches, new)
        extra = tensors[len(flat) - len(prepared.attachments) :]
        attachments = tuple(
            msgspec.structs.replace(attachment, tensors=own)
            for attachment, own in zip(prepared.attachments, extra, strict=True)
        )
        return caches, attachments


@functools.cache
def _made_with() -> dict[str, str]:
    """Looked up once a process: what is imported does not change."""
    return versions_of()


def _laid_out(out: ByteArray, parts: Sequence[ByteArray]) -> list[ByteArray]:
    """Views of `out` with the shapes and dtypes of `parts`, one behind the other."""
    views, at = [], 0
    for part in parts:
        views.append(out[at : at + part.nbytes].view(part.dtype).reshape(part.shape))
        at += part.nbytes
    return views


def _jobs(prepared: Prepared) -> Iterator[_Job]:
    flat = prepared.flat
    taken = prepared.taken or (Taken(),) * len(prepared.plan.groups)
    for group, known in zip(prepared.plan.groups, taken, strict=True):
        width = sum(cut.token_bytes(flat[leaf].tensors[index], group.axis) for leaf, index in group.tensors)
        yield from _part_jobs(group, group.counts, width, known)
    for loose in prepared.plan.loose:
        leaf, index = loose.tensor
        yield from _part_jobs(loose, loose.counts, flat[leaf].tensors[index].item_size, Taken())


def _part_jobs(part: cut.Part, counts: Sequence[int], width: int, known: Taken) -> Iterator[_Job]:
    start = -known.tokens
    for number, count in enumerate(counts):
        digest = known.digests[number] if number < len(known.digests) else None
        yield _Job(part, start, start + count, count * width, digest)
        start += count
