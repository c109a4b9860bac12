"""Pointer files: what stands under the name that a user gave to a prompt cache whose tensors are in a store.

A pointer is a safetensors file of metadata alone. It names an entry, which is pinned for it, and the store has a second
(hard) link to the file in files/<entry id>: the number of links says whether the user's name is still there, wherever
it was moved to. An entry whose pointer is gone loses its pin here, and goes as any other entry does.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from .errors import BlockstoreError, CorruptEntry, EntryGone, FileMissing, InvalidInput, UnsupportedFormat
from .fs import FileSystem
from .index_rows import EntryRow
from .layout import FILES_NAME
from .leases import is_id
from .rooms import Rooms
from .safetensors import MAX_JSON_BYTES, SUFFIX, encode, opened

_FORMAT: Final = "blockstore prompt cache"
_VERSION: Final = "1"
_SCHEME: Final = "file://"
_NAMED_CHARACTERS: Final = 32
# Why no second link is made: there is one, another file system, one without links, no right to, too many.
_NO_LINK: Final = (
    errno.EEXIST,
    errno.EXDEV,
    errno.EPERM,
    errno.EACCES,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
)


class Layer(msgspec.Struct, frozen=True, rename={"name": "class"}, omit_defaults=True):
    """The class of one layer's cache, with what its constructor was given; "" where the kind alone says it."""

    name: str = ""
    args: dict[str, int] = {}
    caches: tuple["Layer", ...] = ()


class Pointer(msgspec.Struct, frozen=True):
    """What a pointer file says: the store's root and the entry in it, the layers' classes, the user's metadata."""

    root: str
    entry_id: str
    layers: tuple[Layer, ...]
    metadata: dict[str, str]


# ---- the bytes


def encoded(pointer: Pointer) -> bytes:
    """Raises InvalidInput for metadata that no reader would take."""
    data = encode(
        {
            "format": _FORMAT,
            "version": _VERSION,
            # As a URI: a path may hold bytes that are no text.
            "store": Path(pointer.root).as_uri(),
            "entry": pointer.entry_id,
            "layers": msgspec.json.encode(pointer.layers).decode(),
            "metadata": msgspec.json.encode(pointer.metadata).decode(),
        }
    )
    if len(data) > MAX_JSON_BYTES:
        raise InvalidInput(
            "the metadata is too long", field="metadata", expected=f"≤ {MAX_JSON_BYTES} bytes", found=len(data)
        )
    return data


def decoded(metadata: Mapping[str, str], path: str) -> Pointer | None:
    """The pointer in a file's metadata; None for another sort of file. Raises CorruptEntry, UnsupportedFormat."""
    if metadata.get("format") != _FORMAT:
        return None
    if metadata.get("version") != _VERSION:
        hint = "A newer release of blockstore wrote it."
        found = metadata.get("version")
        raise UnsupportedFormat(
            "an unknown version", path=path, field="version", expected=_VERSION, found=found, hint=hint
        )
    try:
        root, entry_id = _path_of(metadata["store"]), metadata["entry"]
        layers = msgspec.json.decode(metadata["layers"], type=tuple[Layer, ...])
        texts = msgspec.json.decode(metadata["metadata"], type=dict[str, str])
    except (KeyError, msgspec.DecodeError, RecursionError) as error:
        raise CorruptEntry("not a sound pointer to a stored prompt cache", path=path, found=str(error)) from None
    if root is None or not is_id(entry_id):
        field, found = ("store", metadata["store"]) if root is None else ("entry", entry_id)
        raise CorruptEntry("not a sound pointer to a stored prompt cache", path=path, field=field, found=found)
    return Pointer(root, entry_id, layers, texts)


def namespace(path: str) -> str:
    """The ns of the entries that were saved under the name `path`: what listings show, and a scope of their own."""
    return Path(path).as_uri()


def _path_of(uri: str | None) -> str | None:
    if uri is None or not uri.startswith(_SCHEME + "/"):
        return None
    path = os.fsdecode(unquote_to_bytes(uri.removeprefix(_SCHEME)))
    return None if "\0" in path else path


# ---- the files


@contextlib.contextmanager
def new_file(fs: FileSystem, path: str, *, sync: bool) -> Iterator[tuple[int, str]]:
    """Descriptor and path of a file that gets the name `path` when the block ends well; otherwise none is left.

    Raises FileMissing, InvalidInput where no file can have that name.
    """
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):
        raise FileMissing("there is no such directory", path=folder, hint="Make it, or name another.")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise InvalidInput("something other than a file has that name", path=path, hint="Name another file.")
    temporary = os.path.join(folder, f".{name[:_NAMED_CHARACTERS]}.{secrets.token_hex(6)}.tmp{SUFFIX}")
    with fs.replacing(path, temporary, sync=sync) as fd:
        yield fd, temporary


def fill(rooms: Rooms, fd: int, temporary: str, pointer: Pointer) -> None:
    """Write a pointer to a new file, link the file, and pin its entry. Raises InvalidInput, EntryGone.

    The pin comes last, so that a process that dies before leaves an entry that may be evicted; and before the file has
    its name, so that no file ever names an entry that may be.
    """
    rooms.fs.write_all(fd, memoryview(encoded(pointer)))
    row = rooms.index.entry(pointer.entry_id)
    if row is None or not _hold(rooms, temporary, pointer.entry_id, _always):
        hint = "Save again."
        raise EntryGone("the entry was removed before its file was written", entry_id=pointer.entry_id, hint=hint)
    os.utime(fd, ns=(_written_ns(row), _written_ns(row)))


