"""The directory of a store: which name stands for what, and how a new one is made."""

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from .blocks import Blocks
from .digest import HASHERS
from .environment import DATA_NAME
from .environment import LOCK_NAME as INDEX_LOCK_NAME
from .errors import InvalidInput, StoreBroken, UnsupportedFormat
from .fs import FileSystem, NotRegular
from .leases import Leases
from .limits import Limits
from .stamp import NAME as STAMP_NAME

FORMAT: Final = 1
CONFIG_NAME: Final = "store.json"
LOCK_NAME: Final = "store.lock"
TAG_NAME: Final = "CACHEDIR.TAG"
TURN_NAME: Final = "admission.lock"
FILES_NAME: Final = "files"  # made when a prompt cache file is first written
ROOT_VARIABLE: Final = "BLOCKSTORE_ROOT"
DEFAULT_ROOT: Final = "~/.cache/blockstore"
HEADER_SUFFIX: Final = ".mlxkv"
SCOPE_HEX_DIGITS: Final = 32
MOST_BLOCK_BYTES: Final = 32 << 20  # a block has up to twice as many, and a reader takes 64 MiB
_CONFIG_LIMIT_BYTES: Final = 64 << 10
_TEMPORARY: Final = re.compile(rf"\.{re.escape(CONFIG_NAME)}\.[0-9a-f]{{16}}\.tmp")
_FOLDERS: Final = ("blocks", "entries", "index", "leases", "quarantine")
_TAG: Final = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# This directory is a cache made by blockstore. Backup programs may leave it out.\n"
)

Durability = Literal["full", "none"]


class StoreConfig(msgspec.Struct, frozen=True, rename="camel"):
    """What a store is for good, as store.json says it. `span` in tokens, `block_bytes` the size that blocks aim at.

    The limits alone may change: the index has those in force, these serve a rebuild of the index.
    """

    format: int
    block_hash: str
    span: int
    block_bytes: int
    durability: Durability
    limits: Limits = Limits()


_LIMITS: Final = frozenset(field.encode_name for field in msgspec.structs.fields(Limits))
_DEFAULTS: Final = StoreConfig(FORMAT, "blake3", 64, 1 << 20, "full")


@dataclass(frozen=True)
class Layout:
    """Paths and rooms of one store."""

    root: str
    config: StoreConfig
    fs: FileSystem

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.fs, os.path.join(self.root, "blocks"), self.config.block_hash, self.quarantine_folder)

    @property
    def leases(self) -> Leases:
        return Leases(self.fs, os.path.join(self.root, "leases"), self.quarantine_folder)

    @property
    def index_folder(self) -> str:
        return os.path.join(self.root, "index")

    @property
    def entries_folder(self) -> str:
        return os.path.join(self.root, "entries")

    @property
    def quarantine_folder(self) -> str:
        return os.path.join(self.root, "quarantine")

    @property
    def lock_path(self) -> str:
        return os.path.join(self.root, LOCK_NAME)

    @property
    def data_path(self) -> str:
        return os.path.join(self.index_folder, DATA_NAME)

    @property
    def lock_paths(self) -> list[str]:
        index = os.path.join(self.index_folder, INDEX_LOCK_NAME)
        return [self.lock_path, os.path.join(self.root, TURN_NAME), index, index + ".turn"]

    @property
    def folders(self) -> list[str]:
        return [os.path.join(self.root, name) for name in _FOLDERS]

    @property
    def durable(self) -> bool:
        return self.config.durability == "full"

    def header_path(self, scope: str, entry_id: str) -> str:
        return os.path.join(self.entries_folder, scope, entry_id + HEADER_SUFFIX)


