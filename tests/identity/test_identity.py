"""From a model directory to what makes its caches reusable: the same model anywhere is one, another never is."""

import json
import os
import shutil
import sys
import types
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from blockstore.errors import InvalidInput
from blockstore.identity import Identity, identity_of, tokenizer_hash_of
from blockstore.versions import versions_of

CONFIG = {"model_type": "llama", "hidden_size": 64, "rope_theta": 10000.0}
TOKENIZER = b'{"version": "1.0"}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "models" / "small")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "digests"


def make_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model-00001-of-00002.safetensors").write_bytes(weights)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"more")
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    return folder


def make_adapter(folder: Path, weights: bytes = b"lora") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"num_layers": 2}')
    (folder / "adapters.safetensors").write_bytes(weights)
    return folder


# ---- the value


def test_an_identity_is_a_value() -> None:
    one = Identity("m", "c", "t")
    assert one == Identity("m", "c", "t", ns="")
    assert len({one, Identity("m", "c", "t"), Identity("m", "c", "t", ns=None), Identity(None, "c", "t")}) == 3
    with pytest.raises(AttributeError):
        one.ns = "other"  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize("field", ["model_id", "config_fingerprint", "tokenizer_hash", "ns"])
@pytest.mark.parametrize("value", ["\ud800", "a\udfffb", 1, b"bytes"])
def test_an_identity_is_text_that_utf8_can_write(field: str, value: object) -> None:
    fields: dict[str, object] = {"model_id": "m", "config_fingerprint": "c", "tokenizer_hash": "t", field: value}
    with pytest.raises(InvalidInput, match=field) as caught:
        Identity(**fields)  # type: ignore[arg-type]  # the wrong type is the point
    assert caught.value.field == field


# ---- the same model


def test_an_identity_says_what_it_was_made_from(model: Path, cache: Path) -> None:
    found = identity_of(model, cache_dir=cache, ns="team")
    assert (found.model_id, found.ns) == ("small", "team")
    assert found.tokenizer_hash == sha256(TOKENIZER).hexdigest()
    assert found.config_fingerprint is not None
    assert len(found.config_fingerprint) == 64


def test_one_model_by_every_kind_of_path_is_one(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = model.parent.parent / "link"
    link.symlink_to(model)
    monkeypatch.chdir(model.parent)
    monkeypatch.setenv("HOME", str(model.parent))
    spellings: list[str | Path] = [
        model,
        str(model),
        "small",
        "./small",
        f"{model}/",
        "../models/small",
        link,
        "~/small",
    ]
    assert {identity_of(spelling, cache_dir=cache) for spelling in spellings} == {identity_of(model, cache_dir=cache)}


def test_a_moved_model_keeps_its_fingerprint(model: Path, cache: Path) -> None:
    before = identity_of(model, cache_dir=cache)
    moved = identity_of(model.rename(model.with_name("renamed")), cache_dir=cache)
    assert moved.config_fingerprint == before.config_fingerprint
    assert moved.model_id == "renamed"
    assert identity_of(model.with_name("renamed"), cache_dir=cache, model_id="small") == before


def test_a_copy_and_a_touched_file_keep_the_identity(model: Path, cache: Path) -> None:
    before = identity_of(model, cache_dir=cache)
    copy = model.parent / "elsewhere" / "small"
    shutil.copytree(model, copy)
    os.utime(copy / "model-00001-of-00002.safetensors", ns=(1, 1))
    assert identity_of(copy, cache_dir=cache) == before


def test_spacing_and_order_of_the_config_say_nothing(model: Path, cache: Path) -> None:
    before = identity_of(model, cache_dir=cache)
    (model / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))
    assert identity_of(model, cache_dir=cache) == before


def test_files_that_mlx_lm_does_not_load_say_nothing(model: Path, cache: Path) -> None:
    before = identity_of(model, cache_dir=cache)
    for name in ("README.md", "optimizer.safetensors", "model.gguf", "modeling.py"):
        (model / name).write_text("anything")
    assert identity_of(model, cache_dir=cache) == before


