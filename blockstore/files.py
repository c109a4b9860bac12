"""Cache files outside of a store: v3/v4 in one file, v5 with a blocks/ directory beside it, as mlx-bun has them."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

import msgspec

from kvcodecs.algebra import FIRST_PROVIDER_ID, CodecError, CodecProvider
from kvcodecs.entry import HeaderEntry, leaves
from kvcodecs.provider import default_provider

from . import monolith, preparing, rows_files
from .blocks import Blocks
from .errors import CorruptEntry, InvalidInput
from .fs import FileSystem
from .header_files import opened, read_header
from .identity import Identity
from .meta import Meta, expect_identity
from .packing import Prepared
from .placing import Target
from .records import Header
from .restoring import Loaded, Restore
from .rules import BLOCKS_VERSION
from .sources import BlockSource, FileSource, beside

Layout = Literal["monolith", "rows"]
T = TypeVar("T")
RunStep = Callable[[Callable[[], T]], Awaitable[T]]

DEFAULT_BLOCK_BYTES: Final = 1 << 20
# The kinds that readers of `mlx-cache-v3` know (FORMAT 5).
FIRST_KINDS: Final = frozenset(
    ["kv", "rotating", "qkv", "rotating-qkv", "ssm", "turboquant", "mla", "mla-dsa", "mtp-mla", "paged"]
)


class SavedFile(msgspec.Struct, frozen=True):
    """What was written: the file, its layout, the bytes of all tensors, and the bytes that reached the disk."""

    path: str
    layout: str
    token_count: int
    logical_bytes: int
    written_bytes: int


def save_kv_cache(
    path: str | os.PathLike[str],
    tokens: Sequence[int] | Any,
    caches: Sequence[object],
    meta: Meta | None = None,
    *,
    layout: Layout = "monolith",
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    provider: CodecProvider | None = None,
    sync: bool = True,
) -> SavedFile:
    """Write `caches`, which encode exactly `tokens`, to one file.

    layout: "monolith", a v3 file (v4 with attachments); or "rows", a v5 header whose blocks of `block_bytes` lie in
    blocks/ beside it, shared with the other files there. The file appears under its name when it is whole; a file of
    that name is replaced. Raises InvalidInput (nothing written) and OSError (nothing left).
    """
    prepared = _prepare(tokens, caches, meta, layout, block_bytes, provider or default_provider())
    return _write(os.fspath(path), prepared, layout, sync, threading.Event())


def load_kv_cache(
    path: str | os.PathLike[str],
    model: Any = None,
    expect: Identity | Meta | None = None,
    *,
    length: int | None = None,
    verify: bool | None = None,
    provider: CodecProvider | None = None,
) -> Loaded:
    """New cache objects from a file of any version, cut to `length` tokens; model as in Store.load.

    expect: each of its identity fields that is not None must equal the file's. verify: compare tensor bytes with their
    hashes; default: v5 yes, v3/v4 no, since theirs are slow to compute. Raises CorruptEntry, UnsupportedFormat,
    IdentityMismatch, InvalidInput, OSError (FileNotFoundError).
    """
    load = _Load(os.fspath(path), expect, provider or default_provider())
    try:
        load.read_header()
        load.allocate(model, length)
        load.fill(verify)
    finally:
        load.close()
    return load.finish()


def read_kv_header(path: str | os.PathLike[str]) -> Header:
    """The header of a file of any version, fully checked; no tensor is read. Raises as load_kv_cache()."""
    return read_header(FileSystem(), os.fspath(path))


def clone_kv_caches(caches: Sequence[object], provider: CodecProvider | None = None) -> list[Any]:
    """New caches that share the arrays' memory: going on with either list leaves the other as it was.

    Meta.clone() does it for attachments. Raises InvalidInput for a cache that no codec handles or can clone.
    """
    if not isinstance(caches, Sequence):
        raise InvalidInput("caches must be a list, one for each layer", field="caches", found=type(caches).__name__)
    try:
        return (provider or default_provider()).clone(caches)
    except CodecError as error:
        raise InvalidInput(str(error), field="caches") from error


async def save_kv_cache_async(
    path: str | os.PathLike[str],
    tokens: Sequence[int] | Any,
    caches: Sequence[object],
    meta: Meta | None = None,
    *,
    run_step: "RunStep[Prepared] | None" = None,
    layout: Layout = "monolith",
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    provider: CodecProvider | None = None,
    sync: bool = True,
) -> SavedFile:
    """save_kv_cache() for a server. The snapshot is taken inside `run_step`, hashing and writing on another thread.

    run_step: awaited with a function to call, on the thread that owns the caches and while nothing else uses them;
    default: call it here. Where it raises or is cancelled nothing was begun. Cancelled later, this waits until the
    writer has stopped: nothing is left of the file, unless it was whole by then. With layout="rows", blocks that were
    whole stay in blocks/; no header names them, and another writer may have taken them over.
    """
    chosen = provider or default_provider()
    prepared = await (run_step or _here)(lambda: _prepare(tokens, caches, meta, layout, block_bytes, chosen))
    stop = threading.Event()
    return await _elsewhere(lambda: _write(os.fspath(path), prepared, layout, sync, stop), stop)


async def load_kv_cache_async(
    path: str | os.PathLike[str],
    model: Any = None,
    expect: Identity | Meta | None = None,
    *,
    run_step: "RunStep[Any] | None" = None,
    length: int | None = None,
    verify: bool | None = None,
    provider: CodecProvider | None = None,
) -> Loaded:
    """load_kv_cache() for a server: arrays are made and wrapped inside `run_step`, the file is read on other threads.

    run_step is awaited twice, as in save_kv_cache_async. Where it raises or is cancelled nothing is left.
    """
    step = run_step or _here
    load = _Load(os.fspath(path), expect, provider or default_provider())
    try:
        await _elsewhere(load.read_header, threading.Event())
        await step(lambda: load.allocate(model, length))
        stop = threading.Event()
        await _elsewhere(lambda: load.fill(verify, stop), stop)
        loaded: Loaded = await step(load.finish)
    finally:
        load.close()
    return loaded


class _Load:
    """One load, step by step: allocate() and finish() on the caller's thread, the others on any."""

    def __init__(self, path: str, expect: Identity | Meta | None, provider: CodecProvider) -> None:
        self._fs = FileSystem()
        self._path = path
        self._expect = expect
        self._provider = provider
        self._closing = ExitStack()

    def read_header(self) -> None:
        self._fd, self._header = self._closing.enter_context(opened(self._fs, self._path))
        expect_identity(self._header, self._expect, self._path)

    def allocate(self, model: Any, length: int | None) -> None:
        """Make the arrays, after everything about the file but its bytes was found to fit."""
        self._restore = Restore(self._header, self._provider, model, length, path=self._path)
        self._source = self._source_of(self._restore.targets)
        self._restore.allocate()

    def fill(self, verify: bool | None, stop: threading.Event | None = None) -> None:
        """Read the bytes; verify=None: compare them with their hashes where that costs little."""
        chosen = isinstance(self._source, BlockSource) if verify is None else bool(verify)
        self._source.fill(verify=chosen, stop=stop)

    def finish(self) -> Loaded:
        return self._restore.loaded()

    def close(self) -> None:
        self._closing.close()

    def _source_of(self, targets: Sequence[Sequence[Target]]) -> BlockSource | FileSource:
        header = self._header
        if header.format_version != BLOCKS_VERSION:
            return FileSource(self._fs, self._fd, self._path, header, targets)
        directory = beside(self._path)
        if os.path.islink(directory):
            raise CorruptEntry("blocks/ is a symbolic link, which is not followed", path=directory)
        source = BlockSource(Blocks(self._fs, directory, header.block_hash or "sha256"), header, targets)
        source.check()
        return source


