"""What cannot be saved or loaded is refused, in words that say how to go on."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import kvcodecs
from cache_cases import CASES, feed, random_array, reload
from kvcodecs import CodecError, HeaderEntry, PrototypeMismatch, UnknownKind, UnmatchedCache, default_provider
from kvcodecs.algebra import SnapshotContext
from kvcodecs.codec import ClassRef

pytestmark = pytest.mark.mlx_lm
CONTEXT = SnapshotContext(9)


def entry_of(cache: Any) -> HeaderEntry:
    return default_provider().snapshot([cache], CONTEXT)[0].entry


# ---- caches


class Subclass(kvcodecs.KVCache):
    pass


class SubclassOfTheirs(mlx_lm_cache.KVCache):
    pass


@pytest.mark.parametrize("cache", [Subclass(), SubclassOfTheirs(), object(), None, [mlx_lm_cache.KVCache()]])
def test_unknown_classes_and_subclasses_match_no_codec(cache: object) -> None:
    name = f"{type(cache).__module__}.{type(cache).__qualname__}"
    with pytest.raises(UnmatchedCache, match=f"no codec of provider mlx-cache-v5 matches {name}"):
        default_provider().snapshot([cache], CONTEXT)
    assert not default_provider().handles(cache)


@pytest.mark.parametrize("batch", [mlx_lm_cache.BatchKVCache([0, 1]), mlx_lm_cache.BatchRotatingKVCache(8, [0, 1])])
def test_batch_caches_are_refused_with_the_way_out(batch: object) -> None:
    with pytest.raises(UnmatchedCache, match=r"save each row by itself: .*extract"):
        default_provider().clone([batch])


def test_an_empty_recurrent_cache_has_nothing_to_save() -> None:
    for use in (lambda caches: default_provider().snapshot(caches, CONTEXT), default_provider().clone):
        with pytest.raises(CodecError, match="has seen no token"):
            use([kvcodecs.RecurrentCache()])


def broken(change: Callable[[Any], None], cache: Any) -> Any:
    change(cache)
    return cache


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda cache: setattr(cache, name, value)


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (broken(set_to("offset", 300), feed(kvcodecs.KVCache(), 3)), "expected 300 tokens"),
        (broken(set_to("offset", -1), feed(mlx_lm_cache.KVCache(), 3)), "offset -1"),
        (broken(set_to("offset", mx.array(3)), feed(mlx_lm_cache.KVCache(), 3)), "is not an int"),
        (broken(set_to("keys", random_array(0, (1, 2, 8))), feed(mlx_lm_cache.KVCache(), 3)), r"not \[B, H, S, D\]"),
        (broken(set_to("offset", 3), mlx_lm_cache.KVCache()), "offset: expected 0"),
        (broken(set_to("minimum_reusable_offset", 4), feed(kvcodecs.KVCache(), 3)), "minimum_reusable_offset 4"),
        (broken(lambda c: c.__dict__.update(offset=2, _idx=-5), feed(mlx_lm_cache.RotatingKVCache(8), 5)), "idx"),
        (broken(set_to("_idx", 1), feed(mlx_lm_cache.RotatingKVCache(8, keep=2), 8, 1)), "at least keep 2"),
        (broken(set_to("start_position", 4), feed(mlx_lm_cache.ChunkedKVCache(8), 3)), "tokens"),
        (broken(set_to("cache", [[1, 2]]), mlx_lm_cache.ArraysCache(1)), "a slot holds list, not an array"),
    ],
)
def test_states_that_nobody_could_load_are_refused(cache: Any, why: str) -> None:
    with pytest.raises(CodecError, match=f"in a state that cannot be saved: .*{why}"):
        entry_of(cache)


# ---- entries


def test_an_unknown_kind() -> None:
    with pytest.raises(UnknownKind, match="no codec for kind 'holographic'; it knows arrays, chunked, kv, list"):
        default_provider().for_entry(HeaderEntry("holographic", 3))


def quantized(group: int = 32, width: int = 8) -> Any:
    return kvcodecs.QuantizedKVCache(group, width)


def lists(*children: Any) -> Any:
    return mlx_lm_cache.CacheList(*children)


MISMATCHES = {
    "bits": (feed(quantized(width=4), 3), quantized(), "qkv.bits", 8, 4),
    "group": (feed(quantized(group=64), 3, dims=(64, 64)), quantized(), "qkv.groupSize", 32, 64),
    "mlx-lm bits": (
        feed(mlx_lm_cache.QuantizedKVCache(32, 4), 3), mlx_lm_cache.QuantizedKVCache(32, 8), "qkv.bits", 8, 4,
    ),
    "window": (feed(kvcodecs.RotatingKVCache(8), 3), kvcodecs.RotatingKVCache(16), "rotating.maxSize", 16, 8),
    "keep": (feed(kvcodecs.RotatingKVCache(8), 3), kvcodecs.RotatingKVCache(8, 2), "rotating.keep", 2, None),
    "no keep": (feed(kvcodecs.RotatingKVCache(8, 2), 3), kvcodecs.RotatingKVCache(8), "rotating.keep", None, 2),
    "chunk": (
        feed(mlx_lm_cache.ChunkedKVCache(8), 3), mlx_lm_cache.ChunkedKVCache(16), "chunked.chunkSize", 16, 8,
    ),
    "slots": (CASES["mlx-lm arrays: all set"]()[0], mlx_lm_cache.ArraysCache(3), "arrays.slots", 3, 2),
    "slots of ours": (CASES["mlx-lm arrays: some set"]()[0], kvcodecs.RecurrentCache(), "arrays.slots", 2, 4),
    "ssm slots": (CASES["ours ssm: set"]()[0], mlx_lm_cache.ArraysCache(3), "ssm.slots", 3, 2),
    "children": (lists(feed(quantized(), 3)), lists(quantized(), quantized()), "list.children", 2, 1),
    "inside a list": (lists(feed(quantized(width=4), 3)), lists(quantized()), "qkv.bits", 8, 4),
    "token axis for a list": (feed(kvcodecs.KVCache(), 3), lists(kvcodecs.KVCache()), "kind", "CacheList", "kv"),
    "list for a token axis": (lists(feed(kvcodecs.KVCache(), 3)), kvcodecs.KVCache(), "kind", "KVCache", "list"),
    "arrays for a token axis": (
        CASES["mlx-lm arrays: all set"]()[0], mlx_lm_cache.KVCache(), "kind", "KVCache", "arrays",
    ),
    "ssm for a token axis": (CASES["ours ssm: set"]()[0], kvcodecs.KVCache(), "kind", "KVCache", "ssm"),
    "token axis for arrays": (feed(kvcodecs.KVCache(), 3), mlx_lm_cache.ArraysCache(2), "kind", "ArraysCache", "kv"),
    "token axis for ssm": (feed(kvcodecs.KVCache(), 3), kvcodecs.RecurrentCache(), "kind", "RecurrentCache", "kv"),
}  # fmt: skip


@pytest.mark.parametrize(("cache", "prototype", "field", "expected", "found"), MISMATCHES.values(), ids=MISMATCHES)
def test_prototypes(cache: Any, prototype: Any, field: str, expected: object, found: object) -> None:
    entry = entry_of(cache)
    codec = default_provider().for_entry(entry, prototype)
    with pytest.raises(PrototypeMismatch) as caught:
        codec.check_prototype(entry, prototype)
    assert (caught.value.field, caught.value.expected, caught.value.found) == (field, expected, found)
    assert str(caught.value) == f"{field}: the model's cache has {expected!r}, the stored one {found!r}"


# ---- which class an entry is loaded as


@pytest.mark.parametrize(
    ("name", "prototype", "loaded_as"),
    [
        ("ours kv: at 256", mlx_lm_cache.KVCache(), mlx_lm_cache.KVCache),
        ("mlx-lm kv: at 256", kvcodecs.KVCache(), kvcodecs.KVCache),
        ("mlx-lm kv: at 256", mlx_lm_cache.ConcatenateKVCache(), mlx_lm_cache.ConcatenateKVCache),
        ("mlx-lm concatenate: filled", None, kvcodecs.KVCache),
        ("mlx-lm qkv: quantized while running", mlx_lm_cache.KVCache(), mlx_lm_cache.QuantizedKVCache),
        ("mlx-lm rotating: wrapped", mlx_lm_cache.KVCache(), mlx_lm_cache.RotatingKVCache),
        ("ours rotating-qkv: quantized while running", mlx_lm_cache.RotatingKVCache(8, 2), None),
        ("ours ssm: set", mlx_lm_cache.ArraysCache(2), mlx_lm_cache.ArraysCache),
        ("mlx-lm arrays: all set", kvcodecs.RecurrentCache(), mlx_lm_cache.ArraysCache),
        ("mlx-lm chunked: first chunk", None, mlx_lm_cache.ChunkedKVCache),
    ],
)
def test_the_prototype_decides_the_class(name: str, prototype: Any, loaded_as: type[Any] | None) -> None:
    part = default_provider().snapshot(CASES[name](), CONTEXT)
    (loaded,) = reload(part, [prototype])
    assert type(loaded) is (loaded_as or kvcodecs.RotatingQuantizedKVCache)


# ---- classes that are looked for by name


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(CodecError, match="No module named 'no_such_package'; install it with `pip install"):
        ClassRef("no_such_package.models", "KVCache").imported()
    assert ClassRef("no_such_package.models", "KVCache").loaded() is None


@pytest.mark.parametrize("module", ["mlx_lm.models.cache", "mlx_lm.models.no_such_model"])
def test_a_class_that_the_installed_release_does_not_have(module: str) -> None:
    with pytest.raises(
        CodecError, match=rf"{module}\.NoSuchCache is needed to load this cache: .*; a newer release of mlx_lm"
    ):
        ClassRef(module, "NoSuchCache").imported()


def test_matching_imports_no_optional_package() -> None:
    code = (
        "import sys, kvcodecs; p = kvcodecs.default_provider(); c = kvcodecs.KVCache();"
        "p.clone([c]); p.for_entry(kvcodecs.HeaderEntry('chunked', 0)); print('mlx_lm' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(kvcodecs.__file__).resolve().parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
