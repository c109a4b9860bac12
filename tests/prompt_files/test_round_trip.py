"""save_prompt_cache and load_prompt_cache keep what mlx-lm's functions of the same names keep."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import kvcodecs
from blockstore import FileMissing, InvalidInput, Store, load_prompt_cache, save_prompt_cache
from blockstore.fs import FileSystem
from blockstore.pointers import standing
from cache_cases import CASES, arrays_of, bits, continue_cache, facts, feed
from store_kit import all_facts

pytestmark = pytest.mark.mlx_lm

ROOT = Path(__file__).resolve().parents[2]
# mlx-lm before 0.32 cannot write a cache without arrays.
WRITES_EMPTY = not hasattr(mlx_lm_cache.KVCache, "meta_state")


def is_empty(caches: list[Any]) -> bool:
    described = kvcodecs.default_provider().snapshot(caches, kvcodecs.SnapshotContext(1))
    return all(part.entry.is_empty for part in described)


COMPOSED = [name for name in CASES if name.startswith("composed")]
EMPTY = [name for name, build in CASES.items() if name not in COMPOSED and is_empty(build())]
STORED = [name for name in CASES if name not in (*COMPOSED, *EMPTY)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("store"), durability="none") as store:
        yield store


def is_pointer(path: Path) -> bool:
    return standing(FileSystem(), str(path)) is not None


def there_and_back(path: Path, caches: list[Any], store: Store) -> list[Any]:
    save_prompt_cache(path, caches, store=store)
    return load_prompt_cache(path, store=store)


# ---- caches


@pytest.mark.parametrize("name", STORED)
def test_every_cache_comes_back_and_goes_on(name: str, tmp_path: Path, store: Store) -> None:
    path = tmp_path / "chat.safetensors"
    caches, other = CASES[name](), CASES[name]()
    loaded = there_and_back(path, caches, store)
    assert is_pointer(path)
    assert all_facts(loaded) == all_facts(caches) == all_facts(other)
    for number, (cache, twin) in enumerate(zip(loaded, other, strict=True)):
        steps = [continue_cache(one, 17 + number, 4) for one in (cache, twin)]
        assert [*map(bits, steps[0])] == [*map(bits, steps[1])]


@pytest.mark.parametrize("name", EMPTY)
def test_what_holds_nothing_is_written_by_mlx_lm_where_that_can(name: str, tmp_path: Path, store: Store) -> None:
    path = tmp_path / "empty.safetensors"
    caches = CASES[name]()
    writes = all(type(cache).__module__ == mlx_lm_cache.__name__ for cache in caches)
    if writes and (WRITES_EMPTY or all(map(arrays_of, caches))):
        assert all_facts(there_and_back(path, caches, store)) == all_facts(caches)
        assert not is_pointer(path)
    else:
        with pytest.raises(InvalidInput, match="every cache is empty"):
            save_prompt_cache(path, caches, store=store)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", COMPOSED)
def test_a_composed_cache_is_refused(name: str, tmp_path: Path, store: Store) -> None:
    with pytest.raises(InvalidInput, match="composed") as caught:
        save_prompt_cache(tmp_path / "composed", CASES[name](), store=store)
    assert "cache.storage()" in caught.value.hint
    assert os.listdir(tmp_path) == []


def test_a_mixed_list_with_layers_that_hold_nothing_yet(tmp_path: Path, store: Store) -> None:
    arrays = mlx_lm_cache.ArraysCache(2)
    arrays[0], arrays[1] = mx.random.normal((1, 3, 8)), mx.random.normal((1, 2, 4, 4))
    caches = [
        arrays,
        feed(mlx_lm_cache.KVCache(), 9),
        feed(mlx_lm_cache.RotatingKVCache(8, keep=2), 5, 1, 1, 1, 1),
        mlx_lm_cache.ArraysCache(3),
        feed(mlx_lm_cache.ChunkedKVCache(64), 9),
        mlx_lm_cache.KVCache(),
        mlx_lm_cache.CacheList(feed(mlx_lm_cache.KVCache(), 9), mlx_lm_cache.RotatingKVCache(8)),
        feed(kvcodecs.KVCache(), 9),
    ]
    assert all_facts(there_and_back(tmp_path / "mixed", caches, store)) == all_facts(caches)


def test_a_recurrent_model_counts_no_tokens(tmp_path: Path, store: Store) -> None:
    caches = [mlx_lm_cache.ArraysCache(1) for _ in range(3)]
    for number, cache in enumerate(caches):
        cache[0] = mx.full((1, 4), number)
    path = tmp_path / "mamba.safetensors"
    assert all_facts(there_and_back(path, caches, store)) == all_facts(caches)
    assert is_pointer(path)


def test_trimming_after_a_load(tmp_path: Path, store: Store) -> None:
    caches = [feed(mlx_lm_cache.KVCache(), 10, 1), feed(mlx_lm_cache.KVCache(), 11)]
    loaded = there_and_back(tmp_path / "chat", caches, store)
    assert mlx_lm_cache.can_trim_prompt_cache(loaded)
    assert mlx_lm_cache.trim_prompt_cache(loaded, 7) == mlx_lm_cache.trim_prompt_cache(caches, 7) == 7
    assert [cache.offset for cache in loaded] == [4, 4]
    for cache in (*loaded, *caches):
        feed(cache, 2)
    assert all_facts(loaded) == all_facts(caches)


def test_a_full_ring_is_not_trimmed_after_a_load_either(tmp_path: Path, store: Store) -> None:
    caches = [feed(mlx_lm_cache.RotatingKVCache(8), 5, *[1] * 6)]
    loaded = there_and_back(tmp_path / "ring", caches, store)
    assert not mlx_lm_cache.can_trim_prompt_cache(loaded)
    assert mlx_lm_cache.trim_prompt_cache(loaded, 2) == 0
    assert all_facts(loaded) == all_facts(caches)


def test_quantizing_after_a_load_gives_what_it_gives_before(tmp_path: Path, store: Store) -> None:
    cache = feed(mlx_lm_cache.KVCache(), 12)
    (loaded,) = there_and_back(tmp_path / "chat", [cache], store)
    before, after = (one.to_quantized(group_size=32, bits=8) for one in (cache, loaded))
    assert facts(after) == facts(before)
    (again,) = there_and_back(tmp_path / "quantized", [after], store)
    assert facts(again) == facts(before)


def test_quantized_layers_beside_rings(tmp_path: Path, store: Store) -> None:
    caches = [
        feed(mlx_lm_cache.KVCache(), 9).to_quantized(group_size=32, bits=4),
        feed(mlx_lm_cache.RotatingKVCache(6, keep=1), 6, 1, 1, 1),
    ]
    loaded = there_and_back(tmp_path / "hybrid", caches, store)
    assert [type(cache) for cache in loaded] == [mlx_lm_cache.QuantizedKVCache, mlx_lm_cache.RotatingKVCache]
    assert all_facts(loaded) == all_facts(caches)


# ---- what no store holds


def test_a_batch_is_written_whole_by_mlx_lm(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "batch.safetensors"
    caches = [mlx_lm_cache.KVCache.merge([feed(mlx_lm_cache.KVCache(), count) for count in (9, 4)])]
    save_prompt_cache(path, caches, {"rows": "2"}, store=store)
    assert not is_pointer(path)
    (loaded,), metadata = load_prompt_cache(path, return_metadata=True)
    assert metadata == {"rows": "2"}
    assert type(loaded) is mlx_lm_cache.BatchKVCache
    row, expected = loaded.extract(1), caches[0].extract(1)
    assert facts(row) == facts(expected)


def test_caches_that_stand_at_different_tokens_are_written_whole(tmp_path: Path, store: Store) -> None:
    """A model's caches and its draft model's may be one token apart."""
    path = tmp_path / "speculative.safetensors"
    caches = [feed(mlx_lm_cache.KVCache(), 9), feed(mlx_lm_cache.KVCache(), 8)]
    assert all_facts(there_and_back(path, caches, store)) == all_facts(caches)
    assert not is_pointer(path)


class Unknown(mlx_lm_cache.KVCache):
    """A class that mlx-lm would save and not load."""


@pytest.mark.parametrize(
    "caches", [[feed(Unknown(), 5)], [mlx_lm_cache.CacheList(feed(Unknown(), 5))], ["no cache"], 7]
)
def test_what_could_not_be_loaded_is_refused(caches: Any, tmp_path: Path, store: Store) -> None:
    with pytest.raises(InvalidInput) as caught:
        save_prompt_cache(tmp_path / "unknown", caches, store=store)
    assert caught.value.field == "caches"
    assert os.listdir(tmp_path) == []


# ---- arguments and results


@pytest.mark.parametrize("ours", [save_prompt_cache, load_prompt_cache])
def test_the_arguments_are_those_of_mlx_lm_and_one_by_name(ours: Any) -> None:
    theirs = inspect.signature(getattr(mlx_lm_cache, ours.__name__)).parameters
    found = inspect.signature(ours).parameters
    assert [*found] == [*theirs, "store"]
    assert found["store"].kind is inspect.Parameter.KEYWORD_ONLY
    assert {name: found[name].kind for name in theirs} == {name: one.kind for name, one in theirs.items()}
    assert all((found[name].default or None) == (one.default or None) for name, one in theirs.items())


def test_results_are_those_of_mlx_lm(tmp_path: Path, store: Store) -> None:
    path = str(tmp_path / "chat.safetensors")
    given = {"model": "org/m", "a.b": "", "0": "zero", "": "none", "text": 'ü\n"\\ \x00 \U0001f600'}
    nothing: Any = save_prompt_cache(path, [feed(mlx_lm_cache.KVCache(), 3)], given, store=store)
    assert nothing is None
    loaded = load_prompt_cache(path)
    assert isinstance(loaded, list)
    assert len(loaded) == 1
    caches, metadata = load_prompt_cache(path, True)
    assert (len(caches), metadata) == (1, given)
    save_prompt_cache(path, caches, store=store)
    assert load_prompt_cache(path, return_metadata=True)[1] == {}


def test_the_suffix_is_added_as_mlx_adds_it(tmp_path: Path, store: Store) -> None:
    caches = [feed(mlx_lm_cache.KVCache(), 3)]
    save_prompt_cache(str(tmp_path / "chat"), caches, store=store)
    assert os.listdir(tmp_path) == ["chat.safetensors"]
    for name in ("chat", "chat.safetensors"):
        assert all_facts(load_prompt_cache(tmp_path / name)) == all_facts(caches)


def test_the_store_is_the_one_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSTORE_ROOT", str(tmp_path / "root"))
    save_prompt_cache(tmp_path / "chat", [feed(mlx_lm_cache.KVCache(), 3)])
    with Store(tmp_path / "root", create=False) as store:
        (entry,) = store.entries()
    assert (entry.ns, entry.pinned) == ((tmp_path / "chat.safetensors").as_uri(), True)
    monkeypatch.delenv("BLOCKSTORE_ROOT")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert len(load_prompt_cache(tmp_path / "chat")) == 1
    assert not (tmp_path / "home").exists()
    save_prompt_cache(tmp_path / "other", [feed(mlx_lm_cache.KVCache(), 3)])
    assert (tmp_path / "home/.cache/blockstore/store.json").exists()


NO_TEXTS = [{"a": 1}, {"a": None}, {1: "a"}, {"a": {"b": "c"}}, ["a"], "a", {"a": "\ud800"}, {"a": "x" * (17 << 20)}]


@pytest.mark.parametrize("metadata", NO_TEXTS, ids=range(len(NO_TEXTS)))
def test_metadata_is_text_as_for_mlx(metadata: Any, tmp_path: Path, store: Store) -> None:
    with pytest.raises(ValueError, match="metadata"):
        save_prompt_cache(tmp_path / "chat", [feed(mlx_lm_cache.KVCache(), 3)], metadata, store=store)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", "folder/", b"bytes", "a\0b"])
def test_a_name_that_no_file_can_have(name: Any, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: save_prompt_cache(name, [], store=store), lambda: load_prompt_cache(name)):
        with pytest.raises(InvalidInput, match="path of a file"):
            call()
    assert os.listdir(tmp_path) == []


def test_a_missing_file_and_a_missing_directory(tmp_path: Path, store: Store) -> None:
    with pytest.raises(RuntimeError):  # what mlx says
        mlx_lm_cache.load_prompt_cache(str(tmp_path / "none.safetensors"))
    with pytest.raises(FileMissing) as caught:
        load_prompt_cache(tmp_path / "none")
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.path == str(tmp_path / "none.safetensors")
    with pytest.raises(FileMissing, match="directory") as caught:
        save_prompt_cache(tmp_path / "no" / "chat", [feed(mlx_lm_cache.KVCache(), 3)], store=store)
    assert caught.value.path == str(tmp_path / "no")


def test_a_directory_or_a_device_is_not_replaced(tmp_path: Path, store: Store) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "fifo.safetensors")
    for name in ("folder", "fifo"):
        with pytest.raises(InvalidInput, match="other than a file"):
            save_prompt_cache(tmp_path / name, [feed(mlx_lm_cache.KVCache(), 3)], store=store)
    assert sorted(os.listdir(tmp_path)) == ["fifo.safetensors", "folder.safetensors"]


def test_a_link_is_written_through(tmp_path: Path, store: Store) -> None:
    (tmp_path / "below").mkdir()
    link, target = tmp_path / "link.safetensors", tmp_path / "below" / "chat.safetensors"
    link.symlink_to(target)
    caches = [feed(mlx_lm_cache.KVCache(), 3)]
    save_prompt_cache(link, caches, store=store)
    assert link.is_symlink()
    assert target.is_file()
    assert all_facts(load_prompt_cache(link)) == all_facts(caches)


def test_a_path_that_is_no_text(tmp_path: Path, store: Store) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"\xff \xc3\xbc.safetensors")
    name = os.fsdecode(path)
    try:
        open(path, "xb").close()
    except OSError:
        pytest.skip("this file system takes text alone")
    caches = [feed(mlx_lm_cache.KVCache(), 3)]
    save_prompt_cache(name, caches, store=store)
    assert all_facts(load_prompt_cache(name)) == all_facts(caches)


# ---- without mlx-lm

WITHOUT = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "codecs")!r}]
class Missing:
    def find_spec(name, path=None, target=None):
        if name == "mlx_lm":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing)
import mlx.core as mx
import kvcodecs
from blockstore import InvalidInput, load_prompt_cache, save_prompt_cache
cache = kvcodecs.KVCache()
cache.update_and_fetch(mx.ones((1, 1, 3, 8)), mx.ones((1, 1, 3, 8)))
save_prompt_cache(sys.argv[2], [cache], store=sys.argv[1])
assert type(load_prompt_cache(sys.argv[2])[0]) is kvcodecs.KVCache
for path in sys.argv[3:]:
    try:
        load_prompt_cache(path)
    except InvalidInput as error:
        print(error)
"""


def test_without_mlx_lm_our_own_caches_work_and_the_others_say_what_is_missing(tmp_path: Path, store: Store) -> None:
    pointer, whole = tmp_path / "theirs.safetensors", tmp_path / "whole.safetensors"
    caches = [feed(mlx_lm_cache.KVCache(), 3)]
    save_prompt_cache(pointer, caches, store=store)
    mlx_lm_cache.save_prompt_cache(str(whole), caches)
    args = [tmp_path / "root", tmp_path / "ours.safetensors", pointer, whole]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, args)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert 'pip install "mlx-blockstore[mlx-lm]"' in line
        assert "KVCache" in line
