"""Load: from a committed entry to new cache objects (DESIGN 4, Load).

Every array is made once, at its final capacity, and filled in place by worker threads. Whatever fails, the caller's
state is untouched: nothing is returned but new objects, and only when all of them are whole.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from kvcodecs import geometry
from kvcodecs.algebra import Codec, CodecError, CodecProvider, PrototypeMismatch, UnknownKind
from kvcodecs.entry import HeaderEntry, leaves

from . import entries as entries_
from . import placing
from .buffers import Scratch
from .errors import BlockstoreError, CorruptEntry, EntryGone, IdentityMismatch, InvalidInput, UnsupportedFormat
from .index_rows import EntryRow
from .prefixes import pack_tokens, prefix_digest
from .records import Header
from .rooms import MARGINS, Rooms
from .workers import spread

_PIECE_BYTES: Final = 4 << 20


class Loaded(msgspec.Struct, frozen=True):
    """Restored caches, one for each layer, and the `token_count` tokens they encode (a prefix of the entry's)."""

    entry_id: str
    tokens: list[int]
    caches: list[Any]
    header: Header
    attachments: tuple[Any, ...] = ()

    @property
    def token_count(self) -> int:
        return len(self.tokens)


def load(
    rooms: Rooms,
    provider: CodecProvider,
    entry_id: str,
    length: int | None,
    model: Any,
    *,
    verify: bool = True,
    prefix: str = "",
) -> Loaded:
    """The caches of an entry, cut to `length` tokens (None: all). See Store.load for what is raised.

    prefix: prefixes.prefix_digest of those tokens, where the caller knows them.
    """
    row = rooms.index.entry(entry_id)
    if row is None:
        raise EntryGone("there is no such entry", entry_id=entry_id)
    try:
        loaded = _Loader(rooms, provider, entry_id, row, model).run(length, verify=verify, prefix=prefix)
    except CorruptEntry as error:
        _condemn(rooms, entry_id, row, error)
        raise
    rooms.index.touch(entry_id)
    return loaded


def prototypes(model: Any, layers: int) -> list[Any]:
    """One prototype cache a layer from what load() takes as model; Nones where there is none."""
    if model is None:
        return [None] * layers
    if isinstance(model, (list, tuple)):
        return list(model)
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    if hasattr(model, "layers"):
        from mlx_lm.models.cache import make_prompt_cache  # an extra: only a model of its needs it

        return list(make_prompt_cache(model))
    raise InvalidInput(
        "cannot make prototype caches from this",
        field="model",
        expected="an object with make_cache(), an mlx-lm model, a list of caches, or None",
        found=type(model).__name__,
    )


class _Loader:
    def __init__(self, rooms: Rooms, provider: CodecProvider, entry_id: str, row: EntryRow, model: Any) -> None:
        self.rooms = rooms
        self.provider = provider
        self.entry_id = entry_id
        self.row = row
        self.model = model
        self._scratch = Scratch()

    def run(self, length: int | None, *, verify: bool, prefix: str) -> Loaded:
        header = entries_.read_known(self.rooms, self.entry_id, self.row)
        count = len(header.tokens) if length is None else length
        if prefix and prefix_digest(pack_tokens(header.tokens), count) != prefix:
            hint = "The index is wrong; run `blockstore check --repair`."
            raise EntryGone("the entry does not begin with these tokens", entry_id=self.entry_id, hint=hint)
        entries = self._entries(header, count)
        protos = self._prototypes(header, entries)
        codecs = [self._codec(entry, proto) for entry, proto in zip(entries, protos, strict=True)]
        targets = placing.targets(entries)
        reads = list(placing.reads(header, targets))
        for read in reads:
            self.rooms.blocks.require(read.digest, read.size)
        layers = list(self._layers(entries, protos, codecs, targets))
        spread(reads, lambda read: self._read(read, verify), MARGINS.threads)
        caches = [codec.load(entry, arrays, proto) for entry, proto, codec, arrays in layers]
        return Loaded(self.entry_id, list(header.tokens[:count]), caches, header)

    def _entries(self, header: Header, count: int) -> list[HeaderEntry]:
        """The header entries, described as of `count` tokens."""
        total = len(header.tokens)
        if count == total:
            return list(header.caches)
        least = max(map(geometry.minimum_reusable, header.caches), default=0)
        possible = geometry.list_shortens(header.caches) and not header.attachments
        if not possible or not max(least, 1) <= count < total:
            raise InvalidInput(
                "the entry cannot be cut to that length",
                entry_id=self.entry_id,
                expected=f"{max(least, 1)} to {total} tokens" if possible else f"{total} tokens, all of it",
                found=count,
            )
        return [geometry.shortened(entry, count) for entry in header.caches]

    def _prototypes(self, header: Header, entries: Sequence[HeaderEntry]) -> list[Any]:
        if header.codec_provider not in (self.provider.id, *self.provider.reads):
            raise UnsupportedFormat(
                "the entry was written by another codec provider",
                entry_id=self.entry_id,
                expected=self.provider.id,
                found=header.codec_provider,
            )
        protos = prototypes(self.model, len(entries))
        if len(protos) != len(entries):
            raise self._mismatch("layers", len(protos), len(entries), "the model has another number of layers")
        return protos

    def _codec(self, entry: HeaderEntry, prototype: Any) -> Codec:
        try:
            codec = self.provider.for_entry(entry, prototype)
            codec.check_prototype(entry, prototype)
        except PrototypeMismatch as error:
            raise self._mismatch(error.field, error.expected, error.found, str(error)) from error
        except UnknownKind as error:
            raise UnsupportedFormat(str(error), entry_id=self.entry_id) from error
        except CodecError as error:
            raise InvalidInput(str(error), entry_id=self.entry_id) from error
        return codec

    def _mismatch(self, field: str, expected: object, found: object, message: str) -> IdentityMismatch:
        return IdentityMismatch(message, entry_id=self.entry_id, field=field, expected=expected, found=found)

    def _layers(
        self,
        entries: Sequence[HeaderEntry],
        protos: Sequence[Any],
        codecs: Sequence[Codec],
        targets: Sequence[Sequence[placing.Target]],
    ) -> Iterator[tuple[HeaderEntry, Any, Codec, list[Any]]]:
        """Allocate the arrays: what each layer's codec takes to load it."""
        by_leaf = iter(targets)
        for entry, proto, codec in zip(entries, protos, codecs, strict=True):
            own = [target for _ in leaves([entry]) for target in next(by_leaf)]
            for index, target in enumerate(own):
                target.allocate(codec.capacity(entry, index, proto))
            yield entry, proto, codec, [target.array for target in own]

    def _read(self, read: placing.Read, verify: bool) -> None:
        if read.whole:
            data = self._scratch.take(read.size)
            self.rooms.blocks.read(read.digest, data.data, verify=verify)
            read.place(data, 0)
            return
        data = self._scratch.take(min(read.size, _PIECE_BYTES))
        at = 0
        for piece in self.rooms.blocks.stream(read.digest, read.size, data.data, verify=verify):
            read.place(data[: len(piece)], at)
            at += len(piece)


def _condemn(rooms: Rooms, entry_id: str, row: EntryRow, error: CorruptEntry) -> None:
    """Drop an entry that cannot load, unless it is found whole again, or replaced, inside the transaction."""
    name = bytes.fromhex(str(error.digest)) if error.digest is not None else None

    def still_bad() -> bool:
        try:
            header = entries_.read_known(rooms, entry_id, row)
        except CorruptEntry:
            return True
        if name is None:
            return False
        return not rooms.blocks.is_whole(name, entries_.block_sizes(header)[name])

    # A store that cannot take the change now (full, busy, not ours to write) is still a miss, and judged next time.
    with contextlib.suppress(BlockstoreError, OSError):
        if rooms.index.condemn(entry_id, row, name, still_bad):
            rooms.finish_doomed([(entry_id, row.scope)])
