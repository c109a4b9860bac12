"""Files into a store, entries out of it: deduplicated on the way in, in mlx-bun's formats on the way out."""

import os
import threading
from collections.abc import Iterator, Sequence

import msgspec

from kvcodecs import geometry
from kvcodecs.algebra import FIRST_PROVIDER_ID, CodecProvider
from kvcodecs.entry import HeaderEntry, Slot, leaves

from . import cut, entries, monolith, placing, preparing, rows_files, saving
from .blocks import Blocks
from .buffers import ByteArray
from .errors import CorruptEntry, EntryGone, InvalidInput, UnsupportedFormat
from .files import DEFAULT_BLOCK_BYTES, FIRST_KINDS
from .fs import FileSystem
from .header_files import opened
from .identity import Identity
from .layout import HEADER_SUFFIX
from .meta import Meta
from .packing import Prepared, header_of
from .prefixes import pack_tokens
from .records import SEGMENTS_PROVIDER, Attachment, Header, scope_of
from .rooms import Rooms
from .rules import BLOCKS_VERSION
from .saving import Saved
from .sources import BlockSource, FileSource, beside

_CONV_AND_RECURRENT = 2


class Imported(msgspec.Struct, frozen=True):
    """What became of a file, and the entry that now stands for its identity and tokens.

    outcome: "imported"; "present", the store had it already; "superseded", the store has other caches of the same
    identity and tokens that were saved at the same time or later. saved: what the save did, if imported.
    """

    path: str
    outcome: str
    entry_id: str
    saved: Saved | None = None


def cache_files(paths: Sequence[str]) -> Iterator[str]:
    """The cache files named by `paths`: files as they are, directories searched for *.mlxkv, links not followed."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders.sort()
            for name in sorted(names):
                # A writer's temporaries begin with a dot; a crash may have left some.
                if name.endswith(HEADER_SUFFIX) and not name.startswith("."):
                    yield os.path.join(folder, name)


def import_file(rooms: Rooms, provider: CodecProvider, path: str) -> Imported:
    """Take a file of any version into the store, under the identity it names; the file stays as it is.

    Every tensor is compared with its hash. Safe to repeat. An entry of equal identity and tokens is replaced only by
    a file that was saved later. Raises CorruptEntry, UnsupportedFormat, StoreFull, OSError.
    """
    with opened(rooms.fs, path) as (fd, header):
        _check_usable(header, provider, path)
        ours = provider.reads_id(header.codec_provider)
        provider_id = provider.id if ours else str(header.codec_provider)
        known = _standing(rooms, header, provider_id)
        if known is not None:
            outcome, entry_id = known
            return Imported(path, outcome, entry_id)
        prepared = _prepared(rooms, fd, path, header, provider_id)
    saved = saving.commit(rooms, prepared)
    return Imported(path, "imported", saved.entry_id, saved)


def import_caches(
    rooms: Rooms, provider: CodecProvider, path: str, tokens: Sequence[int], caches: Sequence[object], meta: Meta
) -> Imported:
    """Take caches that were loaded from `path`, and encode `tokens`, into the store as import_file() takes a file.

    Raises InvalidInput where the caches do not encode the tokens, StoreFull, OSError.
    """
    config = rooms.layout.config
    prepared = preparing.prepare(
        provider, tokens, caches, meta, span=config.span, block_bytes=config.block_bytes, hash_name=config.block_hash
    )
    header = header_of(prepared, BLOCKS_VERSION, prepared.caches, prepared.attachments, created_at_ms=0)
    known = _standing(rooms, header, prepared.provider_id)
    if known is not None:
        outcome, entry_id = known
        return Imported(path, outcome, entry_id)
    saved = saving.commit(rooms, prepared)
    return Imported(path, "imported", saved.entry_id, saved)


def _check_usable(header: Header, provider: CodecProvider, path: str) -> None:
    """Refuse a file that no load would ever serve from: empty, without a provider's name, of a kind nobody reads."""
    if not header.tokens or not header.caches:
        raise UnsupportedFormat("the file holds no tokens or no caches", path=path)
    if header.codec_provider is not None and not header.codec_provider.strip():
        raise UnsupportedFormat("the codec provider has no name", path=path, field="codecProvider", found="")
    if provider.reads_id(header.codec_provider):
        known = {codec.kind for codec in provider.codecs}
        for entry in leaves(header.caches):
            if entry.kind not in known:
                raise UnsupportedFormat(
                    "no codec reads this kind", path=path, field="kind", expected=sorted(known), found=entry.kind
                )


