"""import of a prompt cache file of mlx-lm's, which is told whose it is and what it encodes."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from blockstore import Entry, Store, identity_of, load_prompt_cache, save_prompt_cache
from cache_cases import feed
from prompt_files.samples import GOLDEN, RELEASES, TOKENS, every_class
from store_kit import all_facts
from test_docs import small_model

pytestmark = pytest.mark.mlx_lm
IDS = list(range(7, 7 + TOKENS))
WHOSE = ["--model-id", "org/tiny", "--config-fingerprint", "c", "--tokenizer-hash", "t", "--ns", "me"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(IDS))
    return str(path)


def sample(release: str, name: str = "every-class") -> str:
    return str(GOLDEN / release / f"{name}.safetensors")


def entries(root: Path) -> list[Entry]:
    with Store(root, create=False) as store:
        return store.entries()


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_of_either_release_becomes_an_entry(command: Any, root: Path, tokens: str, release: str) -> None:
    outcome = command("import", sample(release), "--tokens", tokens, *WHOSE, root=root)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.lines[0].startswith("imported 1 file: ")
    (entry,) = entries(root)
    assert (entry.model_id, entry.ns, entry.token_count, entry.pinned) == ("org/tiny", "me", TOKENS, False)
    with Store(root) as store:
        loaded = store.load(entry.entry_id, every_class())
    assert loaded.tokens == IDS
    assert all_facts(loaded.caches) == all_facts(every_class())


def test_the_same_file_again_is_left_alone_and_a_younger_one_is_not(
    command: Any, root: Path, tokens: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "chat.safetensors")
    args = ["import", path, "--tokens", tokens, *WHOSE, "--json"]
    for seconds, outcome in [(1000, "imported"), (1000, "present"), (999, "superseded"), (1001, "imported")]:
        mlx_lm_cache.save_prompt_cache(path, [feed(mlx_lm_cache.KVCache(), TOKENS)])
        os.utime(path, (seconds, seconds))
        (found,) = command(*args, root=root).json["files"]
        assert found["outcome"] == outcome
        assert found["path"] == path
    assert [entry.created_at_ms for entry in entries(root)] == [1_001_000]


def test_a_pointer_is_imported_from_where_it_points(command: Any, root: Path, tokens: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.safetensors"
    save_prompt_cache(path, every_class(), store=tmp_path / "other")
    assert command("import", str(path), "--tokens", tokens, *WHOSE, root=root).code == 0
    (entry,) = entries(root)
    assert (entry.model_id, entry.token_count) == ("org/tiny", TOKENS)
    assert all_facts(load_prompt_cache(path)) == all_facts(every_class())


def test_the_model_names_the_identity(command: Any, root: Path, tokens: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    small_model(model)
    options = ["--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", "0", "--ns", "me"]
    outcome = command(
        "import", sample("0.31.3", "plain"), "--tokens", tokens, "--model", str(model), *options, root=root
    )
    assert (outcome.code, outcome.err) == (0, "")
    identity = identity_of(model, kv_bits=4, kv_group_size=32, quantized_kv_start=0, ns="me")
    with Store(root) as store:
        match = store.find([*IDS, 1], identity)
    assert match is not None
    assert match.length == TOKENS


@pytest.mark.parametrize("kind", ["int64", "uint16"])
def test_tokens_as_an_array(command: Any, root: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.array(IDS, kind))
    assert command("import", sample("0.31.3"), "--tokens", str(path), *WHOSE, root=root).code == 0
    with Store(root) as store:
        assert store.load(store.entries()[0].entry_id, every_class()).tokens == IDS


@pytest.mark.parametrize("text", ["", "{}", "[1, 2", "[1, -2]", '["a"]', "[1.5]", "[" * 100_000])
def test_tokens_that_are_no_list_of_ids(command: Any, root: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    outcome = command("import", sample("0.31.3"), "--tokens", str(path), *WHOSE, root=root)
    assert outcome.code in (1, 3)
    assert "tokens" in outcome.err
    assert not root.exists() or entries(root) == []


def test_an_array_that_claims_more_than_its_file_holds(command: Any, root: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(TOKENS, dtype="<i8"))
    path.write_bytes(path.read_bytes().replace(b"(11,)", b"(99,)"))
    outcome = command("import", sample("0.31.3"), "--tokens", str(path), *WHOSE, root=root)
    assert outcome.code == 3
    assert "not a list of tokens" in outcome.err


def test_tokens_of_another_number(command: Any, root: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text("[1, 2, 3]")
    outcome = command("import", sample("0.31.3"), "--tokens", str(path), *WHOSE, root=root)
    assert outcome.code == 1
    assert "does not encode the tokens given" in outcome.err
    assert f"expected {TOKENS} tokens, the cache's offset, found 3 tokens" in outcome.err
    assert entries(root) == []


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        ([sample("0.31.3"), *WHOSE], "does not say which tokens it encodes", "--tokens FILE"),
        ([sample("0.31.3"), "--tokens", "T"], "does not say whose it is", "--model DIR"),
        ([sample("0.31.3"), sample("0.32.2"), "--tokens", "T", *WHOSE], "one prompt cache file at a time", "one after"),
        ([str(GOLDEN.parent / "v3-kv.mlxkv"), "--tokens", "T"], "no .safetensors file is named", "leave the options"),
        ([sample("0.31.3"), "--tokens", "T", "--model", "/no/such/model"], "no such directory", ""),
        ([sample("0.31.3"), "--tokens", "/no/tokens", *WHOSE], "No such file", ""),
    ],
)
def test_what_is_missing_is_named(
    command: Any, root: Path, tokens: str, args: list[str], message: str, hint: str
) -> None:
    outcome = command("import", *[tokens if arg == "T" else arg for arg in args], root=root)
    assert outcome.code in (3, 8)
    assert message in outcome.err
    assert hint in outcome.err
    assert not root.exists()


def test_files_of_both_sorts_at_once(command: Any, root: Path, tokens: str) -> None:
    other = str(GOLDEN.parent / "v3-kv.mlxkv")
    outcome = command("import", other, sample("0.31.3"), "--tokens", tokens, *WHOSE, root=root)
    assert outcome.code == 0
    assert {entry.model_id for entry in entries(root)} == {"golden/tiny-1", "org/tiny"}


def test_a_file_that_lies_is_reported(command: Any, root: Path, tokens: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\xff" * 64)
    outcome = command("import", str(path), "--tokens", tokens, *WHOSE, root=root)
    assert outcome.code == 1
    assert outcome.err.startswith(f"blockstore: {path}: not a sound safetensors file (field header length")
