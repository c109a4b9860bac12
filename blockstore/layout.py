"""The directory of a store: which name stands for what, and how a new one is made."""

import json
import os
import secrets
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from .blocks import Blocks
from .digest import HASHERS
from .environment import DATA_NAME
from .errors import InvalidInput, StoreBroken, UnsupportedFormat
from .fs import FileSystem
from .leases import Leases
from .limits import Limits
from .stamp import NAME as STAMP_NAME

FORMAT: Final = 1
CONFIG_NAME: Final = "store.json"
LOCK_NAME: Final = "store.lock"
TAG_NAME: Final = "CACHEDIR.TAG"
HEADER_SUFFIX: Final = ".mlxkv"
SCOPE_HEX_DIGITS: Final = 32
_CONFIG_LIMIT_BYTES: Final = 64 << 10
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
    def small_files(self) -> list[str]:
        return [os.path.join(self.root, name) for name in (CONFIG_NAME, LOCK_NAME, TAG_NAME, STAMP_NAME)]

    @property
    def durable(self) -> bool:
        return self.config.durability == "full"

    def header_path(self, scope: str, entry_id: str) -> str:
        return os.path.join(self.entries_folder, scope, entry_id + HEADER_SUFFIX)


def check_free(fs: FileSystem, root: str) -> None:
    """Raise unless a new store may be made in the directory `root`: empty, or left by a creation that was cut short."""
    ours = {*_FOLDERS, LOCK_NAME, TAG_NAME, CONFIG_NAME, STAMP_NAME}
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
                hint="Write it again: " + _text(StoreConfig(FORMAT, "blake3", 64, 1 << 20, "full")).decode().strip(),
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
    """Write store.json, which is what makes a directory a store; it appears whole or not at all."""
    check_config(config, root)
    path = os.path.join(root, CONFIG_NAME)
    temporary = os.path.join(root, f".{CONFIG_NAME}.{secrets.token_hex(8)}.tmp")
    fs.write_new(temporary, [_text(config)], sync=True)
    fs.rename(temporary, path)
    fs.sync_dir(root)


def _text(config: StoreConfig) -> bytes:
    return json.dumps(msgspec.to_builtins(config)).encode() + b"\n"


def read_config(fs: FileSystem, root: str) -> StoreConfig | None:
    """The store's configuration, or None where no store stands at `root`. Raises UnsupportedFormat, StoreBroken."""
    path = os.path.join(root, CONFIG_NAME)
    try:
        text = fs.read_file(path, _CONFIG_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        config = msgspec.json.decode(text, type=StoreConfig)
    except msgspec.DecodeError as error:
        raise _newer_or_broken(text, path, error) from error
    check_config(config, path)
    return config


def _newer_or_broken(text: bytes, path: str, error: Exception) -> Exception:
    try:
        raw: Any = msgspec.json.decode(text)
    except msgspec.DecodeError:
        raw = None
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
        return _newer(path, raw["format"])
    return StoreBroken(f"store.json cannot be read: {error}", path=path, hint="Restore it from its documentation.")


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
    if config.format != FORMAT:
        raise _newer(path, config.format)
    if config.block_hash not in HASHERS:
        raise InvalidInput("unknown block hash", path=path, expected=sorted(HASHERS), found=config.block_hash)
    if not 1 <= config.span <= 1 << 16 or config.span & (config.span - 1):
        raise InvalidInput("span must be a power of two up to 65536", path=path, found=config.span)
    if not 1 << 10 <= config.block_bytes <= 32 << 20:
        raise InvalidInput("block_bytes must be from 1 KiB to 32 MiB", path=path, found=config.block_bytes)


def open_layout(fs: FileSystem, root: str) -> Layout | None:
    """The store at `root`, or None. Raises StoreBroken where one of its directories is a link to somewhere else."""
    config = read_config(fs, root)
    if config is None:
        return None
    for name in _FOLDERS:
        path = os.path.join(root, name)
        if fs.is_directory(path) is False:
            raise StoreBroken(
                "something other than a directory stands in a directory's place", path=path,
                hint="What a store holds stays inside it: link its root, or mount a file system, instead.",
            )  # fmt: skip
    return Layout(root, config, fs)
