"""Save: from a prepared snapshot to a committed entry (DESIGN 4, Save). Plain memory only; any thread."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from . import admission, history
from .digest import digest
from .entries import implied_row
from .errors import BlockstoreError, EntryGone, StoreFull
from .fs import is_full
from .header import encode_header
from .index_rows import EntryRow
from .leases import Lease
from .packing import Packer, Prepared
from .records import scope_of
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


class HistoryLost(EntryGone):
    """Blocks of the entry that a snapshot continues are not in the store any more, and the snapshot is without them."""

    default_hint = "Prepare again: everything is looked at then."


def commit(rooms: Rooms, prepared: Prepared) -> Saved:
    """Write what is new of `prepared` and publish it. A failure undoes everything and is raised."""
    try:
        saved = _commit(rooms, prepared)
    except OSError as error:
        if is_full(error):
            raise StoreFull("no space is left for the entry", path=rooms.layout.root) from error
        raise
    with _left_to_gc():
        admission.keep_within(rooms, prepared.identity.model_id, saved.entry_id)
    return saved


def _commit(rooms: Rooms, prepared: Prepared) -> Saved:
    began = time.perf_counter()
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
        self.taken: set[bytes] = set()
        self._lock = threading.Lock()

    def run(self) -> Saved:
        self._take_over()
        self.roomy = admission.announce(self.rooms, self.lease, self._most_bytes())
        spread(self._to_make(), self._stage, MARGINS.threads_for(self.packer.largest))
        now_ms = time.time_ns() // 1_000_000
        header = self.packer.header(self.digests, block_hash=self.rooms.blocks.hash_name, created_at_ms=now_ms)
        data = encode_header(header)
        sizes = {name: self.packer.size(number) for name, number in self.made_from.items()}
        with contextlib.nullcontext() if self.roomy else admission.turn(self.rooms):
            self._reserve(sizes, self._header_bytes(len(data)))
            self._write_header(data)
            self._publish(implied_row(header, len(data), pinned=self.prepared.pinned, used_at_ms=now_ms))
        self._leave_history()
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

    def _reserve(self, sizes: Mapping[bytes, int], header_bytes: int) -> None:
        """Reserve all blocks, make room for those that are new, and bring them into place."""
        admission.check_quota(self.rooms, self.prepared.identity.model_id, sizes, header_bytes)
        relative = self.rooms.relative_header(self.scope, self.lease.id)
        hits = self.rooms.index.reserve(self.lease.id, relative, sizes)
        admission.retract(self.rooms, self.lease)
        missing = [name for name in sizes if name not in hits or not self.rooms.blocks.has(name, sizes[name])]
        if not self.roomy:  # what was announced is there: others have made room beside it
            unwritten = self._on_disk(sizes[name] for name in missing if name not in self.staged)
            admission.make_room(self.rooms, self.lease.id, header_bytes, unwritten)
        self._place(missing)

    def _take_over(self) -> None:
        """Believe, until the reservation decides, the blocks of the entry that the caches continue."""
        for number, name in self.packer.taken().items():
            self.digests[number] = name
            self.made_from.setdefault(name, number)
            self.taken.add(name)

    def _to_make(self) -> list[int]:
        return [number for number, name in enumerate(self.digests) if not name]

    def _leave_history(self) -> None:
        """The caches at hand have become what is stored: their next save makes only what comes now."""
        plan, caches, tokens = self.prepared.plan, self.prepared.caches, self.prepared.tokens
        if plan.groups:
            root = self.rooms.layout.root
            known = history.of_plan(root, self.lease.id, tokens, plan, caches, self.digests)
            history.remember(standing_sources(self.prepared), known)

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
        path = self.lease.temporary(name.hex())
        self.rooms.fs.write_new(path, [data])
        if self.rooms.layout.durable:
            self.rooms.fs.begin_writing(path)
        with self._lock:
            self.staged.add(name)

    def _most_bytes(self) -> int:
        """What the save takes if nothing of it is there yet; its header apart, for which room is made later."""
        taken = self.packer.taken()
        return self._on_disk(self.packer.size(number) for number in range(len(self.packer)) if number not in taken)

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
        if name in self.taken:
            history.forget(standing_sources(self.prepared))
            self.rooms.lost.add(self.prepared.parent)
            raise HistoryLost("blocks of the entry that the caches continue are gone", digest=name.hex())
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


def standing_sources(prepared: Prepared) -> list[object]:
    """The cache objects of a snapshot that are still there."""
    return [cache for cache in (source() for source in prepared.sources) if cache is not None]