def _standing(rooms: Rooms, header: Header, provider_id: str) -> tuple[str, str] | None:
    """(outcome, entry id) where an entry of equal identity and tokens stands in the way of a file."""
    scope = scope_of(header.model_id, header.config_fingerprint, header.tokenizer_hash, header.ns, provider_id)
    entry_id = rooms.index.find_equal(entries.equal_key(scope, pack_tokens(header.tokens)))
    if entry_id is None:
        return None
    try:
        outcome = _compared(header, entries.read_standing(rooms, entry_id))
    except (CorruptEntry, EntryGone):  # nobody can load it; the file takes its place
        return None
    return None if outcome is None else (outcome, entry_id)


def _prepared(rooms: Rooms, fd: int, path: str, header: Header, provider_id: str) -> Prepared:
    """What a snapshot would be, from a file; every byte is read and verified."""
    caches = tuple(geometry.live(_bare(entry)) for entry in header.caches)
    attachments = tuple(map(_bare_attachment, header.attachments))
    config = rooms.layout.config
    flat = [*leaves(caches), *placing.companions(attachments)]
    plan = cut.plan("segments", flat, config.span, config.block_bytes)
    return _as_prepared(header, provider_id, caches, attachments, plan, _file_views(rooms.fs, fd, path, header, flat))


def _as_prepared(
    header: Header,
    provider_id: str,
    caches: tuple[HeaderEntry, ...],
    attachments: tuple[Attachment, ...],
    plan: cut.CutPlan,
    views: dict[cut.Ref, ByteArray],
) -> Prepared:
    """A snapshot of what a header describes, in other words and cut anew; all else is the header's."""
    return Prepared(
        identity=Identity(header.model_id, header.config_fingerprint, header.tokenizer_hash, header.ns),
        provider_id=provider_id,
        tokens=pack_tokens(header.tokens),
        caches=caches,
        attachments=attachments,
        generation_checkpoint=header.generation_checkpoint,
        created_at_ms=header.created_at,
        plan=plan,
        views=views,
    )


def _compared(file: Header, standing: Header) -> str | None:
    """Why a file is not imported over an entry of equal identity and tokens; None where it is the newer one."""
    if file.created_at > standing.created_at:
        return None
    alike = [
        ([geometry.live(_bare(entry)) for entry in header.caches], list(map(_bare_attachment, header.attachments)))
        for header in (file, standing)
    ]
    same = alike[0] == alike[1] and file.created_at == standing.created_at
    return "present" if same else "superseded"


def export_entry(rooms: Rooms, entry_id: str, folder: str, layout: str, block_bytes: int = DEFAULT_BLOCK_BYTES) -> str:
    """Write an entry as a file that mlx-bun opens, named by its id, into `folder`; the file's path.

    layout: "monolith" or "rows" (blocks/ beside the file). Raises EntryGone, CorruptEntry, InvalidInput for caches of
    kinds that mlx-bun does not know, OSError.
    """
    if layout not in ("monolith", "rows"):
        raise InvalidInput("unknown layout", field="layout", expected=["monolith", "rows"], found=layout)
    header = entries.read_standing(rooms, entry_id)
    _check_provider(header, entry_id)
    caches = tuple(_first_kind(_bare(entry), entry_id) for entry in header.caches)
    attachments = tuple(map(_bare_attachment, header.attachments))
    flat = [*leaves(caches), *placing.companions(attachments)]
    targets = placing.targets(flat)
    source = BlockSource(rooms.blocks, header, targets)
    source.check()
    plan = cut.plan(layout, flat, 1, block_bytes)
    prepared = _as_prepared(header, FIRST_PROVIDER_ID, caches, attachments, plan, _host_views(targets))
    source.fill(verify=True)
    path = os.path.join(folder, entry_id + HEADER_SUFFIX)
    os.makedirs(folder, exist_ok=True)
    writer = monolith.write if layout == "monolith" else rows_files.write
    writer(rooms.fs, path, prepared, sync=True, stop=threading.Event())
    return path


