"""Prompt cache files that mlx-lm wrote, before and since 0.32: read with either release, and never trusted."""

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from blockstore import BlockstoreError, CorruptEntry, Store, UnsupportedFormat, load_prompt_cache, save_prompt_cache
from cache_cases import bits, continue_cache, feed
from prompt_files.samples import GOLDEN, RELEASES, SAMPLES, TOKENS, every_class
from store_kit import all_facts

pytestmark = pytest.mark.mlx_lm

SINCE_0_32 = not hasattr(mlx_lm_cache.KVCache, "meta_state")
OWN, OTHER = reversed(RELEASES) if SINCE_0_32 else RELEASES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store", durability="none") as store:
        yield store


def sample(release: str, name: str) -> Path:
    return GOLDEN / release / f"{name}.safetensors"


def test_no_sample_is_forgotten() -> None:
    expected = {sample(release, name) for release in RELEASES for name in SAMPLES}
    assert set(GOLDEN.rglob("*.safetensors")) == expected


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["plain", "every-class"])
def test_a_file_of_either_release_loads_and_goes_on(name: str, release: str) -> None:
    build, metadata = SAMPLES[name]
    caches, found = load_prompt_cache(sample(release, name), return_metadata=True)
    assert found == metadata
    assert all_facts(caches) == all_facts(build())
    for cache, twin in zip(caches, build(), strict=True):
        steps = [continue_cache(one, 5, 3) for one in (cache, twin)]
        assert [*map(bits, steps[0])] == [*map(bits, steps[1])]


@pytest.mark.parametrize("name", SAMPLES)
def test_what_mlx_lm_loads_is_what_is_loaded_here(name: str) -> None:
    path = sample(OWN, name)
    theirs, metadata = mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)
    ours, found = load_prompt_cache(path, return_metadata=True)
    assert found == metadata
    assert [type(cache) for cache in ours] == [type(cache) for cache in theirs]
    if name == "batch":
        theirs, ours = ([cache.extract(1) for cache in caches] for caches in (theirs, ours))
    assert all_facts(ours) == all_facts(theirs)


def test_a_batch_of_the_other_release_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormat) as caught:
        load_prompt_cache(sample(OTHER, "batch"))
    assert caught.value.found == "BatchKVCache"
    assert "0.31" in str(caught.value.expected) or "0.32" in str(caught.value.expected)


@pytest.mark.parametrize("metadata", [{}, {"a": "b"}, {"x.y": "z"}, {"0": "c"}, {"": "c", "q": ""}])
def test_metadata_is_what_mlx_lm_makes_of_it(metadata: dict[str, str], tmp_path: Path) -> None:
    path = str(tmp_path / "chat.safetensors")
    mlx_lm_cache.save_prompt_cache(path, [feed(mlx_lm_cache.KVCache(), 3)], metadata)
    theirs = mlx_lm_cache.load_prompt_cache(path, return_metadata=True)[1]
    assert load_prompt_cache(path, return_metadata=True)[1] == theirs


@pytest.mark.skipif(not SINCE_0_32, reason="mlx-lm writes nothing of the sort before 0.32")
def test_what_only_newer_releases_write(tmp_path: Path) -> None:
    path = str(tmp_path / "chat.safetensors")
    mlx_lm_cache.save_prompt_cache(path, [])
    assert load_prompt_cache(path, return_metadata=True) == ([], {})
    arrays = mlx_lm_cache.ArraysCache(3, left_padding=[0, 2])
    arrays[1] = mx.ones((2, 4))
    arrays.lengths = mx.array([3, 1])
    caches = [mlx_lm_cache.KVCache(), arrays, mlx_lm_cache.CacheList(mlx_lm_cache.RotatingKVCache(8, keep=3))]
    mlx_lm_cache.save_prompt_cache(path, caches)
    assert all_facts(load_prompt_cache(path)) == all_facts(caches)


@pytest.mark.skipif(not SINCE_0_32, reason="mlx-lm wrote no spare rows before 0.32")
def test_spare_rows_of_a_chunk_are_not_taken_for_tokens(tmp_path: Path) -> None:
    """Older releases drop the front of a chunk that has as many rows as its size, whether they hold tokens or not."""
    path = str(tmp_path / "chat.safetensors")
    mlx_lm_cache.save_prompt_cache(path, [feed(mlx_lm_cache.ChunkedKVCache(64), 11)])
    (cache,) = load_prompt_cache(path)
    assert cache.keys.shape[2] == cache.values.shape[2] == 11


