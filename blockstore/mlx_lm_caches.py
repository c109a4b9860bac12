"""mlx-lm's caches by class: from the files that mlx-lm writes, and empty ones as patterns for what a store loads.

mlx-lm has written two kinds of files. Until 0.31 their metadata is [what `meta_state` says of each cache, the user's,
the classes]; since 0.32 it is [the user's, the classes, which tensors stand for scalars, texts and None], and all is in
`state`. Both are read here with either release, by a table of classes: no name from a file is looked up anywhere else.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvcodecs.algebra import CodecError, CodecProvider, SnapshotContext
from kvcodecs.backend import mx
from kvcodecs.codec import ClassRef
from kvcodecs.composed import is_composed

from .buffers import unfilled, writable_views
from .errors import CorruptEntry, InvalidInput, UnsupportedFormat
from .fs import FileSystem
from .pointers import Layer
from .safetensors import Contents

_MODULE: Final = "mlx_lm.models.cache"
_LIST: Final = "CacheList"
_ARRAYS: Final = ("ArraysCache", "MambaCache")  # the second is what it was called once
_BATCHES: Final = ("BatchKVCache", "BatchRotatingKVCache")
_MAX_DEPTH: Final = 16
_MAX_ITEMS: Final = 1 << 16
_MAX_NAME: Final = 64
_RANK: Final = 4
_MAX_NUMBER: Final = (1 << 31) - 1  # MLX slices with no larger ones


@dataclass(frozen=True)
class _Class:
    """given: what the constructor takes. state: the attributes in `state` since 0.32; meta: in `meta_state` before."""

    module: str = _MODULE
    given: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    meta: tuple[str, ...] = ()


_CLASSES: Final = {
    "KVCache": _Class(state=("keys", "values", "offset")),
    "ConcatenateKVCache": _Class(state=("keys", "values")),
    "RotatingKVCache": _Class(
        given=("max_size", "keep"),
        state=("keys", "values", "offset", "keep", "max_size", "_idx"),
        meta=("keep", "max_size", "offset", "_idx"),
    ),
    "QuantizedKVCache": _Class(
        given=("group_size", "bits"),
        state=("keys", "values", "offset", "group_size", "bits"),
        meta=("offset", "group_size", "bits"),
    ),
    "ChunkedKVCache": _Class(
        given=("chunk_size",),
        state=("keys", "values", "offset", "chunk_size", "start_position"),
        meta=("chunk_size", "start_position"),
    ),
    "LayerCache": _Class(module="mlx_lm.models.deepseek_v41", given=("window_size",)),
}


# ---- empty caches, for pointers


def layer_of(cache: Any) -> Layer:
    """What makes an empty cache like this one; without a name where it is no class of mlx-lm's.

    Raises InvalidInput for a composed cache: nobody but a model could compose it again.
    """
    if is_composed(cache):
        hint = "Save what it is composed over, cache.storage(), or use Store.save, and load with the model."
        raise InvalidInput("a composed cache cannot come back from a file", field="cache", found=type(cache), hint=hint)
    name, module = type(cache).__name__, type(cache).__module__
    if module == _MODULE and name == _LIST:
        return Layer(name, caches=tuple(map(layer_of, cache.caches)))
    if module == _MODULE and name == _ARRAYS[0]:
        return Layer(name, {"size": len(cache.cache)})
    known = _CLASSES.get(name)
    if known is None or known.module != module:
        return Layer()
    return Layer(name, {attribute: getattr(cache, attribute) for attribute in known.given})


def empty_cache(layer: Layer) -> Any:
    """A new cache as `layer` says; None where it names no class. Raises InvalidInput where mlx-lm is missing."""
    if not layer.name:
        return None
    if layer.name == _LIST:
        return _imported(_LIST)(*map(empty_cache, layer.caches))
    known = _Class(given=("size",)) if layer.name == _ARRAYS[0] else _CLASSES.get(layer.name)
    if known is None:
        hint = "A newer release of blockstore wrote it."
        raise UnsupportedFormat("an unknown cache class", field="class", found=layer.name, hint=hint)
    if set(layer.args) != set(known.given) or layer.args.get("size", 0) > _MAX_ITEMS:
        raise CorruptEntry("not how a cache is made", field=layer.name, expected=list(known.given), found=layer.args)
    return _imported(layer.name, known.module)(**layer.args)


def _imported(name: str, module: str = _MODULE) -> type[Any]:
    try:
        return ClassRef(module, name).imported()
    except CodecError as error:
        raise InvalidInput(str(error), field="class", found=name) from error


def are_loadable(caches: Sequence[Any]) -> bool:
    """Whether mlx-lm itself loads what it saves of these: it knows the classes of one module alone."""
    module = sys.modules.get(_MODULE)
    return all(
        module is not None
        and getattr(module, type(cache).__name__, None) is type(cache)
        and are_loadable(getattr(cache, "caches", ()))
        for cache in caches
    )


# ---- files of mlx-lm's


def load(
    fs: FileSystem, fd: int, contents: Contents, path: str, provider: CodecProvider
) -> tuple[list[Any], dict[str, Any]]:
    """Caches and metadata of a prompt cache file that mlx-lm wrote.

    Raises CorruptEntry, UnsupportedFormat, InvalidInput where mlx-lm is missing, OSError.
    """
    file = _File(path, contents)
    arrays = _read(fs, fd, contents, path)
    caches = [file.cache(name, layer) for name, layer in file.layers(arrays)]
    file.check(caches, provider)
    return caches, file.metadata


def _read(fs: FileSystem, fd: int, contents: Contents, path: str) -> dict[str, mx.array]:
    tensors = list(contents.tensors.values())
    arrays = unfilled([(tensor.shape, tensor.dtype) for tensor in tensors])
    for tensor, view in zip(tensors, writable_views(arrays), strict=True):
        if view.size:
            data = view.reshape(-1).view(np.uint8).data
            if (count := fs.read_into(fd, data, tensor.offset)) < tensor.size:
                size = tensor.offset + tensor.size
                raise CorruptEntry(
                    "the file was cut short meanwhile", path=path, expected=size, found=tensor.offset + count
                )
    return dict(zip(contents.tensors, arrays, strict=True))


class _File:
    """One file, after its header was read."""

    def __init__(self, path: str, contents: Contents) -> None:
        self._path = path
        self._names = contents.tensors
        parts = self._tree(contents.metadata)
        parts = parts if isinstance(parts, dict) else dict(enumerate(parts))
        found = {str(number): part for number, part in parts.items()}
        if set(found) - {"0", "1", "2"} or not isinstance(found.get("2"), list):
            raise self._corrupt("metadata", "that of a prompt cache of mlx-lm's", sorted(found)[:4])
        self._in_state = found["2"][0] == ""
        user, classes = ("0", "1") if self._in_state else ("1", "2")
        self._marks = found["2"][1:] if self._in_state else []
        self._info = [] if self._in_state else found.get("0", [])
        self._classes = found.get(classes, [])
        self.metadata: dict[str, Any] = found.get(user, {})
        if isinstance(self.metadata, str):
            raise self._corrupt("metadata", "names and texts", self.metadata)

    def layers(self, arrays: dict[str, mx.array]) -> list[tuple[Any, Any]]:
        """The class and the saved state of each cache, as (class, state) or (class, (state, meta))."""
        states = self._tree(self._unmarked(arrays)) or []
        if not isinstance(states, list) or not isinstance(self._classes, list) or len(states) != len(self._classes):
            raise self._corrupt("classes", "one for each cache", self._classes)
        if self._in_state:
            return list(zip(self._classes, states, strict=True))
        if not isinstance(self._info, list) or len(self._info) != len(states):
            raise self._corrupt("meta_state", "one for each cache", self._info)
        return list(zip(self._classes, zip(states, self._info, strict=True), strict=True))

    def cache(self, name: Any, saved: Any) -> Any:
        """A new cache of class `name`."""
        if name == _LIST:
            return self._list(saved)
        if name in _BATCHES:
            return self._batch(name, saved)
        if name in _ARRAYS:
            return self._arrays(saved)
        known = _CLASSES.get(name) if isinstance(name, str) else None
        if known is None or not known.state:
            raise UnsupportedFormat(
                "a cache class that mlx-lm does not load", path=self._path, field="class",
                expected=[*_CLASSES, _LIST, *_ARRAYS, *_BATCHES], found=name,
            )  # fmt: skip
        values = self._values(name, known, saved)
        if name == "ChunkedKVCache" and values["keys"] is not None:
            # Until 0.31 its front is dropped by rows, whether they hold tokens or not.
            live = max(values["offset"] - values["start_position"], 0)
            values |= {side: values[side][..., :live, :] for side in ("keys", "values")}
        cache = _imported(name)(**{attribute: values[attribute] for attribute in known.given})
        for attribute, value in values.items():
            setattr(cache, attribute, value)
        return cache

    def check(self, caches: Sequence[Any], provider: CodecProvider) -> None:
        """Raise CorruptEntry where a cache's numbers and arrays do not fit: no step of a model could use it."""
        for number, cache in enumerate(caches):
            if type(cache).__name__ in _BATCHES:
                continue
            if hasattr(cache, "caches"):
                self.check(cache.caches, provider)
                continue
            try:
                provider.snapshot([cache], SnapshotContext(1))
            except (CodecError, ValueError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
                raise self._corrupt(f"cache {number}", "arrays and numbers that fit", str(error)) from None

    # ---- classes

    def _values(self, name: str, known: _Class, saved: Any) -> dict[str, Any]:
        """The attributes of a cache with keys and values."""
        if self._in_state:
            values: dict[str, Any] = dict(zip(known.state, self._items(saved, len(known.state), name), strict=True))
        else:
            state, meta = saved
            values = dict(zip(("keys", "values"), self._items(state, 2, name), strict=True))
            numbers = self._items(meta, len(known.meta), name) if known.meta else []
            values |= {attribute: self._number(text) for attribute, text in zip(known.meta, numbers, strict=True)}
        quantized = name == "QuantizedKVCache"
        for side in ("keys", "values"):
            values[side] = self._planes(values[side], name) if quantized else self._array(values[side], name)
        sides = [values["keys"], values["values"]]
        planes = [plane for side in sides if side is not None for plane in (side if quantized else [side])]
        if (sides[0] is None) != (sides[1] is None) or any(plane.ndim != _RANK for plane in planes):
            raise self._corrupt(name, "keys and values [B, H, S, D]", [plane.shape for plane in planes])
        # As mlx-lm has it: until 0.31 what the arrays hold is what there is.
        values.setdefault("offset", planes[0].shape[2] if planes else 0)
        for attribute in values.keys() - {"keys", "values"}:
            if type(values[attribute]) is not int or not 0 <= values[attribute] <= _MAX_NUMBER:
                raise self._corrupt(f"{name}.{attribute}", f"an integer from 0 to {_MAX_NUMBER}", values[attribute])
        return values

    def _arrays(self, saved: Any) -> Any:
        slots, left_padding, lengths = (
            self._items(saved, 3, "ArraysCache") if self._in_state else (saved[0], None, None)
        )
        if not isinstance(slots, list):
            raise self._corrupt("ArraysCache", "a list of arrays", type(slots).__name__)
        cache = _imported(_ARRAYS[0])(len(slots))
        cache.cache = [self._array(slot, _ARRAYS[0]) for slot in slots]
        cache.left_padding, cache.lengths = (self._array(one, _ARRAYS[0]) for one in (left_padding, lengths))
        return cache

    def _list(self, saved: Any) -> Any:
        if self._in_state:
            if not isinstance(saved, list):
                raise self._corrupt(_LIST, "a list of caches", type(saved).__name__)
            pairs = [self._items(item, 2, _LIST) for item in saved]
            children = [(name, state) for state, name in pairs]
        else:
            state, meta = saved
            names, metas = self._items(meta, 2, _LIST)
            if not all(isinstance(part, list) and len(part) == len(state) for part in (state, names, metas)):
                raise self._corrupt(_LIST, "a class and a meta_state for each cache", names)
            children = list(zip(names, zip(state, metas, strict=True), strict=True))
        return _imported(_LIST)(*(self.cache(name, child) for name, child in children))

    def _batch(self, name: str, saved: Any) -> Any:
        owner = _imported(name)
        if hasattr(owner, "meta_state") is self._in_state:
            raise UnsupportedFormat(
                "another release of mlx-lm wrote this batch", path=self._path, field="class", found=name,
                expected="mlx-lm 0.32 or later" if self._in_state else "mlx-lm 0.31 or earlier",
            )  # fmt: skip
        try:
            return owner.from_state(saved) if self._in_state else owner.from_state(*saved)
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise self._corrupt(name, "what its class takes", str(error)) from None

    # ---- values

    def _unmarked(self, arrays: dict[str, mx.array]) -> dict[str, Any]:
        """The values with those that stand for a scalar, a text or None made what they were."""
        values: dict[str, Any] = dict(arrays)
        for mark in self._marks:
            name, what = self._items(mark, 2, "scalars")
            if not isinstance(name, str) or name not in arrays:
                raise self._corrupt("scalars", "the names of tensors", name)
            array = arrays[name]
            if what == "scalar" and array.size == 1:
                values[name] = array.item()
            elif what == "string" and array.ndim == 1 and array.size <= _MAX_NAME:
                values[name] = self._text(array.tolist())
            elif what == "none" and array.size == 0:
                values[name] = None
            else:
                raise self._corrupt(f"scalars: {name}", "a scalar, a text or none", [what, list(array.shape)])
        return values

    def _text(self, codes: Any) -> str:
        try:
            return "".join(map(chr, codes))
        except (TypeError, ValueError, OverflowError):
            raise self._corrupt("scalars", "a text", codes) from None

    def _number(self, text: Any) -> int:
        try:
            return int(text)
        except (TypeError, ValueError):
            raise self._corrupt("meta_state", "an integer", text) from None

    def _array(self, value: Any, name: str) -> mx.array | None:
        if value is not None and not isinstance(value, mx.array):
            raise self._corrupt(name, "an array", type(value).__name__)
        return value

    def _planes(self, value: Any, name: str) -> tuple[mx.array, ...] | None:
        if value is None:
            return None
        planes = tuple(self._items(value, 3, name))
        if not all(isinstance(plane, mx.array) for plane in planes):
            raise self._corrupt(name, "packed, scales and biases", [type(plane).__name__ for plane in planes])
        return planes

    def _items(self, value: Any, count: int, field: str) -> list[Any]:
        if not isinstance(value, list) or len(value) != count:
            found = len(value) if isinstance(value, list) else type(value).__name__
            raise self._corrupt(field, f"{count} items", found)
        return value

    # ---- trees

    def _tree(self, flat: Mapping[str, Any]) -> Any:
        """Lists and dicts from names like "0.2.key", as mlx writes them: numbers from 0 on are a list's."""
        root: dict[str, Any] = {}
        for name, value in flat.items():
            *folders, last = name.split(".", _MAX_DEPTH)
            node = root
            for folder in folders:
                node = node.setdefault(folder, {})
                if not isinstance(node, dict):
                    raise self._corrupt(name, "a name of its own", "the beginning of another")
            if last in node or len(folders) == _MAX_DEPTH:
                raise self._corrupt(name, f"a name of its own, at most {_MAX_DEPTH} deep", name)
            node[last] = value
        return _listed(root)

    def _corrupt(self, field: str, expected: object, found: object) -> CorruptEntry:
        message = "not a prompt cache that mlx-lm wrote"
        return CorruptEntry(message, path=self._path, field=field, expected=expected, found=found)


def _listed(node: Any) -> Any:
    """`node` with every dict a list whose keys are 0, 1, 2 and so on."""
    if not isinstance(node, dict):
        return node
    items = {key: _listed(value) for key, value in node.items()}
    if items and all(str(number) in items for number in range(len(items))):
        return [items[str(number)] for number in range(len(items))]
    return items