def _file_views(
    fs: FileSystem, fd: int, path: str, header: Header, flat: Sequence[HeaderEntry]
) -> dict[cut.Ref, ByteArray]:
    """The tensors of a file in host memory, every byte verified."""
    targets = placing.targets(flat)
    source: BlockSource | FileSource
    if header.format_version == BLOCKS_VERSION:
        source = BlockSource(Blocks(fs, _blocks_of(path), header.block_hash or "sha256"), header, targets)
        source.check()
    else:
        source = FileSource(fs, fd, path, header, targets)
    views = _host_views(targets)
    source.fill(verify=True)
    return views


def _blocks_of(path: str) -> str:
    """blocks/ beside a header, or in the root of the store whose entries/ folder it stands in."""
    near = beside(path)
    scope, _ = os.path.split(os.path.abspath(path))
    in_store = os.path.join(os.path.dirname(os.path.dirname(scope)), "blocks")
    return near if os.path.isdir(near) or not os.path.isdir(in_store) else in_store


def _host_views(targets: Sequence[Sequence[placing.Target]]) -> dict[cut.Ref, ByteArray]:
    """Allocate every target in plain memory; views as a snapshot has them."""
    return {
        (leaf, index): target.allocate_host() for leaf, own in enumerate(targets) for index, target in enumerate(own)
    }


def _bare_slot(slot: Slot) -> Slot:
    return msgspec.structs.replace(slot, off=0, hash="", blocks=None, axis=None)


def _bare_attachment(attachment: Attachment) -> Attachment:
    return msgspec.structs.replace(attachment, tensors=tuple(map(_bare_slot, attachment.tensors)))


def _bare(entry: HeaderEntry) -> HeaderEntry:
    """The entry without a word of where its bytes are."""
    tensors, children = tuple(map(_bare_slot, entry.tensors)), tuple(map(_bare, entry.children))
    return msgspec.structs.replace(entry, tensors=tensors, children=children)


def _check_provider(header: Header, entry_id: str) -> None:
    """Raise InvalidInput where the kinds of an entry may mean something else than mlx-bun's of the same names."""
    known = (FIRST_PROVIDER_ID, SEGMENTS_PROVIDER)
    if (header.codec_provider or FIRST_PROVIDER_ID) not in known:
        raise InvalidInput(
            f"mlx-bun does not know the codec provider {header.codec_provider}",
            entry_id=entry_id,
            field="codec_provider",
            expected=known,
            found=header.codec_provider,
        )


def _first_kind(entry: HeaderEntry, entry_id: str) -> HeaderEntry:
    """The entry in a kind that mlx-bun knows. Two whole arrays are what it calls ssm."""
    if entry.kind in FIRST_KINDS and not entry.fields.get("keep"):
        return entry
    plain = not entry.fields.keys() & {"lengths", "leftPadding", "windowSize"}
    if entry.kind == "arrays" and entry.fields.get("slots") == [True] * _CONV_AND_RECURRENT and plain:
        return msgspec.structs.replace(entry, kind="ssm", fields={})
    what = f"{entry.kind} with keep" if entry.fields.get("keep") else entry.kind
    raise InvalidInput(
        f"mlx-bun has no cache of kind {what}",
        entry_id=entry_id,
        field="kind",
        expected=sorted(FIRST_KINDS),
        found=what,
    )
