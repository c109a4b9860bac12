"""mlx-lm's save_prompt_cache and load_prompt_cache, with the tensors in a store: equal blocks are kept once.

    from blockstore import load_prompt_cache, save_prompt_cache  # instead of mlx_lm.models.cache

The file that a save leaves is a pointer of a few hundred bytes to an entry that is pinned for it (see pointers).
docs/prompt-cache-files.md says what becomes of files that are moved, copied and deleted.
"""

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, overload

from kvcodecs.algebra import CodecError, SnapshotContext
from kvcodecs.entry import leaves
from kvcodecs.provider import default_provider

from . import mlx_lm_caches, moving, pointers
from .errors import BlockstoreError, EntryGone, FileMissing, InvalidInput
from .fs import FileSystem
from .identity import Identity
from .layout import DEFAULT_ROOT, ROOT_VARIABLE
from .meta import Meta
from .moving import Imported
from .pointers import Layer, Pointer
from .safetensors import SUFFIX, opened
from .store import Store

_log: Final = logging.getLogger(__name__)
# So that no two saves have equal tokens, by which the store would take one for the continuation of the other.
_RANDOM_TOKENS: Final = 8

_Path = str | os.PathLike[str]
_Store = Store | _Path | None


def save_prompt_cache(
    file_name: _Path, cache: Sequence[Any], metadata: dict[str, str] | None = None, *, store: _Store = None
) -> None:
    """Save the caches of a model's layers under `file_name`, as mlx_lm.models.cache.save_prompt_cache does.

    The tensors go into a store, where only blocks that are new are written; the file is a pointer to them. It takes its
    name when all is saved, and replaces a file of that name; ".safetensors" is added where it is missing.

    store: a Store, or the root of one, made if missing; default: BLOCKSTORE_ROOT, else ~/.cache/blockstore.
    metadata: names and texts, returned as they are.

    What no store holds (batch caches, caches that stand at different tokens, empty lists) mlx-lm writes to the file
    whole. Call on the thread that owns the caches; they are not changed. Raises InvalidInput, FileMissing (of the
    directory), StoreFull, StoreBusy, StoreBroken, NotPermitted, OSError: a file that had the name then still stands.
    """
    path = _target(file_name)
    texts = _checked(metadata)
    with _store(store) as opened_store:
        rooms = opened_store.rooms
        with _not_for_this_save():
            pointers.release(rooms)
        old = pointers.standing(rooms.fs, path)
        with pointers.new_file(rooms.fs, path, sync=rooms.layout.durable) as (fd, temporary):
            try:
                layers = _layers(cache)
                saved = opened_store.save(_tokens(opened_store, cache), cache, _identity(path))
            except InvalidInput as error:
                _save_whole(temporary, cache, texts, error)
            else:
                pointers.fill(rooms, fd, temporary, Pointer(opened_store.root, saved.entry_id, layers, texts))
        with _not_for_this_save():
            pointers.replaced(rooms, path, old)


@overload
def load_prompt_cache(
    file_name: _Path, return_metadata: Literal[False] = False, *, store: _Store = None
) -> list[Any]: ...
@overload
def load_prompt_cache(
    file_name: _Path, return_metadata: Literal[True], *, store: _Store = None
) -> tuple[list[Any], dict[str, str]]: ...


def load_prompt_cache(file_name: _Path, return_metadata: bool = False, *, store: _Store = None) -> Any:
    """New caches from a file of save_prompt_cache, or (caches, metadata) with return_metadata.

    Files that mlx-lm wrote are read too, those of 0.31 and earlier and those of 0.32 and later alike.

    store: where the entry is; default: the store that the file names, and where that is gone the one that
    save_prompt_cache would use. Call on the thread that is to own the caches. Raises FileMissing, EntryGone (the entry
    was removed), CorruptEntry, UnsupportedFormat, InvalidInput (mlx-lm is not installed), StoreBusy, StoreBroken,
    OSError.
    """
    fs, path = FileSystem(), _standing(file_name)
    try:
        with opened(fs, path) as (fd, contents):
            pointer = pointers.decoded(contents.metadata, path)
            if pointer is None:
                caches, metadata = mlx_lm_caches.load(fs, fd, contents, path, default_provider())
                return (caches, metadata) if return_metadata else caches
    except FileNotFoundError:
        hint = "save_prompt_cache writes it."
        raise FileMissing("there is no such prompt cache file", path=path, hint=hint) from None
    caches = _load(pointer, path, store)
    return (caches, pointer.metadata) if return_metadata else caches


def import_prompt_cache(store: Store, file_name: _Path, tokens: Any, identity: Identity) -> Imported:
    """Take a prompt cache file into the store as the entry of `tokens` under `identity`; the file stays as it is.

    Such a file names neither. An entry of equal identity and tokens is replaced only if the file is younger. Raises as
    load_prompt_cache and Store.save.
    """
    path = _standing(file_name)
    caches = load_prompt_cache(path)
    meta = Meta(
        model_id=identity.model_id,
        config_fingerprint=identity.config_fingerprint,
        tokenizer_hash=identity.tokenizer_hash,
        ns=identity.ns,
        created_at_ms=os.stat(path).st_mtime_ns // 1_000_000,
    )
    return moving.import_caches(store.rooms, store.provider, path, tokens, caches, meta)