def keep(rooms: Rooms, path: str, entry_id: str) -> None:
    """The pointer at `path` was used: where no other file is known to hold its entry (it is a copy, say), it does.

    So does one whose entry lost its pin, which a lost index takes along.
    """

    def is_lost(row: EntryRow) -> bool:
        return _path_of(row.ns) is not None and (not row.pinned or _stands(rooms, entry_id, row) is False)

    row = rooms.index.entry(entry_id)
    if not rooms.index.read_only and row is not None and is_lost(row):
        _hold(rooms, path, entry_id, is_lost)


def _always(row: EntryRow) -> bool:
    return True


def _hold(rooms: Rooms, path: str, entry_id: str, wanted: Callable[[EntryRow], bool]) -> bool:
    """Link the pointer at `path`, where that can be done, and pin its entry, if that is there and `wanted` still.

    Links and pins change inside a transaction alone: there is no pin without a link that another process took away.
    """
    folder, link = os.path.join(rooms.layout.root, FILES_NAME), _link(rooms, entry_id)
    rooms.fs.make_dir(folder)
    with rooms.index.write() as books:
        row = books.entry(entry_id)
        if row is None or not wanted(row) or not _names(rooms.fs, path, entry_id):
            return False
        if not _stands(rooms, entry_id, row):
            _link_to(rooms.fs, path, link)
        books.pin(entry_id, pinned=True)
    if rooms.layout.durable:
        rooms.fs.sync_dir(folder)
    return True


def _link_to(fs: FileSystem, path: str, link: str) -> None:
    """Make `link` a second name of the file at `path`, in place of another's, where that can be done."""
    spare = link + ".new"  # that a link is gone tells more than a failure here should
    fs.unlink(spare)
    try:
        os.link(path, spare)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
    else:
        fs.rename(spare, link)
        fs.unlink(spare)  # there still where both were names of one file


def standing(fs: FileSystem, path: str) -> Pointer | None:
    """The pointer at `path`; None where there is none, or nothing that can be read."""
    try:
        with opened(fs, path) as (_, contents):
            return decoded(contents.metadata, path)
    except (BlockstoreError, OSError):
        return None


def replaced(rooms: Rooms, path: str, old: Pointer | None) -> None:
    """Another file has taken the name of the pointer `old`: unless that stands elsewhere, its entry loses its pin."""

    def is_gone(row: EntryRow | None) -> bool:
        stands = None if old is None else _stands(rooms, old.entry_id, row)
        # Without a link, what was saved under another name may still have that.
        return stands is False or (stands is None and row is not None and row.ns == namespace(path))

    if old is not None and is_gone(rooms.index.entry(old.entry_id)):
        _let_go(rooms, old.entry_id, is_gone)


def release(rooms: Rooms) -> list[str]:
    """Take the pin from every entry whose file is gone; the ids. Where no link tells, entries are left alone."""
    released = list[str]()
    if rooms.index.read_only:
        return released
    for entry_id in filter(is_id, list(rooms.fs.names(os.path.join(rooms.layout.root, FILES_NAME)))):

        def is_gone(row: EntryRow | None, entry_id: str = entry_id) -> bool:
            by_name = row is not None and _stands_by_name(rooms.fs, row.ns, entry_id)
            return _stands(rooms, entry_id, row) is False and not by_name

        if is_gone(rooms.index.entry(entry_id)) and _let_go(rooms, entry_id, is_gone):
            released.append(entry_id)
    return released


def _let_go(rooms: Rooms, entry_id: str, is_gone: Callable[[EntryRow | None], bool]) -> bool:
    """Take an entry's pin and its link, if its file is still gone now that nobody can link another."""
    with rooms.index.write() as books:
        row = books.entry(entry_id)
        if not is_gone(row):
            return False
        unpinned = row is not None and row.pinned and books.pin(entry_id, pinned=False)
        rooms.fs.unlink(_link(rooms, entry_id))
    return unpinned


def _stands(rooms: Rooms, entry_id: str, row: EntryRow | None) -> bool | None:
    """Whether the user still has a name for the file that names an entry; None where no link of ours tells."""
    link = _link(rooms, entry_id)
    try:
        status = os.lstat(link)
    except FileNotFoundError:
        return None
    if status.st_nlink == 1:
        return False
    # Who writes into the file in place, as mlx-lm does, writes into ours.
    untouched = row is not None and status.st_mtime_ns == _written_ns(row)
    return untouched or _names(rooms.fs, link, entry_id)


def _written_ns(row: EntryRow) -> int:
    """The time that a pointer gets: its entry's, so that one that was written into is seen without reading it."""
    return row.created_at_ms * 1_000_000


def _stands_by_name(fs: FileSystem, ns: str | None, entry_id: str) -> bool:
    """Whether a pointer to the entry stands where it was saved first, though it is not the file of then: a backup's."""
    path = _path_of(ns)
    return path is not None and _names(fs, path, entry_id)


def _names(fs: FileSystem, path: str, entry_id: str) -> bool:
    """Whether the file at `path` is a pointer to the entry; True where nobody can tell now."""
    try:
        with opened(fs, path) as (_, contents):
            found = decoded(contents.metadata, path)
    except (FileNotFoundError, NotADirectoryError, CorruptEntry):
        return False
    except (UnsupportedFormat, OSError):
        return True
    return found is not None and found.entry_id == entry_id


def _link(rooms: Rooms, entry_id: str) -> str:
    return os.path.join(rooms.layout.root, FILES_NAME, entry_id)