def provider_id(caches: Sequence[HeaderEntry], provider: CodecProvider) -> str:
    """What a file names as its codec provider: the first one's id where its readers know all of it."""
    if FIRST_PROVIDER_ID not in provider.reads:
        return provider.id
    known = all(entry.kind in FIRST_KINDS and not entry.fields.get("keep") for entry in leaves(caches))
    nested = any(entry.children for entry in caches)
    return FIRST_PROVIDER_ID if known and not nested else provider.id


def _prepare(
    tokens: Sequence[int] | Any,
    caches: Sequence[object],
    meta: Meta | None,
    layout: str,
    block_bytes: int,
    provider: CodecProvider,
) -> Prepared:
    if layout not in ("monolith", "rows"):
        raise InvalidInput("unknown layout", field="layout", expected=["monolith", "rows"], found=layout)
    if type(block_bytes) is not int or block_bytes < 1:
        raise InvalidInput("block_bytes must be a positive number", field="block_bytes", found=block_bytes)
    prepared = preparing.prepare(
        provider, tokens, caches, meta or Meta(), span=1, block_bytes=block_bytes, layout=layout
    )
    return replace(prepared, provider_id=provider_id(prepared.caches, provider))


def _write(path: str, prepared: Prepared, layout: str, sync: bool, stop: threading.Event) -> SavedFile:
    fs = FileSystem()
    writer = monolith.write if layout == "monolith" else rows_files.write
    written = writer(fs, path, prepared, sync=sync, stop=stop)
    return SavedFile(path, layout, len(prepared.tokens) // 4, prepared.logical_bytes, written)


async def _here(work: Callable[[], T]) -> T:
    return work()


async def _elsewhere(work: Callable[[], T], stop: threading.Event) -> T:
    """Run `work` on a thread of its own. Cancelled meanwhile: ask it to stop, and wait until the thread has ended."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # carried to the loop, whatever it is
            loop.call_soon_threadsafe(_settle, done, None, error)
        else:
            loop.call_soon_threadsafe(_settle, done, result, None)

    thread = threading.Thread(target=run, name="blockstore-file")
    thread.start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        stop.set()
        await _ended(done)
        raise
    finally:
        thread.join()


async def _ended(done: "asyncio.Future[Any]") -> None:
    """Wait for `done`, however often the task is cancelled meanwhile: joining a busy thread would stop the loop."""
    while not done.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([done])
    if not done.cancelled():
        done.exception()  # seen: what a cancelled write raised is not news


def _settle(done: "asyncio.Future[Any]", result: object, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