def _not_for_this_save() -> contextlib.suppress:
    """Around what lets other files' entries go: where it fails now, a later save does it."""
    return contextlib.suppress(BlockstoreError, OSError)


# ---- names


def _target(file_name: _Path) -> str:
    """Where a file of that name goes: with mlx's suffix, through links."""
    name = _text(file_name)
    return os.path.realpath(name if name.endswith(SUFFIX) else name + SUFFIX)


def _standing(file_name: _Path) -> str:
    """Which file that name means: as it is, or with the suffix that a save added."""
    name = _text(file_name)
    return os.path.realpath(name if os.path.exists(name) or name.endswith(SUFFIX) else name + SUFFIX)


def _text(file_name: _Path) -> str:
    name: Any = os.fspath(file_name)
    if not isinstance(name, str) or not os.path.basename(name) or "\0" in name:
        raise InvalidInput("file_name must be the path of a file", field="file_name", found=file_name)
    return str(name)


def _checked(metadata: Any) -> dict[str, str]:
    texts = {} if metadata is None else metadata
    if not isinstance(texts, dict):
        raise InvalidInput("metadata must be a dict of texts", field="metadata", found=type(metadata).__name__)
    for name, value in texts.items():
        if not isinstance(name, str) or not isinstance(value, str):
            expected = "text for every name"
            raise InvalidInput(
                "metadata must be a dict of texts", field="metadata", expected=expected, found={name: value}
            )
        try:
            (name + value).encode()
        except UnicodeEncodeError:
            raise InvalidInput("metadata holds a lone surrogate", field="metadata", found={name: value}) from None
    return texts


# ---- stores


@contextlib.contextmanager
def _store(store: _Store, *, create: bool = True) -> Iterator[Store]:
    """The store that is meant; one that was opened here is closed again."""
    if isinstance(store, Store):
        yield store
    else:
        with Store(_default_root() if store is None else store, create=create) as opened_store:
            yield opened_store


def _default_root() -> str:
    return os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT


def _identity(path: str) -> Identity:
    """A scope for each name: no prompt finds these entries, and listings show where the file is."""
    return Identity(None, None, None, pointers.namespace(path))


def _layers(cache: Any) -> tuple[Layer, ...]:
    # Anything but a list is for the save to refuse.
    return tuple(map(mlx_lm_caches.layer_of, cache)) if isinstance(cache, Sequence) else ()


def _tokens(store: Store, caches: Any) -> list[int]:
    """As many tokens as the caches hold. Nobody told which, so they are like no others."""
    try:
        found = store.provider.snapshot(caches, SnapshotContext(1))
    except (CodecError, TypeError):  # the save says it better
        found = []
    count = max((leaf.offset for leaf in leaves(one.entry for one in found)), default=1)
    return [secrets.randbits(31) if number < _RANDOM_TOKENS else 0 for number in range(max(count, 1))]


def _save_whole(temporary: str, cache: Any, metadata: dict[str, str], why: InvalidInput) -> None:
    """Let mlx-lm write the file. Raises `why` the store does not hold the caches where mlx-lm cannot either."""
    if not isinstance(cache, Sequence) or not mlx_lm_caches.are_loadable(cache):
        raise why
    _log.info("a prompt cache is written whole: %s", why)
    try:
        sys.modules["mlx_lm.models.cache"].save_prompt_cache(temporary, cache, metadata)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise why from error


def _load(pointer: Pointer, path: str, store: _Store) -> list[Any]:
    """The caches of a pointer's entry, which is kept for the file at `path`."""
    model = [mlx_lm_caches.empty_cache(layer) for layer in pointer.layers]
    with _holder(pointer, path, store) as holder:
        caches: list[Any] = holder.load(pointer.entry_id, model).caches
        with contextlib.suppress(BlockstoreError, OSError):  # the caches are whole, whatever becomes of the file
            pointers.keep(holder.rooms, path, pointer.entry_id)
        return caches


@contextlib.contextmanager
def _holder(pointer: Pointer, path: str, store: _Store) -> Iterator[Store]:
    """The store that has a pointer's entry. Raises EntryGone."""
    default = os.path.abspath(os.path.expanduser(_default_root()))
    places: list[Any] = list(dict.fromkeys([pointer.root, default])) if store is None else [store]
    for place in places:
        with contextlib.ExitStack() as closing:
            try:
                holder = closing.enter_context(_store(place, create=False))
            except InvalidInput:  # no store is there
                continue
            if holder.rooms.index.entry(pointer.entry_id) is not None:
                yield holder
                return
    raise EntryGone(
        "the prompt cache that this file names is in no store",
        path=path,
        entry_id=pointer.entry_id,
        expected=[place.root if isinstance(place, Store) else place for place in places],
        hint="It was removed or damaged: make it anew. If the store was moved, name its root (store=, or "
        f"{ROOT_VARIABLE}).",
    )