# ---- the hub's cache


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache as huggingface_hub lays it out, with one model; and the directory of its snapshot."""
    repository = tmp_path / "hub" / "models--org--small"
    snapshot = repository / "snapshots" / "c0ffee"
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    for path in sorted(make_model(tmp_path / "download").iterdir()):
        path.rename(blobs / path.name)
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_a_hub_id_names_the_snapshot_in_the_cache(hub: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options["revision"], options["local_files_only"]))
        return str(hub)

    fake = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    found = identity_of("org/small", cache_dir=cache, revision="v1")
    assert asked == [("org/small", "v1", True)]
    assert found.model_id == "org/small"
    assert found == identity_of(hub, cache_dir=cache)


@pytest.mark.mlx_lm
def test_a_hub_id_is_resolved_by_the_real_hub_library(hub: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.parents[2]))
    assert identity_of("org/small", cache_dir=cache) == identity_of(hub, cache_dir=cache)
    with pytest.raises(InvalidInput, match="hub's cache"):
        identity_of("org/absent", cache_dir=cache)


def test_a_directory_wins_over_a_hub_id(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "org" / "small")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert identity_of("org/small", cache_dir=cache).model_id == "small"


def test_without_the_hub_library_the_error_names_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidInput, match="install huggingface_hub"):
        identity_of("org/nothing-of-this-name", cache_dir=cache)


# ---- another model


def write_other_weights(model: Path) -> None:
    (model / "model-00001-of-00002.safetensors").write_bytes(b"WEIGHTS")


def write_other_config(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 500000.0}))


def write_third_shard(model: Path) -> None:
    (model / "model-extra.safetensors").write_bytes(b"")


def write_quantization(model: Path) -> None:
    (model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')


def exchange_shards(model: Path) -> None:
    first, second = model / "model-00001-of-00002.safetensors", model / "model-00002-of-00002.safetensors"
    contents = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(contents)


CHANGES = [write_other_weights, write_other_config, write_third_shard, write_quantization, exchange_shards]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_another_model_of_the_same_geometry_is_another(
    model: Path, cache: Path, change: Callable[[Path], None]
) -> None:
    before = identity_of(model, cache_dir=cache)
    change(model)
    after = identity_of(model, cache_dir=cache)
    assert after.config_fingerprint != before.config_fingerprint
    assert after.tokenizer_hash == before.tokenizer_hash


def test_the_code_that_a_config_names_counts(model: Path, cache: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_file": "own.py"}))
    with pytest.raises(InvalidInput, match=r"own\.py"):
        identity_of(model, cache_dir=cache)
    found = set()
    for code in ("a = 1", "a = 2"):
        (model / "own.py").write_text(code)
        found.add(identity_of(model, cache_dir=cache))
    assert len(found) == 2


def test_overrides_of_the_config_count(model: Path, cache: Path) -> None:
    plain = identity_of(model, cache_dir=cache)
    assert identity_of(model, cache_dir=cache, model_config={"rope_theta": 1.0}) != plain
    assert identity_of(model, cache_dir=cache, model_config={"rope_theta": 10000.0}) == plain
    with pytest.raises(InvalidInput, match="model_config"):
        identity_of(model, cache_dir=cache, model_config={"rope_theta": object()})


def test_adapters_count(model: Path, cache: Path, tmp_path: Path) -> None:
    one, other = make_adapter(tmp_path / "one"), make_adapter(tmp_path / "other", b"LORA")
    adapters = [None, one, other]
    found = [identity_of(model, cache_dir=cache, adapter_path=path).config_fingerprint for path in adapters]
    assert len(set(found)) == 3
    (other / "adapters.safetensors").write_bytes(b"lora")
    assert identity_of(model, cache_dir=cache, adapter_path=other).config_fingerprint == found[1]
    (other / "adapter_config.json").write_text('{"num_layers": 3}')
    assert identity_of(model, cache_dir=cache, adapter_path=other).config_fingerprint != found[1]


def test_the_quantization_of_the_cache_counts(model: Path, cache: Path) -> None:
    def found(bits: int | None, group_size: int | None = None, start: int | None = None) -> Identity:
        return identity_of(model, cache_dir=cache, kv_bits=bits, kv_group_size=group_size, quantized_kv_start=start)

    assert found(None, 32, 100) == found(None)
    assert found(8) == found(8, 64)
    assert len({found(None), found(8), found(4), found(8, 32), found(8, 64, 0), found(8, 64, 5000)}) == 6


@pytest.mark.parametrize("scheme", [{"kv_bits": 0}, {"kv_bits": True}, {"kv_bits": 8, "quantized_kv_start": -1}])
def test_a_quantization_that_makes_no_sense_is_refused(model: Path, cache: Path, scheme: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="KV quantization"):
        identity_of(model, cache_dir=cache, **scheme)  # type: ignore[arg-type]  # mypy takes the table for all options


def test_versions_count_only_on_request(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*, machine: str, include: bool) -> Identity:
        monkeypatch.setattr("platform.machine", lambda: machine)
        return identity_of(model, cache_dir=cache, include_versions=include)

    assert found(machine="arm64", include=False) == found(machine="x86_64", include=False)
    assert found(machine="arm64", include=True) != found(machine="x86_64", include=True)
    assert found(machine="arm64", include=True) != found(machine="arm64", include=False)


def test_versions_are_those_of_mlx_and_the_machine() -> None:
    found = versions_of()
    assert {"mlx", "machine", "system"} <= set(found)
    assert all(found.values())


# ---- tokenizers


def test_a_tokenizer_without_tokenizer_json_is_its_vocabulary(tmp_path: Path) -> None:
    assert tokenizer_hash_of(tmp_path) is None
    (tmp_path / "vocab.json").write_bytes(b"{}")
    (tmp_path / "merges.txt").write_bytes(b"a b")
    listing = f"{sha256(b'a b').hexdigest()}  merges.txt\n{sha256(b'{}').hexdigest()}  vocab.json\n"
    assert tokenizer_hash_of(tmp_path) == sha256(listing.encode()).hexdigest()
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    assert tokenizer_hash_of(str(tmp_path)) == sha256(TOKENIZER).hexdigest()


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "vocab.txt"])
def test_every_kind_of_vocabulary_counts(tmp_path: Path, name: str) -> None:
    found = set()
    for contents in (b"1", b"2"):
        (tmp_path / name).write_bytes(contents)
        found.add(tokenizer_hash_of(tmp_path))
    assert len(found | {None}) == 3