@pytest.mark.parametrize("release", RELEASES)
def test_an_old_file_is_saved_again_into_a_store(release: str, tmp_path: Path, store: Store) -> None:
    caches, metadata = load_prompt_cache(sample(release, "every-class"), return_metadata=True)
    save_prompt_cache(tmp_path / "chat", caches, metadata, store=store)
    assert [entry.token_count for entry in store.entries()] == [TOKENS]
    assert all_facts(load_prompt_cache(tmp_path / "chat")) == all_facts(every_class())


# ---- files that lie


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def written(path: Path, header: Any, body: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def refused(path: Path) -> BlockstoreError:
    with pytest.raises((CorruptEntry, UnsupportedFormat)) as caught:
        load_prompt_cache(path)
    assert caught.value.path == str(path)
    assert caught.value.message
    return caught.value


Change = Callable[[dict[str, Any]], Any]


def with_tensor(**fields: Any) -> Change:
    """Another description of the first tensor."""
    return lambda header: header["0.0"].update(fields)


HEADERS: dict[str, Change] = {
    "an offset behind the end": with_tensor(data_offsets=[0, 1 << 40]),
    "an offset past 64 bits": with_tensor(data_offsets=[0, 1 << 80]),
    "a negative offset": with_tensor(data_offsets=[-16, 176]),
    "offsets the wrong way round": with_tensor(data_offsets=[176, 0]),
    "offsets of another size": with_tensor(data_offsets=[0, 175]),
    "one offset": with_tensor(data_offsets=[0]),
    "a fraction": with_tensor(data_offsets=[0.5, 176]),
    "no offsets": lambda header: header["0.0"].pop("data_offsets"),
    "an overlap": lambda header: header["0.0"].update(data_offsets=header["0.1"]["data_offsets"]),
    "a huge shape": with_tensor(shape=[1 << 30, 1 << 30, 1 << 30, 1 << 30]),
    "a shape of zeros and giants": with_tensor(shape=[0, 1 << 62]),
    "a negative dimension": with_tensor(shape=[-1, -11, 4, 1]),
    "many dimensions": with_tensor(shape=[1] * 40),
    "a shape that is text": with_tensor(shape="11"),
    "an unknown type": with_tensor(dtype="F8_E4M3"),
    "a type of another size": with_tensor(dtype="F64"),
    "a type that is no text": with_tensor(dtype=4),
    "a tensor that is a list": lambda header: header.update({"0.0": [1, 2]}),
    "metadata that is a list": lambda header: header.update(__metadata__=["0.0"]),
    "metadata with numbers": lambda header: header["__metadata__"].update({"2.0": 1}),
    "no metadata": lambda header: header.pop("__metadata__"),
    "other metadata": lambda header: header.update(__metadata__={"format": "mlx"}),
    "a class that is a module's function": lambda header: header["__metadata__"].update({"2.0": "make_prompt_cache"}),
    "a class of the standard library": lambda header: header["__metadata__"].update({"2.0": "deque"}),
    "a list index of a billion": lambda header: header["__metadata__"].update({"2.1000000000": "KVCache"}),
    "a tensor with an index of a billion": lambda header: header.update({"999999999.0": header.pop("0.0")}),
    "a deep name": lambda header: header["__metadata__"].update({"1." + "0." * 5000: "deep"}),
    "a name below another": lambda header: header["__metadata__"].update({"2.0.0": "KVCache"}),
    "one class too few": lambda header: header["__metadata__"].pop("2.1"),
    "one class too many": lambda header: header["__metadata__"].update({"2.2": "KVCache"}),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, body = parts_of(sample("0.31.3", "plain"))
    assert header["0.0"]["shape"] == [1, 1, 11, 4]
    HEADERS[what](header)
    allocated: list[Any] = []
    from blockstore import mlx_lm_caches

    unfilled = mlx_lm_caches.unfilled
    monkeypatch.setattr(mlx_lm_caches, "unfilled", lambda wanted: allocated.append(wanted) or unfilled(wanted))
    refused(written(tmp_path / "bad.safetensors", header, body))
    # What only the classes can tell is found out with the tensors at hand, which are no more than the file holds.
    if allocated:
        assert sum(memory_of(wanted) for wanted in allocated) <= len(body)


def memory_of(wanted: Any) -> int:
    from math import prod

    from kvcodecs.entry import DTYPES

    return sum(prod(shape) * DTYPES[code][1] for shape, code in wanted)


FILES: dict[str, bytes] = {
    "nothing": b"",
    "less than a length": b"\x01\x00",
    "a length alone": struct.pack("<Q", 1 << 20),
    "a length past the file": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"junk",
    "JSON that is a list": struct.pack("<Q", 2) + b"[]",
    "broken UTF-8": struct.pack("<Q", 7) + b'{"\xff":1}'[:7],
    "deep lists": struct.pack("<Q", 2_000_005) + b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000,
    "deep objects": struct.pack("<Q", 5_000_000) + b'{"a":' * 1_000_000,
    "a cache file of another sort": b"MLXBUNKV2\n" + bytes(100),
}


@pytest.mark.parametrize("what", FILES)
def test_what_is_no_safetensors_file(what: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(FILES[what])
    refused(path)


def test_a_header_that_is_too_long_or_names_too_many_tensors(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 17 << 20))
        file.truncate(18 << 20)
    assert refused(path).field == "header length"
    tensor = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    written(path, {f"{number}": tensor for number in range(70_000)}, b"")
    assert refused(path).field == "tensors"


def test_a_directory_or_a_fifo_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "fifo.safetensors")
    for name in ("folder", "fifo"):
        assert refused(tmp_path / f"{name}.safetensors").message == "not a regular file"


OLD_META: dict[str, dict[str, str]] = {
    "no number": {"0.2.0": "many"},
    "a number of five thousand digits": {"0.2.0": "9" * 5000},
    "an offset past the rows": {"0.4.0": "100000"},
    "a number past 32 bits": {"0.2.2": "99999999999"},
    "a negative offset": {"0.4.0": "-1"},
    "no bits": {"0.4.2": "0"},
    "bits that do not fit": {"0.4.2": "8"},
    "a place past the ring": {"0.2.3": "99"},
    "more kept than there are": {"0.3.0": "-2"},
    "a start behind the end": {"0.5.1": "12"},
    "a child's class": {"0.7.0.0": "CacheList"},
}


@pytest.mark.parametrize("what", OLD_META)
def test_numbers_that_do_not_fit_the_arrays_are_refused(what: str, tmp_path: Path) -> None:
    header, body = parts_of(sample("0.31.3", "every-class"))
    changes = OLD_META[what]
    assert set(changes) <= set(header["__metadata__"])
    header["__metadata__"].update(changes)
    refused(written(tmp_path / "bad.safetensors", header, body))


def marks(header: dict[str, Any]) -> dict[str, str]:
    """tensor -> the name of what it stands for, in the metadata."""
    metadata = header["__metadata__"]
    return {metadata[name]: f"{name[:-1]}1" for name in metadata if name.startswith("2.") and name.endswith(".0")}


NEW_STATE: dict[str, Change] = {
    "an unknown mark": lambda header: header["__metadata__"].update({marks(header)["0.2"]: "function"}),
    "a scalar that is an array": lambda header: header["__metadata__"].update({marks(header)["0.2"]: "none"}),
    "an array that is a text": lambda header: header["__metadata__"].update({"2.1.0": "0.0", "2.1.1": "string"}),
    "a mark of no tensor": lambda header: header["__metadata__"].update({"2.1.0": "77"}),
    "an array in the place of a number": lambda header: header.update({"0.2": header["0.0"], "0.0": header["0.2"]}),
    "an offset that is missing": lambda header: header.pop("0.2"),
}


@pytest.mark.parametrize("what", NEW_STATE)
def test_states_that_do_not_fit_are_refused(what: str, tmp_path: Path) -> None:
    header, body = parts_of(sample("0.32.2", "plain"))
    NEW_STATE[what](header)
    refused(written(tmp_path / "bad.safetensors", header, body))


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_that_was_cut_short_at_any_place(release: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    data = sample(release, "plain").read_bytes()
    for size in {0, 7, 8, 9, 100, len(data) // 2, len(data) - 1}:
        path.write_bytes(data[:size])
        refused(path)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", SAMPLES)
def test_flipped_bytes_load_or_are_refused(name: str, release: str, tmp_path: Path) -> None:
    """Whatever stands in a header: new caches or an error of ours, in bounded time and memory."""
    path = tmp_path / "bad.safetensors"
    data = sample(release, name).read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    rng = random.Random(f"{release} {name}")
    refusals = 0
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            changed[rng.randrange(8 + size)] = rng.choice((rng.randrange(256), ord("0"), ord("9"), ord('"'), ord(",")))
        path.write_bytes(changed)
        try:
            load_prompt_cache(path)
        except (CorruptEntry, UnsupportedFormat):
            refusals += 1
    assert refusals > 50
