"""What went wrong once with files, each with its whole kind."""

import asyncio
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import kvcodecs
from blockstore import (
    Attachment,
    CacheMiss,
    CorruptEntry,
    InvalidInput,
    Meta,
    Store,
    UnsupportedFormat,
    load_kv_cache,
    save_kv_cache,
    save_kv_cache_async,
)
from blockstore.files import load_kv_cache_async
from format.headers import changed, pack, rows
from kvcodecs.algebra import CodecError, CodecProvider
from token_caches import IDENTITY, plain, small_store

TOKENS = list(range(20))
META = Meta("m", "c", "t", "")


def recurrent(seed: int = 0) -> Any:
    cache = kvcodecs.RecurrentCache()
    cache[0] = mx.random.normal((1, 3, 4), key=mx.random.key(seed))
    cache[1] = mx.random.normal((1, 2, 4, 4), key=mx.random.key(seed + 1))
    return cache


@pytest.mark.mlx_lm
def test_ssm_goes_on_in_a_model_that_writes_into_its_own_class_alone(tmp_path: Path) -> None:
    """mamba updates an ArraysCache and nothing else: with another class the second step would be wrong."""
    from mlx_lm.models import mamba

    config = {
        "model_type": "mamba", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "state_size": 4,
        "num_hidden_layers": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4,
    }  # fmt: skip
    mx.random.seed(1)
    model = mamba.Model(mamba.ModelArgs.from_dict(config))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    live = model.make_cache()
    mx.eval(model(mx.array([prompt]), cache=live))
    foreign = []
    for layer in live:
        cache = kvcodecs.RecurrentCache()
        cache[0], cache[1] = layer[0], layer[1]
        foreign.append(cache)
    save_kv_cache(tmp_path / "a.mlxkv", prompt, foreign, META)
    loaded = load_kv_cache(tmp_path / "a.mlxkv", model)
    assert [type(cache) for cache in loaded.caches] == [type(cache) for cache in live]
    for token in (7, 8, 9, 3):
        wanted, found = model(mx.array([[token]]), cache=live), model(mx.array([[token]]), cache=loaded.caches)
        assert mx.array_equal(wanted, found)


def test_a_recurrent_cache_that_is_not_counted_takes_the_lists_length_each_time(tmp_path: Path) -> None:
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS[:5], [recurrent()], META)
    loaded = load_kv_cache(tmp_path / "a.mlxkv")
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS[:8], loaded.caches, META)
    assert load_kv_cache(tmp_path / "a.mlxkv").caches[0].offset == 8
    loaded.caches[0].advance(1)
    with pytest.raises(InvalidInput, match="does not encode the tokens"):
        save_kv_cache(tmp_path / "a.mlxkv", TOKENS[:8], loaded.caches, META)


@pytest.mark.parametrize("inside", ["", "entries", "entries/scope"])
def test_rows_are_not_written_into_a_store(tmp_path: Path, inside: str) -> None:
    with small_store(tmp_path / "s") as store:
        saved = store.save(TOKENS, plain(TOKENS), IDENTITY)
        folder = tmp_path / "s" / inside
        folder.mkdir(exist_ok=True)
        with pytest.raises(InvalidInput, match="into a store"):
            save_kv_cache(folder / "x.mlxkv", TOKENS, plain(TOKENS), META, layout="rows")
        with pytest.raises(InvalidInput, match="into a store"):
            store.export_entry(saved.entry_id, folder, layout="rows")
        assert store.load(saved.entry_id).token_count == 20


def test_a_damaged_block_of_the_right_size_is_written_again(tmp_path: Path) -> None:
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, plain(TOKENS), META, layout="rows")
    for block in (tmp_path / "blocks").iterdir():
        block.write_bytes(bytes(block.stat().st_size))
    with pytest.raises(CorruptEntry):
        load_kv_cache(tmp_path / "a.mlxkv")
    save_kv_cache(tmp_path / "b.mlxkv", TOKENS, plain(TOKENS), META, layout="rows")
    for name in ("a.mlxkv", "b.mlxkv"):
        assert load_kv_cache(tmp_path / name).token_count == 20


def test_a_linked_blocks_directory_is_not_followed(tmp_path: Path) -> None:
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, plain(TOKENS), META, layout="rows")
    (tmp_path / "blocks").rename(tmp_path / "elsewhere")
    (tmp_path / "blocks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheMiss, match="symbolic link"):
        load_kv_cache(tmp_path / "a.mlxkv")
    with pytest.raises(InvalidInput, match="symbolic link"):
        save_kv_cache(tmp_path / "b.mlxkv", TOKENS, plain(TOKENS), META, layout="rows")


@pytest.mark.parametrize(
    "change",
    [{"codecProvider": " "}, {"codecProvider": ""}, {"caches": []}, {"tokens": [], "caches": []}],
    ids=["blank id", "empty id", "no caches", "no tokens"],
)
def test_what_no_load_would_serve_from_is_not_imported(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "a.mlxkv").write_bytes(pack(changed(rows(), attachments=[], **change)))
    with small_store(tmp_path / "s") as store:
        with pytest.raises(UnsupportedFormat):
            store.import_file(tmp_path / "a.mlxkv")
        assert store.entries() == []


def test_clones_of_attachments_leave_each_other_alone() -> None:
    tensor = mx.zeros((3,))
    meta = Meta("m", attachments=(Attachment("s", {"a": [1]}, (tensor,)),))
    copy = meta.clone()
    tensor[0] = 7
    meta.attachments[0].metadata["a"].append(2)
    assert copy.attachments[0].metadata == {"a": [1]}
    assert copy.attachments[0].tensors[0].tolist() == [0, 0, 0]


def test_a_cancelled_load_ends_soon(tmp_path: Path) -> None:
    caches = [kvcodecs.KVCache()]
    keys = mx.random.normal((1, 8, 4096, 128))
    caches[0].update_and_fetch(keys, keys)
    save_kv_cache(tmp_path / "a.mlxkv", range(4096), caches, META, sync=False)

    async def cancelled() -> float:
        task = asyncio.create_task(load_kv_cache_async(tmp_path / "a.mlxkv", verify=True))
        await asyncio.sleep(0.05)
        began = time.perf_counter()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.perf_counter() - began

    began = time.perf_counter()
    load_kv_cache(tmp_path / "a.mlxkv", verify=True)
    whole_s = time.perf_counter() - began
    assert asyncio.run(cancelled()) < max(whole_s / 2, 0.3)


def test_a_provider_is_a_fixed_table() -> None:
    codecs = list(kvcodecs.default_provider().codecs)
    provider = CodecProvider("mine", codecs)  # type: ignore[arg-type]  # a list, on purpose
    count = len(codecs)
    codecs.clear()
    assert len(provider.codecs) == count
    hash(provider)
    wrong: list[Any] = [(None, ()), (5, ()), ("a", [1]), ("a", (), "mlx-cache-v3")]
    for arguments in wrong:
        with pytest.raises(CodecError):
            CodecProvider(*arguments)


def test_attachments_of_a_wrong_type_are_named(tmp_path: Path) -> None:
    wrong: list[Any] = [5, Attachment("s")]
    with Store(tmp_path / "s", durability="none") as store:
        for attachments in wrong:
            with pytest.raises(InvalidInput, match="attachments"):
                store.save(TOKENS, plain(TOKENS), IDENTITY, attachments=attachments)


def test_an_async_save_needs_a_path_with_a_name(tmp_path: Path) -> None:
    with pytest.raises((InvalidInput, OSError)):
        asyncio.run(save_kv_cache_async("", TOKENS, plain(TOKENS), META, layout="rows"))
