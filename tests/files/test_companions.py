"""What travels with caches: attachments and generation checkpoints, in every version and through a store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from blockstore import Attachment, Identity, InvalidInput, Meta, Store, load_kv_cache, save_kv_cache
from blockstore.records import GenerationCheckpoint
from cache_cases import facts
from files.kit import CHECKPOINT, attachments, layers, meta, plain_attachments, ssm
from store_kit import assert_clean, assert_exact

pytestmark = pytest.mark.mlx_lm
TOKENS = list(range(9))
LAYOUTS: dict[str, dict[str, Any]] = {
    "monolith": {"sync": False},
    "rows": {"layout": "rows", "sync": False},
    "tiny rows": {"layout": "rows", "block_bytes": 61, "sync": False},
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
ATTACHED_BYTES = sum(tensor.nbytes for one in attachments() for tensor in one.tensors)
CACHE_BYTES = 2 * 2 * 9 * 2 * 8 * 4
WHOLE = Identity("model", "config", None, "")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store", durability="none", span=4, block_bytes=1024) as store:
        yield store


# ---- files


@each_layout
@pytest.mark.parametrize("checkpoint", [None, CHECKPOINT])
@pytest.mark.parametrize("attached", [(), attachments()], ids=["plain", "attached"])
def test_both_come_back_with_the_caches(
    layout: dict[str, Any], checkpoint: GenerationCheckpoint | None, attached: tuple[Attachment, ...], tmp_path: Path
) -> None:
    about = meta(attachments=attached, generation_checkpoint=checkpoint)
    saved = save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), about, **layout)
    assert saved.logical_bytes == CACHE_BYTES + (ATTACHED_BYTES if attached else 0)
    loaded = load_kv_cache(tmp_path / "a.mlxkv", verify=True)
    assert loaded.header.format_version == (5 if "layout" in layout else 4 if attached else 3)
    assert plain_attachments(loaded.attachments) == plain_attachments(attached)
    assert loaded.meta.generation_checkpoint == checkpoint
    assert [facts(cache) for cache in loaded.caches] == [facts(cache) for cache in layers(9)]


@each_layout
def test_the_meta_that_was_loaded_saves_the_same_file(layout: dict[str, Any], tmp_path: Path) -> None:
    about = meta(attachments=attachments(), generation_checkpoint=CHECKPOINT)
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), about, **layout)
    loaded = load_kv_cache(tmp_path / "a.mlxkv")
    save_kv_cache(tmp_path / "b.mlxkv", loaded.tokens, loaded.caches, loaded.meta, **layout)
    assert (tmp_path / "a.mlxkv").read_bytes() == (tmp_path / "b.mlxkv").read_bytes()


@each_layout
def test_attachments_alone_keep_an_entry_whole(layout: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.mlxkv"
    for attached in (attachments(), (Attachment("without-tensors", None),)):
        save_kv_cache(path, TOKENS, layers(9), meta(attachments=attached), **layout)
        for length in (1, 4, 8):
            with pytest.raises(InvalidInput, match="9 tokens, all of it"):
                load_kv_cache(path, length=length)
        assert load_kv_cache(path, length=9).token_count == 9
    save_kv_cache(path, TOKENS, layers(9), meta(), **layout)
    assert load_kv_cache(path, length=4).token_count == 4


@each_layout
def test_a_shorter_load_has_no_checkpoint(layout: dict[str, Any], tmp_path: Path) -> None:
    """It says what followed the whole entry; saved again with fewer tokens it would be false."""
    path = tmp_path / "a.mlxkv"
    save_kv_cache(path, TOKENS, layers(9), meta(generation_checkpoint=CHECKPOINT), **layout)
    assert load_kv_cache(path, length=9).meta.generation_checkpoint == CHECKPOINT
    shorter = load_kv_cache(path, length=8)
    assert shorter.header.generation_checkpoint == CHECKPOINT
    assert shorter.meta == meta()


@each_layout
def test_tensors_of_any_layout_in_memory(layout: dict[str, Any], tmp_path: Path) -> None:
    base = mx.arange(24, dtype=mx.float16).reshape(2, 3, 4)
    tensors = (
        base.transpose(2, 0, 1),
        base[:, ::2, 1:],
        mx.broadcast_to(base[0, 0], (3, 4)),
        base[1:],
        mx.array(3.5, mx.bfloat16),
        mx.zeros((0,), mx.uint64),
        mx.array([1 + 2j]),
    )
    about = meta(attachments=(Attachment("strided", {}, tensors),))
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), about, **layout)
    loaded = load_kv_cache(tmp_path / "a.mlxkv", verify=True)
    assert plain_attachments(loaded.attachments) == plain_attachments(about.attachments)


@each_layout
def test_loaded_tensors_are_new_arrays(layout: dict[str, Any], tmp_path: Path) -> None:
    tensor = mx.arange(6)
    about = meta(attachments=(Attachment("draft", {}, (tensor,)),))
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), about, **layout)
    first, second = (load_kv_cache(tmp_path / "a.mlxkv").attachments[0].tensors[0] for _ in range(2))
    first[0] = 100
    assert (first.tolist()[0], second.tolist(), tensor.tolist()) == (100, [*range(6)], [*range(6)])


def test_the_first_attachment_tensor_follows_unaligned_and_the_others_do_not(tmp_path: Path) -> None:
    saved = save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), meta(attachments=attachments()))
    header = load_kv_cache(tmp_path / "a.mlxkv").header
    last = header.caches[-1].tensors[-1]
    first, *others = [slot for one in header.attachments for slot in one.tensors]
    assert first.off == last.off + last.bytes
    assert first.off % 16384 != 0
    assert [slot.off % 16384 for slot in others] == [0, 0, 0]
    assert saved.written_bytes == (tmp_path / "a.mlxkv").stat().st_size


# ---- a store


def save(store: Store, tokens: int, **more: Any) -> str:
    return store.save(range(tokens), layers(tokens), WHOLE, **more).entry_id


@pytest.mark.parametrize("layout", ["segments", "rows"])
def test_a_store_keeps_both(store: Store, layout: str) -> None:
    saved = store.save(
        TOKENS, layers(9), WHOLE, layout=layout, attachments=attachments(), generation_checkpoint=CHECKPOINT
    )
    assert saved.logical_bytes == CACHE_BYTES + ATTACHED_BYTES
    loaded = store.load(saved.entry_id)
    assert plain_attachments(loaded.attachments) == plain_attachments(attachments())
    assert loaded.meta.generation_checkpoint == CHECKPOINT
    assert loaded.meta.identity == WHOLE
    (entry,) = store.entries()
    assert (entry.logical_bytes, entry.shortens) == (CACHE_BYTES + ATTACHED_BYTES, False)
    assert store.stats().logical_bytes == saved.logical_bytes
    assert_exact(store)
    assert_clean(store)


def test_find_offers_an_entry_with_attachments_whole_or_not_at_all(store: Store) -> None:
    entry_id = save(store, 9, attachments=attachments())
    assert store.find(range(9), WHOLE) is None  # the last token of a prompt is never reused
    assert store.find([*range(8), 77, 78], WHOLE) is None
    match = store.find(range(10), WHOLE)
    assert match is not None
    assert (match.entry_id, match.length) == (entry_id, 9)
    assert plain_attachments(store.load(match).attachments) == plain_attachments(attachments())
    with pytest.raises(InvalidInput, match="all of it"):
        store.load(entry_id, length=8)


def test_an_entry_with_attachments_hides_no_other(store: Store) -> None:
    plain = save(store, 6)
    save(store, 9, attachments=attachments())
    match = store.find([*range(8), 77], WHOLE)
    assert match is not None
    assert (match.entry_id, match.length) == (plain, 6)
    restored = store.restore(range(20), WHOLE)
    assert restored is not None
    assert (restored.token_count, len(restored.attachments)) == (9, 3)


def test_a_checkpoint_alone_does_not_keep_an_entry_whole(store: Store) -> None:
    save(store, 9, generation_checkpoint=CHECKPOINT)
    match = store.find([*range(5), 77, 78], WHOLE)
    assert match is not None
    loaded = store.load(match)
    assert (loaded.token_count, loaded.meta.generation_checkpoint) == (5, None)


def test_equal_attachments_are_stored_once_and_go_with_the_last_entry(store: Store) -> None:
    one = store.save(TOKENS, layers(9), WHOLE, attachments=attachments())
    other = store.save(range(10), layers(10), WHOLE, attachments=attachments())
    assert other.reused_bytes > ATTACHED_BYTES
    store.remove(one.entry_id)
    store.gc()
    assert plain_attachments(store.load(other.entry_id).attachments) == plain_attachments(attachments())
    store.remove(other.entry_id)
    store.gc()
    assert store.stats().blocks == 0
    assert_exact(store)


def test_another_checkpoint_replaces_the_entry(store: Store) -> None:
    first = save(store, 9, generation_checkpoint=CHECKPOINT)
    second = save(store, 9)
    assert [entry.entry_id for entry in store.entries()] == [second]
    assert first != second
    assert store.load(second).meta.generation_checkpoint is None


def test_a_snapshot_holds_the_tensors_as_they_were(store: Store) -> None:
    tensor = mx.arange(6)
    prepared = store.prepare(TOKENS, layers(9), WHOLE, attachments=[Attachment("draft", {}, (tensor,))])
    tensor[0] = 100
    mx.eval(tensor)
    loaded = store.load(store.commit(prepared).entry_id)
    assert loaded.attachments[0].tensors[0].tolist() == [*range(6)]


def test_a_recurrent_cache_with_attachments(store: Store, tmp_path: Path) -> None:
    """No tensor of the entry has a token axis."""
    loaded = store.load(store.save(TOKENS, [ssm(9)], WHOLE, attachments=attachments()).entry_id)
    assert facts(loaded.caches[0]) == facts(ssm(9))
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, loaded.caches, loaded.meta)
    again = load_kv_cache(tmp_path / "a.mlxkv", verify=True)
    assert plain_attachments(again.attachments) == plain_attachments(attachments())


# ---- what is no attachment or checkpoint


def attached(schema: Any = "s", metadata: Any = None, tensors: Any = ()) -> Meta:
    return Meta(attachments=(Attachment(schema, metadata, tensors),))


def standing(key: Any = "k", prompt_tokens: Any = 1, seed: Any = 0) -> Meta:
    return Meta(generation_checkpoint=GenerationCheckpoint(key, "", prompt_tokens, 1, 1, seed, True))


def untyped(**fields: Any) -> Meta:
    return Meta(**fields)


WRONG = {
    "something else": untyped(attachments=("s",)),
    "a schema that is no text": attached(3),
    "a schema that no file can hold": attached("\ud800"),
    "metadata with keys that are no text": attached(metadata={1: 2}),
    "metadata that no JSON has": attached(metadata={"a": object()}),
    "metadata that is no number": attached(metadata=float("nan")),
    "an array in place of a list of them": attached(tensors=mx.ones(3)),
    "tensors of another library": attached(tensors=([1.0],)),
    "a checkpoint that is none": untyped(generation_checkpoint="k"),
    "a checkpoint that is a dictionary": untyped(generation_checkpoint=msgspec.to_builtins(CHECKPOINT)),
    "a checkpoint with a key that is no text": standing(key=3),
    "a checkpoint with a seed that is no number": standing(seed="x"),
    "a checkpoint below zero": standing(prompt_tokens=-1),
    "a seed of 54 bits": standing(seed=1 << 53),
}


@each_layout
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_no_reader_would_take_is_not_written(layout: dict[str, Any], wrong: Meta, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), wrong, **layout)
    assert list(tmp_path.iterdir()) == []


def test_one_attachment_is_no_list_of_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must be a list"):
        save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), untyped(attachments=Attachment("s")))


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_store_takes_none_of_it_either(store: Store, wrong: Meta) -> None:
    with pytest.raises(InvalidInput):
        save(store, 9, attachments=wrong.attachments, generation_checkpoint=wrong.generation_checkpoint)
    store.gc()
    assert store.entries() == []
    assert_exact(store)