def check_free(fs: FileSystem, root: str) -> None:
    """Raise unless a new store may be made in the directory `root`: empty, or left by a creation that was cut short."""
    ours = {*_FOLDERS, FILES_NAME, LOCK_NAME, TAG_NAME, CONFIG_NAME, STAMP_NAME, TURN_NAME}
    strangers = sorted(name for name in set(fs.names(root)) - ours if not name.startswith("."))
    if strangers:
        raise InvalidInput(
            "the directory is not empty and is not a store",
            path=root,
            found=strangers[0],
            hint="Name a new or empty directory.",
        )
    for folder in ("entries", "blocks"):
        if next(iter(fs.names(os.path.join(root, folder))), None) is not None:
            raise StoreBroken(
                "store.json is missing from a store that holds something",
                path=os.path.join(root, CONFIG_NAME),
                hint=_hint(_DEFAULTS),
            )


def create(fs: FileSystem, root: str) -> None:
    """Make the directories of a new store; what a creation that was cut short left is used. store.json is still due."""
    for name in _FOLDERS:
        fs.make_dir(os.path.join(root, name))
    tag = os.path.join(root, TAG_NAME)
    fs.unlink(tag)
    fs.write_new(tag, [_TAG])
    # Nothing is in the store yet, so nothing is in an index that a cut short creation has begun.
    fs.unlink(os.path.join(root, "index", DATA_NAME))


def write_config(fs: FileSystem, root: str, config: StoreConfig) -> None:
    """Write store.json, which is what makes a directory a store; it appears whole or not at all.

    What stands in it that this release does not know stays.
    """
    check_config(config, root)
    path = os.path.join(root, CONFIG_NAME)
    temporary = os.path.join(root, f".{CONFIG_NAME}.{secrets.token_hex(8)}.tmp")
    try:
        found = _raw(fs.read_file(path, _CONFIG_LIMIT_BYTES))
    except FileNotFoundError:
        found = {}
    ours = msgspec.to_builtins(config)
    others = {name: value for name, value in _limits_in(found).items() if name not in _LIMITS}
    merged = {**found, **ours, "limits": {**others, **ours["limits"]}}
    fs.write_new(temporary, [json.dumps(merged).encode() + b"\n"], sync=True)
    fs.rename(temporary, path)
    fs.sync_dir(root)


def config_temporaries(fs: FileSystem, root: str) -> list[str]:
    """What write_config() has begun. Who changes limits holds the index meanwhile, who makes a store its lock."""
    return sorted(os.path.join(root, name) for name in fs.names(root) if _TEMPORARY.fullmatch(name))


def read_config(fs: FileSystem, root: str) -> StoreConfig | None:
    """The store's configuration, or None where no store stands at `root`.

    Raises UnsupportedFormat, StoreBroken; InvalidInput where none can stand.
    """
    path = os.path.join(root, CONFIG_NAME)
    try:
        text = fs.read_file(path, _CONFIG_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError, NotRegular) as error:
        _check_root(root)
        if isinstance(error, NotRegular):
            raise InvalidInput("something other than a file stands in the place of store.json", path=path) from error
        return None
    try:
        config = msgspec.json.decode(text, type=StoreConfig)
        check_config(config, path)
    except (msgspec.DecodeError, RecursionError, InvalidInput) as error:
        raise _newer_or_broken(text, path, error) from error
    return config


def _check_root(root: str) -> None:
    """Raise InvalidInput where something other than a directory stands at `root`, or above it."""
    path = root
    while not os.path.lexists(path):
        path = os.path.dirname(path) or "/"
    if not os.path.isdir(path):
        raise InvalidInput(
            "no store can be here, since this is no directory",
            path=path,
            hint="Name a directory, or a place for a new one.",
        )


def _newer_or_broken(text: bytes, path: str, error: Exception) -> Exception:
    raw = _raw(text)
    if isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
        return _newer(path, raw["format"])
    why, facts = (error.message, error.facts) if isinstance(error, InvalidInput) else (str(error), {})
    return StoreBroken(f"store.json cannot be used: {why}", hint=_hint(_mended(raw)), **{**facts, "path": path})


def _hint(config: StoreConfig) -> str:
    return "Write it again: " + json.dumps(msgspec.to_builtins(config))


