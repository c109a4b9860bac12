"""What a caller expects of a file, checked before a tensor is read; and arguments that make no sense."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import kvcodecs
from blockstore import (
    CorruptEntry,
    Identity,
    IdentityMismatch,
    InvalidInput,
    Meta,
    Store,
    UnsupportedFormat,
    clone_kv_caches,
    load_kv_cache,
    read_kv_header,
    save_kv_cache,
)
from cache_cases import facts
from files.kit import GOLDEN, IDENTITY, attachments, kv, layers, meta, ssm
from kvcodecs.algebra import CodecProvider

pytestmark = pytest.mark.mlx_lm
TOKENS = list(range(9))
FIELDS = ["model_id", "config_fingerprint", "tokenizer_hash", "ns"]
VERSIONS: dict[str, dict[str, Any]] = {
    "v3": {}, "v4": {"meta": meta(attachments=attachments())}, "v5": {"layout": "rows"},
}  # fmt: skip


@pytest.fixture(params=VERSIONS.values(), ids=VERSIONS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), **{"meta": meta(), **request.param})
    return tmp_path / "a.mlxkv"


def damage(file: Path) -> None:
    """Whoever reads a tensor finds out: blocks are gone, the last byte of a monolith is another."""
    blocks = list((file.parent / "blocks").glob("*"))
    for block in blocks:
        block.unlink()
    if not blocks:
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


# ---- the identity


@pytest.mark.parametrize("kind", [Identity, Meta])
@pytest.mark.parametrize("field", FIELDS)
def test_each_field_that_is_given_must_be_equal(file: Path, field: str, kind: Callable[..., Any]) -> None:
    nothing = dict.fromkeys(FIELDS)
    assert load_kv_cache(file, expect=kind(**{**nothing, field: IDENTITY[field]})).tokens == TOKENS
    damage(file)
    with pytest.raises(IdentityMismatch) as caught:
        load_kv_cache(file, expect=kind(**{**nothing, field: "another"}), verify=True)
    error = caught.value
    assert (error.field, error.expected, error.found) == (field, "another", IDENTITY[field])
    assert error.path == str(file)
    with pytest.raises(CorruptEntry):
        load_kv_cache(file, expect=kind(**nothing), verify=True)


def test_all_of_them_at_once(file: Path) -> None:
    assert load_kv_cache(file, expect=Identity(**IDENTITY)).tokens == TOKENS
    assert load_kv_cache(file, expect=meta()).tokens == TOKENS


@pytest.mark.parametrize("field", FIELDS)
def test_an_absent_field_is_no_empty_one(field: str, tmp_path: Path) -> None:
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), meta(**{field: None}))
    save_kv_cache(tmp_path / "b.mlxkv", TOKENS, layers(9), meta(**{field: ""}))
    expected = Identity(**{**IDENTITY, field: ""})
    with pytest.raises(IdentityMismatch) as caught:
        load_kv_cache(tmp_path / "a.mlxkv", expect=expected)
    assert (caught.value.field, caught.value.expected, caught.value.found) == (field, "", None)
    assert load_kv_cache(tmp_path / "b.mlxkv", expect=expected).meta.identity == expected


@pytest.mark.parametrize("expect", ["model", {"model_id": "x"}, 3, ()])
def test_an_expectation_is_an_identity(file: Path, expect: Any) -> None:
    with pytest.raises(InvalidInput, match="expect must be an Identity or a Meta"):
        load_kv_cache(file, expect=expect)


# ---- the model


class Model:
    def __init__(self, *caches: Any) -> None:
        self.caches = list(caches)

    def make_cache(self) -> list[Any]:
        return self.caches


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_number_of_layers_must_be_the_models(file: Path, count: int) -> None:
    caches = [kvcodecs.KVCache() for _ in range(count)]
    damage(file)
    for model in (caches, Model(*caches)):
        with pytest.raises(IdentityMismatch, match="another number of layers") as caught:
            load_kv_cache(file, model, verify=True)
        error = caught.value
        assert (error.field, error.expected, error.found, error.path) == ("layers", count, 2, str(file))


MISFITS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "a recurrent layer": (lambda: kv(9), kvcodecs.RecurrentCache, "kind"),
    "a layer with tokens": (lambda: ssm(9), kvcodecs.KVCache, "kind"),
    "another window": (lambda: ring(8), lambda: kvcodecs.RotatingKVCache(16), "rotating.maxSize"),
    "a latent layer": (lambda: kv(9), lambda: kvcodecs.MLACache(16, 8), "kind"),
    "other groups": (lambda: kv(9, dim=64).to_quantized(32, 4), lambda: quantized(64, 4), "qkv.groupSize"),
    "other bits": (lambda: kv(9, dim=64).to_quantized(32, 4), lambda: quantized(32, 8), "qkv.bits"),
}


def ring(max_size: int) -> Any:
    cache = kvcodecs.RotatingKVCache(max_size)
    cache.update_and_fetch(mx.ones((1, 1, 9, 4)), mx.ones((1, 1, 9, 4)))
    return cache


def quantized(group_size: int, bits: int) -> Any:
    return kvcodecs.QuantizedKVCache(group_size, bits)


@pytest.mark.parametrize(("stored", "prototype", "field"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("layout", ["monolith", "rows"])
def test_a_layer_must_fit_its_prototype(stored: Any, prototype: Any, field: str, layout: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.mlxkv"
    save_kv_cache(path, TOKENS, [stored()], layout=layout)
    damage(path)
    with pytest.raises(IdentityMismatch) as caught:
        load_kv_cache(path, [prototype()], verify=True)
    assert (caught.value.field, caught.value.path) == (field, str(path))


def test_a_layer_that_was_quantized_while_running_fits(tmp_path: Path) -> None:
    cache = kv(9, dim=64).to_quantized(32, 4)
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, [cache])
    (loaded,) = load_kv_cache(tmp_path / "a.mlxkv", [kvcodecs.KVCache()]).caches
    assert facts(loaded) == facts(cache)


def test_the_prototypes_are_not_changed(file: Path) -> None:
    prototypes = [kvcodecs.KVCache(), kvcodecs.KVCache()]
    loaded = load_kv_cache(file, prototypes)
    assert [cache.offset for cache in prototypes] == [0, 0]
    assert not {id(cache) for cache in prototypes} & {id(cache) for cache in loaded.caches}


# ---- providers

ACME = CodecProvider("acme", kvcodecs.default_provider().codecs)


@pytest.mark.parametrize("layout", ["monolith", "rows"])
def test_a_file_of_another_provider_is_refused_by_name(layout: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.mlxkv"
    save_kv_cache(path, TOKENS, layers(9), layout=layout, provider=ACME)
    assert read_kv_header(path).codec_provider == "acme"
    assert load_kv_cache(path, provider=ACME).tokens == TOKENS
    with pytest.raises(UnsupportedFormat, match="another codec provider") as caught:
        load_kv_cache(path)
    assert (caught.value.expected, caught.value.found, caught.value.path) == ("mlx-cache-v5", "acme", str(path))


@pytest.mark.parametrize("name", ["v3-kv.mlxkv", "v3-nocodec-kv.mlxkv", "v5/nocodec-kv.mlxkv"])
def test_absence_of_an_id_means_the_first_provider(name: str) -> None:
    assert len(load_kv_cache(GOLDEN / name).tokens) == 5
    with pytest.raises(UnsupportedFormat):
        load_kv_cache(GOLDEN / name, provider=ACME)
    acme = CodecProvider("acme", ACME.codecs, reads=frozenset({"mlx-cache-v3"}))
    assert len(load_kv_cache(GOLDEN / name, provider=acme).tokens) == 5


@pytest.mark.parametrize("layout", ["monolith", "rows"])
def test_what_mlx_bun_does_not_know_does_not_bear_its_providers_name(layout: Any, tmp_path: Path) -> None:
    def provider_of(*caches: Any) -> str | None:
        save_kv_cache(tmp_path / "a.mlxkv", TOKENS, caches, layout=layout)
        assert [facts(one) for one in load_kv_cache(tmp_path / "a.mlxkv").caches] == [facts(one) for one in caches]
        return read_kv_header(tmp_path / "a.mlxkv").codec_provider

    kept = kvcodecs.RotatingKVCache(8, keep=2)
    kept.update_and_fetch(mx.ones((1, 1, 9, 4)), mx.ones((1, 1, 9, 4)))
    assert provider_of(kv(9), ssm(9), ring(8)) == "mlx-cache-v3"
    assert provider_of(kv(9), kept) == "mlx-cache-v5"


# ---- arguments that make no sense


def refused(tmp_path: Path, **changes: Any) -> InvalidInput:
    arguments = {"path": tmp_path / "a.mlxkv", "tokens": TOKENS, "caches": layers(9), **changes}
    with pytest.raises(InvalidInput) as caught:
        save_kv_cache(**arguments)
    assert list(tmp_path.iterdir()) == []
    return caught.value


SENSELESS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown layout": ({"layout": "segments"}, "layout"),
    "no layout": ({"layout": None}, "layout"),
    "blocks of no bytes": ({"block_bytes": 0}, "block_bytes"),
    "blocks of True bytes": ({"block_bytes": True}, "block_bytes"),
    "blocks of half bytes": ({"block_bytes": 0.5}, "block_bytes"),
    "an identity in place of meta": ({"meta": Identity("m", None, None)}, "meta"),
    "a dictionary in place of meta": ({"meta": {"model_id": "m"}}, "meta"),
    "a model id that is no text": ({"meta": Meta(model_id=3)}, "model_id"),
    "a lone surrogate": ({"meta": Meta(ns="\ud800")}, "ns"),
    "a time before 1970": ({"meta": Meta(created_at_ms=-1)}, "createdAt"),
    "a time that is no number": ({"meta": Meta(created_at_ms="now")}, "createdAt"),
    "no tokens": ({"tokens": []}, "tokens"),
    "tokens that are none": ({"tokens": "abc"}, "tokens"),
    "tokens below zero": ({"tokens": [-1] * 9}, "tokens"),
    "fewer tokens than the caches hold": ({"tokens": TOKENS[:8]}, "tokens"),
    "more tokens than the caches hold": ({"tokens": [*TOKENS, 9]}, "tokens"),
    "no caches": ({"caches": []}, "caches"),
    "a cache in place of a list": ({"caches": kv(9)}, "caches"),
    "text in place of caches": ({"caches": "ab"}, "caches"),
    "something else in place of a cache": ({"caches": [kv(9), object()]}, "caches"),
    "caches that hold nothing": ({"caches": [kvcodecs.KVCache()]}, "caches"),
    "a recurrent cache that holds nothing": ({"caches": [kvcodecs.RecurrentCache()]}, "caches"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "field"), SENSELESS.values(), ids=SENSELESS)
@pytest.mark.parametrize("layout", ["monolith", "rows"])
def test_what_cannot_be_saved_leaves_nothing(changes: dict[str, Any], field: str, layout: str, tmp_path: Path) -> None:
    assert refused(tmp_path, **{"layout": layout, **changes}).field == field


@pytest.mark.parametrize("length", ["5", 5.0, True])
def test_a_length_is_a_number_of_tokens(file: Path, length: Any) -> None:
    with pytest.raises(InvalidInput, match="length must be a number of tokens"):
        load_kv_cache(file, length=length)


@pytest.mark.parametrize("model", [3, "model", object(), [3, 4]])
def test_a_model_makes_caches(file: Path, model: Any) -> None:
    with pytest.raises(InvalidInput):
        load_kv_cache(file, model)


def test_a_length_that_cannot_be_is_told_with_the_file_or_the_entry(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_kv_cache(file, length=10)
    assert (caught.value.path, caught.value.entry_id, caught.value.found) == (str(file), None, 10)
    with Store(tmp_path / "store", durability="none") as store:
        entry_id = store.save(TOKENS, layers(9), Identity("m", None, None)).entry_id
        with pytest.raises(InvalidInput) as caught:
            store.load(entry_id, length=10)
    assert (caught.value.path, caught.value.entry_id) == (None, entry_id)


@pytest.mark.parametrize("caches", [[3], [kv(9), object()], [kvcodecs.RecurrentCache()]])
def test_what_cannot_be_cloned_says_so(caches: list[Any]) -> None:
    with pytest.raises(InvalidInput):
        clone_kv_caches(caches)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Missing is the caller's business; anything else that stands there is a corrupt entry."""
    for read in (load_kv_cache, read_kv_header):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none.mlxkv")
        with pytest.raises(CorruptEntry, match="not a regular file"):
            read(tmp_path)
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9))
    (tmp_path / "link.mlxkv").symlink_to(tmp_path / "a.mlxkv")
    os.mkfifo(tmp_path / "pipe.mlxkv")
    for name in ("link.mlxkv", "pipe.mlxkv"):
        with pytest.raises(CorruptEntry, match="not a regular file"):
            load_kv_cache(tmp_path / name)


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    for layout in ("monolith", "rows"):
        with pytest.raises(FileNotFoundError):
            save_kv_cache(tmp_path / "none" / "a.mlxkv", TOKENS, layers(9), layout=layout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a" * 249 + ".mlxkv", "ä" * 124 + ".mlxkv", ".mlxkv", "no suffix", "-x\n"])
def test_any_name_that_the_file_system_takes(name: str, tmp_path: Path) -> None:
    for layout in ("monolith", "rows"):
        save_kv_cache(tmp_path / name, TOKENS, layers(9), layout=layout)
        assert load_kv_cache(tmp_path / name).tokens == TOKENS
    assert {path.name for path in tmp_path.iterdir()} == {name, "blocks"}


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_kv_cache("a.mlxkv", TOKENS, layers(9), layout="rows")
    assert load_kv_cache("a.mlxkv").tokens == TOKENS
    assert {path.name for path in tmp_path.iterdir()} == {"a.mlxkv", "blocks"}
