"""Opening a store, or making one: configuration, the store lock, the cap that a new one gets."""

import os
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from . import environment, layout
from .errors import InvalidInput, StoreBusy
from .fs import FileSystem
from .index import Index
from .layout import Layout, StoreConfig
from .rooms import Deadline

_DEFAULTS: Final = StoreConfig(
    format=layout.FORMAT, block_hash="blake3", span=64, block_bytes=1 << 20, durability="full"
)
_LEAVE_FREE_BYTES: Final = 10 << 30
# A process that makes the store holds the lock for a moment, a repair for longer.
_CREATION_PATIENCE_S: Final = 2.0
_LEAST_CAP_BYTES: Final = 1 << 30


def open_or_create(
    fs: FileSystem, root: str, wanted: Mapping[str, Any], max_bytes: int | None, *, create: bool
) -> Layout:
    """The store at `root`. `wanted` names what the caller chose; None leaves a choice to the store.

    Raises InvalidInput where there is no store and create is False, or where a choice differs from the store's.
    """
    found = layout.open_layout(fs, root)
    if found is None:
        if not create:
            raise InvalidInput("there is no store here", path=root, hint="Name the root of a store, or create one.")
        found = _create(fs, root, wanted, max_bytes)
    for name, value in wanted.items():
        if value is not None and value != getattr(found.config, name):
            raise InvalidInput(
                f"the store was created with another {name}", path=root, field=name,
                expected=getattr(found.config, name), found=value, hint="It is chosen once, at creation.",
            )  # fmt: skip
    return found


def _create(fs: FileSystem, root: str, wanted: Mapping[str, Any], max_bytes: int | None) -> Layout:
    """Make the store, unless another process just did; both take the store lock for it."""
    chosen = {name: value for name, value in wanted.items() if value is not None}
    config = msgspec.structs.replace(_DEFAULTS, max_bytes=max_bytes or _default_cap(fs, root), **chosen)
    layout.create(fs, root, config)
    fd = fs.open_lock(os.path.join(root, "store.lock"))
    try:
        fs.lock(fd)
        made = layout.open_layout(fs, root)
        if made is not None:
            return made
        made = Layout(root, config, fs)
        env = environment.acquire(fs, made.index_folder, durable=made.durable)
        try:
            env.create()
            assert config.max_bytes is not None, "a new store always has a cap"
            Index(env, fs.allocation_unit(root)).set_max_bytes(config.max_bytes)
            if made.durable:
                fs.sync_dir(made.index_folder)
        finally:
            environment.release(env)
        layout.write_config(fs, root, config)
        return made
    finally:
        fs.close(fd)


def _default_cap(fs: FileSystem, root: str) -> int:
    free, total = fs.free_bytes(root)
    return max(min(total // 10, free - _LEAVE_FREE_BYTES), _LEAST_CAP_BYTES)


def hold_shared(fs: FileSystem, found: Layout) -> int:
    """Hold the store's lock shared for as long as the store is open: replacing the index needs it exclusive."""
    fd = fs.open_lock(found.lock_path)
    deadline = Deadline(_CREATION_PATIENCE_S)
    while not fs.try_lock(fd, exclusive=False):
        if deadline():
            fs.close(fd)
            raise StoreBusy("the store is being repaired", path=found.root, hint="Try again when the repair is done.")
        time.sleep(0.01)
    return fd
