"""Opening a store, or making one: configuration, the store lock, the cap that a new one gets."""

import errno
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from . import environment, layout
from .errors import BlockstoreError, InvalidInput, NotPermitted, StoreBusy, StoreFull
from .fs import FileSystem, is_full
from .index import Index
from .layout import Layout, StoreConfig
from .limits import Limits
from .rooms import Deadline

_DEFAULTS: Final = StoreConfig(
    format=layout.FORMAT, block_hash="blake3", span=64, block_bytes=1 << 20, durability="full"
)
_LEAVE_FREE_BYTES: Final = 10 << 30
# A process that makes the store holds its lock for a moment; on a slow disk for longer. A repair takes minutes.
_CREATION_PATIENCE_S: Final = 10.0
_REPAIR_PATIENCE_S: Final = 2.0
_NETWORK: Final = frozenset(
    ["afs", "beegfs", "ceph", "cifs", "glusterfs", "lustre", "nfs", "nfs4", "rclone", "s3fs", "smb3", "smbfs", "sshfs"]
)
_LEAST_CAP_BYTES: Final = 1 << 30


def open_or_create(
    fs: FileSystem, root: str, wanted: Mapping[str, Any], max_bytes: int | None, *, create: bool
) -> Layout:
    """The store at `root`. `wanted` names what the caller chose; None leaves a choice to the store.

    Raises InvalidInput where there is no store and create is False, or where a choice differs from the store's.
    """
    kind = fs.file_system_type(root)
    if kind is not None and kind.removeprefix("fuse.") in _NETWORK:
        raise InvalidInput(
            "a store cannot live on a network file system, whose locks and maps do not hold between hosts",
            path=root,
            found=kind,
            hint="Name a directory on a local disk.",
        )
    found = _opened(fs, root)
    if found is None:
        if not create:
            raise InvalidInput("there is no store here", path=root, hint="Name the root of a store, or create one.")
        found = _created(fs, root, wanted, max_bytes)
    for name, value in wanted.items():
        if value is not None and value != getattr(found.config, name):
            raise InvalidInput(
                f"the store was created with another {name}", path=root, field=name,
                expected=getattr(found.config, name), found=value, hint="It is chosen once, at creation.",
            )  # fmt: skip
    return found


def _opened(fs: FileSystem, root: str) -> Layout | None:
    try:
        return layout.open_layout(fs, root)
    except PermissionError as error:
        hint = "Ask the owner of the directory for the right to read there."
        raise NotPermitted("the store may not be read", path=error.filename or root, hint=hint) from error


def _created(fs: FileSystem, root: str, wanted: Mapping[str, Any], max_bytes: int | None) -> Layout:
    try:
        return _create(fs, root, wanted, max_bytes)
    except OSError as error:
        if isinstance(error, BlockstoreError):
            raise
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "Name a directory that you may write."
            raise NotPermitted("a store may not be made here", path=error.filename or root, hint=hint) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
            hint = "Name a directory, or a place for a new one."
            raise InvalidInput("a store cannot be made here", path=error.filename or root, hint=hint) from error
        raise


def is_read_only(fs: FileSystem, found: Layout, wanted: bool | None) -> bool:
    """How to open the store: as wanted, or else for reading only where this process may not write to it.

    Raises NotPermitted where writing is wanted and not possible.
    """
    if wanted:
        return True
    paths = [found.root, found.index_folder, os.path.join(found.index_folder, environment.DATA_NAME)]
    refused = next((path for path in paths if fs.exists(path) and not fs.is_writable(path)), None)
    if refused is not None and wanted is False:
        hint = "Open it with read_only=True, or ask its owner for the right to write there."
        raise NotPermitted("the store may not be written", path=refused, hint=hint)
    return refused is not None


def _create(fs: FileSystem, root: str, wanted: Mapping[str, Any], max_bytes: int | None) -> Layout:
    """Make the store, unless another process just did: both hold the store lock while they look and make."""
    chosen = {name: value for name, value in wanted.items() if value is not None}
    limits = Limits(max_bytes=max_bytes or _default_cap(fs, root))
    config = msgspec.structs.replace(_DEFAULTS, limits=limits, **chosen)
    layout.check_config(config, root)
    os.makedirs(os.path.dirname(root), exist_ok=True)
    fs.make_dir(root)
    layout.check_free(fs, root)
    fd = fs.open_lock(os.path.join(root, layout.LOCK_NAME))
    try:
        made = _await_turn(fs, fd, root)
        if made is not None:
            return made
        layout.check_free(fs, root)
        layout.create(fs, root)
        _create_index(Layout(root, config, fs))
        layout.write_config(fs, root, config)
        return Layout(root, config, fs)
    except OSError as error:
        if is_full(error):
            raise StoreFull("no space is left for a new store", path=root) from error
        raise
    finally:
        fs.close(fd)


def _await_turn(fs: FileSystem, fd: int, root: str) -> Layout | None:
    """Hold the store lock, or return the store that another process has made: it may keep the lock, shared."""
    deadline = Deadline(_CREATION_PATIENCE_S)
    while not fs.try_lock(fd, exclusive=True):
        made = layout.open_layout(fs, root)
        if made is not None:
            return made
        if deadline():
            raise StoreBusy("another process is making the store", path=root)
        time.sleep(0.01)
    return layout.open_layout(fs, root)


def _create_index(made: Layout) -> None:
    env = environment.acquire(made.fs, made.index_folder, durable=made.durable)
    try:
        env.create()
        limits = msgspec.structs.asdict(made.config.limits)
        Index(env, made.fs.allocation_unit(made.root)).set_limits(limits)
        if made.durable:
            made.fs.sync_dir(made.index_folder)
    finally:
        environment.release(env)


def _default_cap(fs: FileSystem, root: str) -> int:
    free, total = fs.free_bytes(root)
    return max(min(total // 10, free - _LEAVE_FREE_BYTES), _LEAST_CAP_BYTES)


def hold_shared(fs: FileSystem, found: Layout) -> int:
    """Hold the store's lock shared for as long as the store is open: replacing the index needs it exclusive."""
    fd = fs.open_lock(found.lock_path)
    deadline = Deadline(_REPAIR_PATIENCE_S)
    while not fs.try_lock(fd, exclusive=False):
        if deadline():
            fs.close(fd)
            raise StoreBusy("the store is being repaired", path=found.root, hint="Try again when the repair is done.")
        time.sleep(0.01)
    return fd
