"""The store: save, find, load, restore, remove, collect.

What touches mlx is imported when it is first needed, so that the commands that only look or collect start without it.
"""

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

import msgspec

from . import collect, environment, layout, opening
from .errors import CacheMiss, EntryGone, InvalidInput, NotPermitted, StoreBroken, StoreBusy, StoreFull
from .fs import FileSystem
from .identity import Identity
from .index import Index
from .index_rows import EntryRow
from .layout import Durability, StoreConfig
from .leases import is_id
from .limits import Limits
from .listing import Entry, Match, Stats, entry_of, find, stats_of
from .meta import SaveOptions
from .prefixes import pack_tokens
from .rooms import MARGINS, Deadline, Rooms
from .space import Space, space

if TYPE_CHECKING:
    from kvcodecs.algebra import CodecProvider

    from .moving import Imported
    from .packing import Prepared
    from .restoring import Loaded
    from .saving import Saved

DEFAULT_PROVIDER_ID: Final = "mlx-cache-v5"


class Store:
    """A block store in one directory, shared by any number of processes.

    root: the directory; `~` is expanded; created with its parents unless create=False.
    max_bytes: cap over every byte of the directory, kept in the store for all its users; default at creation: a tenth
        of the disk, or what leaves 10 GiB free, whichever is less.
    durability ("full" | "none"), hash ("blake3" | "sha256"), span (tokens), block_bytes: chosen at creation and kept;
        naming another value for an existing store is InvalidInput.
    read_only: True to change nothing, so that a store can be used that one may not write; default: only where one may
        not. What would change it then raises NotPermitted; a load leaves no trace of its use, and drops no bad entry.
    provider: the codecs; default: our own classes and mlx-lm's.

    Methods may be called from any thread, but save, prepare, load and restore touch mlx arrays, so they belong on the
    thread that owns the caches. Raises StoreBusy, StoreBroken, UnsupportedFormat (a newer store), InvalidInput,
    NotPermitted, OSError.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        durability: Durability | None = None,
        hash: str | None = None,
        span: int | None = None,
        block_bytes: int | None = None,
        create: bool = True,
        read_only: bool | None = None,
        provider: "CodecProvider | None" = None,
        fs: FileSystem | None = None,
    ) -> None:
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes <= 0):
            raise InvalidInput("max_bytes must be a positive number of bytes", field="max_bytes", found=max_bytes)
        wanted = {"durability": durability, "block_hash": hash, "span": span, "block_bytes": block_bytes}
        self._fs = fs or FileSystem()
        self._provider = provider
        if not isinstance(os.fspath(root), str) or not os.fspath(root):
            raise InvalidInput("root must be the path of a directory", field="root", found=root)
        self.root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self._closed = threading.Lock()
        self._lock_fd: int | None = None
        self._pid = os.getpid()
        may_create = create and not read_only
        self._layout = opening.open_or_create(self._fs, self.root, wanted, max_bytes, create=may_create)
        reads = opening.is_read_only(self._fs, self._layout, read_only)
        self._lock_fd = opening.hold_shared(self._fs, self._layout)
        folder, durable = self._layout.index_folder, self._layout.durable
        self._env = environment.acquire(self._fs, folder, durable=durable, read_only=reads)
        self._rooms = Rooms(self._layout, Index(self._env, self._fs.allocation_unit(self.root), read_only=reads))
        try:
            if max_bytes is not None and max_bytes != self._rooms.index.limits().max_bytes:
                self.set_limits(max_bytes=max_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __del__(self) -> None:
        # A store that was dropped gives back what it has, the index later: this may run inside anybody's transaction.
        fd = getattr(self, "_lock_fd", None)
        if fd is not None:
            self._fs.close(fd)
            environment.release_later(getattr(self, "_env", None))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what is remembered of uses and let go of the store. Safe to call twice."""
        with self._closed:
            if self._lock_fd is None:
                return
            fd, self._lock_fd = self._lock_fd, None
        try:
            with contextlib.suppress(StoreBroken, StoreBusy, OSError):  # the order of uses is a hint
                if self._pid == os.getpid() and not self._rooms.index.read_only:
                    self._rooms.index.flush()
        finally:
            environment.release(self._env)
            self._fs.close(fd)

    @property
    def config(self) -> StoreConfig:
        return self._layout.config

    @property
    def rooms(self) -> Rooms:
        """The parts of the open store, for the command and tools; servers need none of them."""
        self._check_open()
        return self._rooms

    @property
    def provider(self) -> "CodecProvider":
        if self._provider is None:
            from kvcodecs.provider import default_provider  # brings mlx

            self._provider = default_provider()
        return self._provider

    # ---- save

    def save(
        self, tokens: Sequence[int] | Any, caches: Sequence[object], identity: Identity, **options: Unpack[SaveOptions]
    ) -> "Saved":
        """Store `caches`, which encode exactly `tokens`, under `identity`. Only blocks that are new are written.

        caches: one a layer, of any class that the provider handles; not changed. Options, all by name: see SaveOptions.
        An older entry of equal identity and tokens is replaced.
        When save returns the entry is committed: durable, unless the store was created with durability="none".
        Raises InvalidInput, NotPermitted (nothing written), StoreFull, StoreBusy, StoreBroken, OSError (nothing
        committed).
        """
        from . import preparing, saving  # bring mlx

        self._check_writable()
        given = (self._rooms, self.provider, tokens, caches, _checked_identity(identity), options)
        try:
            return saving.commit(self._rooms, preparing.prepare_for(*given))
        except saving.HistoryLost:
            return saving.commit(self._rooms, preparing.prepare_for(*given, continues=False))

    def prepare(
        self, tokens: Sequence[int] | Any, caches: Sequence[object], identity: Identity, **options: Unpack[SaveOptions]
    ) -> "Prepared":
        """The half of save that touches mlx: a snapshot that later steps of the caches do not change.

        Call on the thread that owns the caches. Where they continue an entry (see SaveOptions) only what is new is
        copied out; otherwise it shares their memory, so that their next step in place costs a copy.
        """
        from . import preparing  # brings mlx

        self._check_writable()
        given = (self._rooms, self.provider, tokens, caches, _checked_identity(identity), options)
        return preparing.prepare_for(*given, copy=True)

    def commit(self, prepared: "Prepared") -> "Saved":
        """The half of save that writes; from any thread. Raises as save().

        EntryGone where what the caches continue went meanwhile: prepare again, everything is looked at then.
        """
        from . import saving  # brings mlx

        self._check_writable()
        return saving.commit(self._rooms, prepared)

    # ---- find and load

    def find(self, tokens: Sequence[int] | Any, identity: Identity) -> Match | None:
        """The entry that serves the longest prefix of the prompt `tokens`: at least one token, at most all but one.

        tokens: a sequence of ints or a one-dimensional integer array (numpy is fastest). Opens no header.
        """
        return self._find(pack_tokens(tokens), identity, frozenset())

    def load(
        self, match: Match | str, model: Any = None, *, length: int | None = None, verify: bool = True
    ) -> "Loaded":
        """New cache objects of what `match` found, or of the entry with that id, cut to `length` tokens.

        model: anything with make_cache(), an mlx-lm model, a list of prototype caches, or None (our own classes).
        verify: compare every block with its digest. A match shorter than its entry reads only the blocks it needs.
        Raises a CacheMiss: EntryGone, CorruptEntry (the entry is dropped), IdentityMismatch (other layers or geometry
        than the model's), UnsupportedFormat. InvalidInput where the entry cannot be cut to `length`. OSError.
        """
        from . import loading  # brings mlx

        self._check_open()
        if not isinstance(match, (str, Match)):
            raise InvalidInput("load takes a Match or an entry id", field="match", found=type(match).__name__)
        if length is not None and type(length) is not int:
            raise InvalidInput("length must be a number of tokens", field="length", found=length)
        chosen = Match(match, 0, 0) if isinstance(match, str) else match
        if length is None and isinstance(match, Match):
            length = match.length
        return loading.load(
            self._rooms, self.provider, _checked_id(chosen.entry_id), length, model, verify=verify,
            prefix=chosen.prefix if length == chosen.length else "",
        )  # fmt: skip

    def restore(
        self, tokens: Sequence[int] | Any, identity: Identity, model: Any = None, *, verify: bool = True
    ) -> "Loaded | None":
        """Find and load until one succeeds; None where nothing can be reused. A bad entry hides no shorter good one.

        Raises OSError where files could not be read for a passing reason and no other entry served.
        """
        tried: set[str] = set()
        failure: OSError | None = None
        packed = pack_tokens(tokens)
        late = Deadline(MARGINS.restore_s)
        while not late():
            match = self._find(packed, identity, frozenset(tried))
            if match is None:
                break
            try:
                return self.load(match, model, verify=verify)
            except CacheMiss:
                tried.add(match.entry_id)
            except OSError as error:
                tried.add(match.entry_id)
                failure = failure or error
        if failure is not None:
            raise failure
        return None

    # ---- remove and collect

    def remove(self, entry_id: str) -> None:
        """Remove an entry; its blocks become collectable now. Raises EntryGone where there is none."""
        self._check_writable()
        row = self._row(entry_id)
        self._rooms.index.doom(entry_id)
        self._rooms.finish_doomed([(entry_id, row.scope)])

    def pin(self, entry_id: str, *, pinned: bool = True) -> None:
        """Keep an entry from eviction, or no longer. Raises EntryGone where there is none."""
        self._check_writable()
        self._row(entry_id)
        self._rooms.index.pin(entry_id, pinned=pinned)

    def space(self, *entry_ids: str) -> Space:
        """What removing these entries together, and collecting, would give back. Raises EntryGone."""
        self._check_open()
        return space(self._rooms, map(_checked_id, entry_ids))

    def gc(
        self, *, dry_run: bool = False, full: bool = False, progress: collect.Progress | None = None
    ) -> collect.Plan:
        """Delete what nobody refers to, in bounded steps while others serve; what was, or would be, collected.

        full: also mark from the headers, adopt or remove stray ones, and sweep files that the index does not know.
        """
        self._check_open()
        if dry_run:
            return collect.full_plan(self._rooms) if full else collect.plan(self._rooms)
        self._check_writable()
        return collect.gc(self._rooms, full=full, progress=progress or (lambda done, total: None))

    # ---- limits

    @property
    def limits(self) -> Limits:
        """The limits in force, for every user of the store."""
        self._check_open()
        return self._rooms.index.limits()

    def set_limits(
        self,
        *,
        max_bytes: int | None = None,
        min_free_bytes: int | None = None,
        max_age_s: int | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> Limits:
        """Change limits for every user of the store, now and later; None leaves one as it is, 0 lifts it. See Limits.

        Nothing goes at once: the next save evicts by max_bytes, min_free_bytes and its own model's quota, the next gc
        what is older than max_age_s. Raises InvalidInput, NotPermitted.
        """
        self._check_writable()
        changes = {"max_bytes": max_bytes, "min_free_bytes": min_free_bytes, "max_age_s": max_age_s, "quotas": quotas}
        return self._rooms.index.set_limits(changes, self._keep_limits)

    # ---- move

    def import_file(self, path: str | os.PathLike[str]) -> "Imported":
        """Take a cache file of any version into the store, under the identity it names; the file stays as it is.

        Every tensor is compared with its hash. An entry of equal identity and tokens is replaced only by a file that
        was saved later, so importing twice is safe. Raises CorruptEntry, UnsupportedFormat, StoreFull, OSError.
        """
        from . import moving  # brings mlx

        self._check_writable()
        return moving.import_file(self._rooms, self.provider, os.fspath(path))

    def export_entry(self, entry_id: str, folder: str | os.PathLike[str], *, layout: str = "monolith") -> str:
        """Write an entry as a file that mlx-bun opens, named by its id, into `folder`; the file's path.

        layout: "monolith", one file, or "rows", with blocks/ beside it. Raises EntryGone, CorruptEntry, OSError, and
        InvalidInput for caches of kinds that mlx-bun does not know.
        """
        from . import moving  # brings mlx

        self._check_open()
        return moving.export_entry(self._rooms, _checked_id(entry_id), os.fspath(folder), layout)

    # ---- look

    def entries(self) -> list[Entry]:
        """Every entry, the most recently used first."""
        self._check_open()
        with contextlib.suppress(StoreFull):  # the order is a hint; a full disk must not hide what can be removed
            self._rooms.index.flush()
        return [entry_of(entry_id, row) for entry_id, row in reversed(self._rooms.index.entries())]

    def entry(self, entry_id: str) -> Entry:
        """One entry by its id, or by the beginning of it if that is unambiguous. Raises EntryGone, InvalidInput."""
        self._check_open()
        if not isinstance(entry_id, str):
            raise InvalidInput("an entry id is text", field="entry_id", found=entry_id)
        if is_id(entry_id):
            return entry_of(entry_id, self._row(entry_id))
        found = [entry for entry in self.entries() if entry_id and entry.entry_id.startswith(entry_id)]
        if len(found) > 1:
            raise InvalidInput(
                "more than one entry begins like that", field="entry_id", found=[entry.entry_id for entry in found[:4]]
            )
        if not found:
            raise EntryGone("there is no such entry", entry_id=entry_id, hint="`blockstore ls` lists them.")
        return found[0]

    def stats(self) -> Stats:
        """Numbers of the store; walks its directory to say what it takes on the disk."""
        self._check_open()
        return stats_of(self._rooms)

    # ---- inside

    def _find(self, packed: bytes, identity: Identity, exclude: frozenset[str]) -> Match | None:
        self._check_open()
        provider_id = self._provider.id if self._provider is not None else DEFAULT_PROVIDER_ID
        return find(self._rooms, _checked_identity(identity), provider_id, packed, exclude)

    def _row(self, entry_id: str) -> EntryRow:
        row = self._rooms.index.entry(_checked_id(entry_id))
        if row is None:
            raise EntryGone("there is no such entry", entry_id=entry_id)
        return row

    def _keep_limits(self, limits: Limits) -> None:
        """In store.json too, from which a repair takes them."""
        found = layout.read_config(self._fs, self.root) or self.config
        layout.write_config(self._fs, self.root, msgspec.structs.replace(found, limits=limits))

    def _check_writable(self) -> None:
        self._check_open()
        if self._rooms.index.read_only:
            raise NotPermitted("the store is open for reading only", path=self.root)

    def _check_open(self) -> None:
        if self._lock_fd is None:
            raise InvalidInput("the store is closed", path=self.root, hint="Open it again.")


def _checked_id(entry_id: object) -> str:
    if not isinstance(entry_id, str) or not is_id(entry_id):
        raise InvalidInput("an entry id is 32 lower-case hex digits", field="entry_id", found=entry_id)
    return entry_id


def _checked_identity(identity: object) -> Identity:
    if not isinstance(identity, Identity):
        raise InvalidInput("identity must be an Identity", field="identity", found=type(identity).__name__)
    return identity