def _raw(text: bytes) -> dict[str, Any]:
    """A text's JSON object; an empty one where it is anything else."""
    raw: Any = None
    with suppress(msgspec.DecodeError, RecursionError):
        raw = msgspec.json.decode(text)
    return raw if isinstance(raw, dict) else {}


def _limits_in(raw: dict[str, Any]) -> dict[str, Any]:
    limits = raw.get("limits")
    return limits if isinstance(limits, dict) else {}


def _mended(raw: dict[str, Any]) -> StoreConfig:
    """All that can be used of a broken configuration; defaults stand in for the rest."""
    mended = _DEFAULTS
    changes = [{name: value} for name, value in raw.items() if name != "limits"]
    changes += [{"limits": {name: value}} for name, value in _limits_in(raw).items()]
    for change in changes:
        built = msgspec.to_builtins(mended)
        built |= {**change, "limits": {**built["limits"], **change.get("limits", {})}}
        with suppress(msgspec.ValidationError, InvalidInput, UnsupportedFormat):
            found = msgspec.convert(built, StoreConfig)
            check_config(found, "")
            mended = found
    return mended


def _newer(path: str, found: object) -> UnsupportedFormat:
    return UnsupportedFormat(
        "the store was made by a newer release", path=path, expected=FORMAT, found=found, hint="Upgrade blockstore."
    )


def check_config(config: StoreConfig, path: str) -> None:
    """Raise InvalidInput for a choice that no store can have, UnsupportedFormat for a newer release's."""
    try:
        msgspec.convert(msgspec.to_builtins(config), StoreConfig)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"a choice for the store makes no sense: {error}", path=path) from error
    if config.format > FORMAT:
        raise _newer(path, config.format)
    if config.format != FORMAT:
        raise InvalidInput("there is no such format", path=path, expected=FORMAT, found=config.format)
    config.limits.changed(msgspec.structs.asdict(config.limits))  # which raises as for a caller
    if config.block_hash not in HASHERS:
        raise InvalidInput("unknown block hash", path=path, expected=sorted(HASHERS), found=config.block_hash)
    if not 1 <= config.span <= 1 << 16 or config.span & (config.span - 1):
        raise InvalidInput("span must be a power of two up to 65536", path=path, found=config.span)
    if not 1 << 10 <= config.block_bytes <= MOST_BLOCK_BYTES:
        raise InvalidInput("block_bytes must be from 1 KiB to 32 MiB", path=path, found=config.block_bytes)


def open_layout(fs: FileSystem, root: str) -> Layout | None:
    """The store at `root`, ready to be used, or None. Raises as find_layout; StoreBroken where a part is missing."""
    found = find_layout(fs, root)
    for path, why in misplaced(found) if found is not None else ():
        raise StoreBroken(f"a part of the store cannot be used: {why}", path=path)
    return found


def find_layout(fs: FileSystem, root: str) -> Layout | None:
    """The store at `root`, whatever is missing of it, or None.

    Raises StoreBroken where one of its directories is a link to somewhere else.
    """
    config = read_config(fs, root)
    if config is None:
        return None
    found = Layout(root, config, fs)
    for path in found.folders:
        if fs.is_directory(path) is False:
            raise StoreBroken(
                "something other than a directory stands in a directory's place", path=path,
                hint="What a store holds stays inside it: link its root, or mount a file system, instead.",
            )  # fmt: skip
    return found


def misplaced(found: Layout) -> Iterator[tuple[str, str]]:
    """Path and fault of each folder that is missing, and of each lock in whose place something else stands.

    quarantine/ may be missing: whoever has looked through it may delete it.
    """
    for path in found.folders:
        if path != found.quarantine_folder and found.fs.is_directory(path) is None:
            yield path, "the folder is missing"
    for path in found.lock_paths:
        if is_something_else(found.fs, path):
            yield path, "it is no file, so that it locks nothing"


def is_something_else(fs: FileSystem, path: str) -> bool:
    """True where something stands at `path` that is no regular file."""
    return fs.size_of(path) is None and fs.exists(path)
