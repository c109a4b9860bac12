"""The golden files, loaded: every byte, and the same file again."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from blockstore import Meta, UnsupportedFormat, clone_kv_caches, load_kv_cache, read_kv_header, save_kv_cache
from blockstore.header import PREFIX_BYTES, decode_header, encode_header, header_bytes
from blockstore.records import Header
from cache_cases import arrays_of, bits
from files.kit import GOLDEN, LOADABLE, MANIFEST, UNKNOWN_FIELD, golden_tensors, is_loadable, known_kinds, tree

pytestmark = pytest.mark.mlx_lm
each_file = pytest.mark.parametrize("name", MANIFEST)
# v3/v4 and v5 of those that this release loads.
each_monolith = pytest.mark.parametrize("name", [name for name in LOADABLE if MANIFEST[name]["version"] < 5])
each_rows = pytest.mark.parametrize("name", [name for name in LOADABLE if MANIFEST[name]["version"] == 5])


@each_file
@pytest.mark.parametrize("verify", [None, True, False])
def test_every_tensor_has_the_bytes_of_the_rule(name: str, verify: bool | None) -> None:
    if not is_loadable(name):
        with pytest.raises(UnsupportedFormat) as caught:
            load_kv_cache(GOLDEN / name, verify=verify)
        assert caught.value.field == "kind"
        assert caught.value.found in set(MANIFEST[name]["kinds"]) - known_kinds()
        return
    loaded = load_kv_cache(GOLDEN / name, verify=verify)
    file = MANIFEST[name]
    arrays = [array for cache in loaded.caches for array in arrays_of(cache)]
    arrays += [array for attachment in loaded.attachments for array in attachment.tensors]
    wanted = golden_tensors(name)
    # A cache may have room for more tokens than it holds.
    stored = [array[tuple(map(slice, shape))] for array, (shape, _, _) in zip(arrays, wanted, strict=True)]
    assert [bits(array) for array in stored] == wanted
    assert loaded.tokens == file["tokens"]
    assert [cache.offset for cache in loaded.caches] == [cache["offset"] for cache in file["caches"]]
    assert [(a.schema, a.metadata) for a in loaded.attachments] == [
        (a["schema"], a["metadata"]) for a in file["attachments"]
    ]


@each_file
def test_the_header_alone_can_be_read(name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    assert read_kv_header(GOLDEN / name) == decode_header(data, path=name, file_size=len(data))


def test_the_provider_decides_what_is_loaded() -> None:
    kinds = {kind for name in LOADABLE for kind in MANIFEST[name]["kinds"]}
    assert kinds == {kind for file in MANIFEST.values() for kind in file["kinds"]} & known_kinds()
    assert kinds >= {"kv", "rotating", "qkv", "rotating-qkv", "ssm"}


@each_monolith
@pytest.mark.parametrize("cloned", [False, True], ids=["loaded", "cloned"])
def test_load_and_save_give_the_same_monolith(name: str, cloned: bool, tmp_path: Path) -> None:
    loaded = load_kv_cache(GOLDEN / name)
    caches = clone_kv_caches(loaded.caches) if cloned else loaded.caches
    saved = save_kv_cache(tmp_path / "again.mlxkv", loaded.tokens, caches, loaded.meta)
    found, original = (tmp_path / "again.mlxkv").read_bytes(), (GOLDEN / name).read_bytes()
    assert found == as_we_write_it(original)
    assert (saved.written_bytes, saved.layout) == (len(found), "monolith")
    assert saved.logical_bytes == sum(len(data) for _, _, data in golden_tensors(name))
    assert saved.token_count == len(loaded.tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["again.mlxkv"]


@each_rows
@pytest.mark.parametrize("cloned", [False, True], ids=["loaded", "cloned"])
def test_load_and_save_give_the_same_header_and_blocks(name: str, cloned: bool, tmp_path: Path) -> None:
    loaded = load_kv_cache(GOLDEN / name)
    caches = clone_kv_caches(loaded.caches) if cloned else loaded.caches
    size = MANIFEST[name]["blockBytes"]
    saved = save_kv_cache(tmp_path / "a.mlxkv", loaded.tokens, caches, loaded.meta, layout="rows", block_bytes=size)
    found = tree(tmp_path)
    header = found.pop("a.mlxkv")
    assert header == as_we_write_it((GOLDEN / name).read_bytes())
    slots = [slot for part in (*loaded.header.caches, *loaded.header.attachments) for slot in part.tensors]
    digests = {block.hash for slot in slots for block in slot.blocks or ()}
    assert found == {f"blocks/{digest}": (GOLDEN / "v5" / "blocks" / digest).read_bytes() for digest in digests}
    assert saved.written_bytes == len(header) + sum(map(len, found.values()))


def test_all_of_them_in_one_directory_share_their_blocks(tmp_path: Path) -> None:
    """Written one after the other they leave the very directory that they came from, but for what is not loaded."""
    names = [name for name in LOADABLE if MANIFEST[name]["version"] == 5]
    written = 0
    for name in names:
        loaded, size = load_kv_cache(GOLDEN / name), MANIFEST[name]["blockBytes"]
        path = tmp_path / Path(name).name
        written += save_kv_cache(
            path, loaded.tokens, loaded.caches, loaded.meta, layout="rows", block_bytes=size
        ).written_bytes
    blocks = tree(tmp_path / "blocks")
    original = tree(GOLDEN / "v5" / "blocks")
    assert blocks == {name: original[name] for name in blocks}
    assert (len(blocks) == len(original)) == (known_kinds() >= {kind for f in MANIFEST.values() for kind in f["kinds"]})
    assert written == sum(map(len, tree(tmp_path).values()))


def as_we_write_it(original: bytes) -> bytes:
    """The file with what the manifest explains: a codecProvider where there was none, no field that nobody knows."""
    size = header_bytes(original[:PREFIX_BYTES], path="", file_size=len(original))
    header = decode_header(original, path="")
    again = encode_header(provided(header))
    if header.codec_provider is not None and UNKNOWN_FIELD not in original:
        assert again == original[:size]
    padding = b"" if header.format_version == 5 else bytes(-len(again) % 16384)
    tensors = b"" if header.format_version == 5 else original[-(-size // 16384) * 16384 :]
    return again + padding + tensors


def provided(header: Header) -> Header:
    return msgspec.structs.replace(header, codec_provider=header.codec_provider or "mlx-cache-v3")


def test_only_what_the_manifest_explains_is_written_differently() -> None:
    changed = [
        name for name in MANIFEST if as_we_write_it((GOLDEN / name).read_bytes()) != (GOLDEN / name).read_bytes()
    ]
    notes: dict[str, Any] = {name: MANIFEST[name].get("notes", "") for name in changed}
    assert {name for name in changed if MANIFEST[name]["codecProvider"] is None} | {"v3-mixed.mlxkv"} == set(changed)
    assert "unknown header field" in notes["v3-mixed.mlxkv"]


def test_meta_is_all_that_a_file_says_beside_tokens_and_caches() -> None:
    loaded = load_kv_cache(GOLDEN / "v3-minreuse-genckpt-kv.mlxkv")
    file = MANIFEST["v3-minreuse-genckpt-kv.mlxkv"]
    assert loaded.meta.generation_checkpoint is not None
    assert msgspec.to_builtins(loaded.meta.generation_checkpoint) == file["generationCheckpoint"]
    names = ("modelId", "configFingerprint", "tokenizerHash", "ns")
    assert dict(zip(names, vars(loaded.meta.identity).values(), strict=True)) == file["meta"]
    assert loaded.meta == Meta(
        *file["meta"].values(), generation_checkpoint=loaded.meta.generation_checkpoint, created_at_ms=1760000000123
    )
