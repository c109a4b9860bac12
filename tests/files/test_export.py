"""Entries out of a store, as files that mlx-bun opens: equal caches, refused kinds, shared blocks."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import kvcodecs
from blockstore import (
    CorruptEntry,
    EntryGone,
    Identity,
    InvalidInput,
    Store,
    load_kv_cache,
    read_kv_header,
    save_kv_cache,
)
from blockstore.entries import read_standing
from blockstore.files import FIRST_KINDS
from cache_cases import CASES, bits, facts, token_count
from files.kit import CHECKPOINT, GOLDEN, MANIFEST, attachments, kv, layers, meta, plain_attachments, tree
from files.test_golden_files import as_we_write_it
from kvcodecs.algebra import CodecProvider, SnapshotContext
from kvcodecs.entry import HeaderEntry
from store_kit import block_names

pytestmark = pytest.mark.mlx_lm
TOKENS = list(range(9))
WHOLE = Identity("org/model", "config", "tokenizer", "prüfung")
each_layout = pytest.mark.parametrize("layout", ["monolith", "rows"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("store")
    with Store(root, durability="none", span=4, block_bytes=1024) as store:
        yield store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store", durability="none", span=4, block_bytes=1024) as store:
        yield store


# ---- every kind


def saved(store: Store, name: str) -> tuple[str, HeaderEntry] | None:
    """A case in the store, with its first header entry; None for those that hold nothing."""
    caches = CASES[name]()
    try:
        entry_id = store.save(range(token_count(caches)), caches, WHOLE).entry_id
    except InvalidInput:
        return None
    return entry_id, read_standing(store.rooms, entry_id).caches[0]


def is_known(entry: HeaderEntry) -> bool:
    if entry.kind == "arrays":
        return entry.fields == {"slots": [True, True]}
    return entry.kind in FIRST_KINDS and "keep" not in entry.fields


STATES = [name for name in CASES if "fresh" not in name]
# One state of each class, the last one, stands for all where rows are cut.
CLASSES = {name.partition(":")[0]: name for name in STATES}.values()


@pytest.mark.parametrize(
    ("layout", "name"), [*(("monolith", name) for name in STATES), *(("rows", name) for name in CLASSES)]
)
def test_every_cache(layout: str, name: str, shared: Store, tmp_path: Path) -> None:
    found = saved(shared, name)
    if found is None:  # trimmed to nothing
        return
    entry_id, entry = found
    hybrid = name == "mlx-lm hybrid model"  # all of its layers are known
    if not is_known(entry) and not hybrid:
        with pytest.raises(InvalidInput, match=f"no cache of kind {entry.kind}") as caught:
            shared.export_entry(entry_id, tmp_path / "out", layout=layout)
        kind = f"{entry.kind} with keep" if "keep" in entry.fields else entry.kind
        assert (caught.value.entry_id, caught.value.found) == (entry_id, kind)
        assert list(tmp_path.iterdir()) == []
        return
    path = shared.export_entry(entry_id, tmp_path / "out", layout=layout)
    assert path == str(tmp_path / "out" / f"{entry_id}.mlxkv")
    file, stored = load_kv_cache(path, verify=True), shared.load(entry_id)
    assert file.tokens == stored.tokens
    assert file.header.codec_provider == "mlx-cache-v3"
    assert {leaf.kind for leaf in file.header.caches} <= FIRST_KINDS
    if "arrays" not in {leaf.kind for leaf in stored.header.caches}:
        assert [facts(cache) for cache in file.caches] == [facts(cache) for cache in stored.caches]
    # Into the layers of the model that made them they go as they came.
    prototypes = CASES[name]()
    assert states(load_kv_cache(path, prototypes).caches) == states(shared.load(entry_id, prototypes).caches)


def states(caches: list[Any]) -> list[Any]:
    """What every cache holds; both classes of recurrent caches alike."""
    return [[bits(cache[0]), bits(cache[1])] if hasattr(cache, "__getitem__") else facts(cache) for cache in caches]


def test_the_cases_hold_known_and_refused_kinds() -> None:
    """The test above would pass without either."""
    lists = [CASES[name]() for name in STATES]
    provider = kvcodecs.default_provider()
    entries = [provider.snapshot(caches, SnapshotContext(token_count(caches)))[0].entry for caches in lists]
    assert {entry.kind for entry in entries if is_known(entry)} == FIRST_KINDS | {"arrays"}
    assert {entry.kind for entry in entries if not is_known(entry)} == {
        "rotating", "rotating-qkv", "chunked", "arrays", "list",
    }  # fmt: skip


@pytest.mark.parametrize("name", MANIFEST)
def test_golden_files_come_out_as_they_went_in(name: str, store: Store, tmp_path: Path) -> None:
    """Whether or not this release has codecs for them. The other layout has the same tensors."""
    entry_id = store.import_file(GOLDEN / name).entry_id
    file, original = MANIFEST[name], read_kv_header(GOLDEN / name)
    for layout in ("monolith", "rows"):
        path = Path(store.export_entry(entry_id, tmp_path / layout, layout=layout))
        if (file["version"] == 5) == (layout == "rows") and file.get("blockBytes", 1 << 20) == 1 << 20:
            assert path.read_bytes() == as_we_write_it((GOLDEN / name).read_bytes())
        header = read_kv_header(path)
        assert header.format_version == (5 if layout == "rows" else 4 if original.attachments else 3)
        assert described(header) == described(original)
        with Store(tmp_path / f"{layout} again", durability="none", span=4, block_bytes=1024) as again:
            done = again.import_file(path)
            assert block_names(again) == block_names(store)
            assert again.entry(done.entry_id).logical_bytes == store.entry(entry_id).logical_bytes


def described(header: Any) -> Any:
    """What is said of everything but where the bytes are."""
    entries = [(e.kind, e.offset, e.fields, e.minimum_reusable_offset, shapes(e.tensors)) for e in header.caches]
    companions = [(a.schema, a.metadata, shapes(a.tensors)) for a in header.attachments]
    identity = header.model_id, header.config_fingerprint, header.tokenizer_hash, header.ns
    return identity, header.created_at, header.tokens, header.generation_checkpoint, entries, companions


def shapes(slots: Any) -> list[Any]:
    return [(slot.shape, slot.dtype, slot.bytes) for slot in slots]


# ---- arrays


def arrays(*slots: mx.array | None, **more: Any) -> Any:
    from mlx_lm.models.cache import ArraysCache

    cache = ArraysCache(len(slots), **more)
    for index, slot in enumerate(slots):
        cache[index] = slot
    return cache


@each_layout
def test_two_arrays_become_a_recurrent_cache(layout: str, store: Store, tmp_path: Path) -> None:
    states = mx.arange(24, dtype=mx.float32).reshape(1, 3, 8), mx.ones((1, 2, 4, 4), mx.bfloat16)
    entry_id = store.save(TOKENS, [arrays(*states), kv(9)], WHOLE).entry_id
    path = store.export_entry(entry_id, tmp_path, layout=layout)
    header = read_kv_header(path)
    assert [(entry.kind, entry.offset, entry.fields) for entry in header.caches] == [("ssm", 9, {}), ("kv", 9, {})]
    (recurrent, _) = load_kv_cache(path).caches
    assert isinstance(recurrent, kvcodecs.RecurrentCache)
    assert [bits(recurrent[0]), bits(recurrent[1])] == [bits(state) for state in states]
    (back, _) = load_kv_cache(path, [arrays(None, None), kvcodecs.KVCache()]).caches
    assert [bits(back[0]), bits(back[1])] == [bits(state) for state in states]


ONE = mx.ones((1, 2))
REFUSED_ARRAYS = {
    "one": lambda: arrays(ONE),
    "three": lambda: arrays(ONE, ONE, ONE),
    "one of two": lambda: arrays(ONE, None),
    "padded": lambda: arrays(ONE, ONE, left_padding=[0]),
}


@each_layout
@pytest.mark.parametrize("build", REFUSED_ARRAYS.values(), ids=REFUSED_ARRAYS)
def test_other_arrays_are_refused(layout: str, build: Any, store: Store, tmp_path: Path) -> None:
    entry_id = store.save(TOKENS, [kv(9), build()], WHOLE).entry_id
    with pytest.raises(InvalidInput, match="mlx-bun has no cache of kind arrays") as caught:
        store.export_entry(entry_id, tmp_path / "out", layout=layout)
    assert (caught.value.field, caught.value.found) == ("kind", "arrays")
    assert not (tmp_path / "out").exists()


# ---- the file


@each_layout
def test_it_is_the_file_that_a_save_would_have_written(layout: Any, store: Store, tmp_path: Path) -> None:
    more = {"attachments": attachments(), "generation_checkpoint": CHECKPOINT}
    entry_id = store.save(TOKENS, layers(9), WHOLE, **more).entry_id
    path = Path(store.export_entry(entry_id, tmp_path / "out", layout=layout))
    loaded = load_kv_cache(path)
    assert plain_attachments(loaded.attachments) == plain_attachments(attachments())
    assert loaded.meta.generation_checkpoint == CHECKPOINT
    assert loaded.meta.created_at_ms == store.entry(entry_id).created_at_ms
    assert loaded.meta.identity == WHOLE
    about = meta(created_at_ms=loaded.meta.created_at_ms, **more)
    save_kv_cache(tmp_path / "saved.mlxkv", TOKENS, layers(9), about, layout=layout)
    assert path.read_bytes() == (tmp_path / "saved.mlxkv").read_bytes()
    # Nothing of our own is said in it.
    text = path.read_bytes()[: 1 << 14]
    assert not [word for word in (b"madeWith", b"segments", b"blockHash", b'"axis"') if word in text]


@pytest.mark.parametrize("hash_name", ["blake3", "sha256"])
def test_blocks_bear_their_sha256_whatever_the_stores_own(hash_name: str, tmp_path: Path) -> None:
    with Store(tmp_path / "store", durability="none", hash=hash_name) as store:
        entry_id = store.save(TOKENS, layers(9), WHOLE, layout="rows").entry_id
        store.export_entry(entry_id, tmp_path / "out", layout="rows")
    (tmp_path / "saved").mkdir()
    save_kv_cache(tmp_path / "saved" / "a.mlxkv", TOKENS, layers(9), meta(), layout="rows")
    assert tree(tmp_path / "out" / "blocks") == tree(tmp_path / "saved" / "blocks")


@each_layout
def test_again_is_the_same_file(layout: str, store: Store, tmp_path: Path) -> None:
    entry_id = store.save(TOKENS, layers(9), WHOLE).entry_id
    path = store.export_entry(entry_id, tmp_path / "out" / "deep", layout=layout)
    before = tree(tmp_path / "out")
    assert store.export_entry(entry_id, str(tmp_path / "out" / "deep"), layout=layout) == path
    assert tree(tmp_path / "out") == before


def test_what_stands_in_the_folder_is_shared_and_not_touched(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_kv_cache(out / "a.mlxkv", TOKENS, layers(9), meta(), layout="rows")
    (out / "blocks" / ("0" * 64)).write_bytes(b"nobody's")
    (out / "notes.txt").write_text("mine")
    os.symlink("notes.txt", out / "link")
    before = {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in out.rglob("*") if path.is_file()}
    entry_id = store.save(TOKENS, [*layers(9), kv(9, seed=7)], WHOLE).entry_id
    path = store.export_entry(entry_id, out, layout="rows")
    after = {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in out.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before
    new = {new.relative_to(out).as_posix() for new in after.keys() - before.keys()}
    # Of six tensors two are new, with a block for each of two heads.
    assert Path(path).name in new
    assert len(new) == 1 + 4
    assert len(load_kv_cache(path).caches) == 3
    assert len(load_kv_cache(out / "a.mlxkv").caches) == 2


@each_layout
def test_the_store_is_not_changed(layout: str, store: Store, tmp_path: Path) -> None:
    entry_id = store.save(TOKENS, layers(9), WHOLE).entry_id
    before = tree(Path(store.root))
    store.export_entry(entry_id, tmp_path / "out", layout=layout)
    assert tree(Path(store.root)) == before


# ---- what cannot be exported


def test_a_provider_that_mlx_bun_does_not_know(tmp_path: Path) -> None:
    acme = CodecProvider("acme", kvcodecs.default_provider().codecs)
    with Store(tmp_path / "store", durability="none", provider=acme) as store:
        entry_id = store.save(TOKENS, layers(9), WHOLE).entry_id
        with pytest.raises(InvalidInput, match="codec provider acme") as caught:
            store.export_entry(entry_id, tmp_path / "out")
    assert (caught.value.field, caught.value.found) == ("codec_provider", "acme")
    assert not (tmp_path / "out").exists()


@each_layout
def test_damage_is_found_and_leaves_no_file(layout: str, store: Store, tmp_path: Path) -> None:
    entry_id = store.save(TOKENS, layers(9), WHOLE).entry_id
    block = Path(store.root) / "blocks" / sorted(block_names(store))[0]
    data = block.read_bytes()
    for bad in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], None):
        if bad is None:
            block.unlink()
        else:
            block.write_bytes(bad)
        with pytest.raises(CorruptEntry):
            store.export_entry(entry_id, tmp_path / "out", layout=layout)
        assert tree(tmp_path / "out") == {}
    block.write_bytes(data)
    assert store.export_entry(entry_id, tmp_path / "out", layout=layout)


def test_arguments_that_make_no_sense(store: Store, tmp_path: Path) -> None:
    entry_id = store.save(TOKENS, layers(9), WHOLE).entry_id
    for layout in ("segments", "", "v3"):
        with pytest.raises(InvalidInput, match="unknown layout"):
            store.export_entry(entry_id, tmp_path / "out", layout=layout)
    for bad in ("", "abcd", entry_id.upper() if entry_id.upper() != entry_id else "X" * 32, "../" + entry_id):
        with pytest.raises(InvalidInput):
            store.export_entry(bad, tmp_path / "out")
    with pytest.raises(EntryGone):
        store.export_entry("0" * 32, tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        store.export_entry(entry_id, tmp_path / "file")
    assert not (tmp_path / "out").exists()
