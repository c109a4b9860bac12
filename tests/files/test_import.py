"""Files into a store: each once, under its own identity, whatever its version; the files stay as they are."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvcodecs
from blockstore import (
    CacheMiss,
    CorruptEntry,
    Identity,
    Store,
    StoreFull,
    UnsupportedFormat,
    load_kv_cache,
    moving,
    read_kv_header,
    save_kv_cache,
)
from blockstore.moving import Imported, cache_files
from cache_cases import CASES, facts, token_count
from files.kit import CHECKPOINT, GOLDEN, LOADABLE, MANIFEST, attachments, layers, meta, plain_attachments, ssm, tree
from kvcodecs.algebra import CodecProvider
from store_kit import assert_clean, assert_exact, block_names, lease_folders

pytestmark = pytest.mark.mlx_lm
TOKENS = list(range(9))
each_golden = pytest.mark.parametrize("name", MANIFEST)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store", durability="none", span=4, block_bytes=1024) as store:
        yield store


def write(path: Path, seed: int = 0, layout: Any = "monolith", tokens: int = 9, **changes: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    save_kv_cache(path, range(tokens), layers(tokens, seed), meta(**changes), layout=layout, block_bytes=300)
    return path


def assert_holds(store: Store, done: Imported, path: Path) -> None:
    """The entry is what the file is."""
    stored, file = store.load(done.entry_id), load_kv_cache(path, verify=True)
    assert [facts(cache) for cache in stored.caches] == [facts(cache) for cache in file.caches]
    assert plain_attachments(stored.attachments) == plain_attachments(file.attachments)
    assert stored.tokens == file.tokens
    assert without_tensors(stored.meta) == without_tensors(file.meta)


def without_tensors(found: Any) -> dict[str, Any]:
    return {**vars(found), "attachments": None}


# ---- one file


@each_golden
def test_every_golden_file(name: str, store: Store) -> None:
    status, data = (GOLDEN / name).stat(), (GOLDEN / name).read_bytes()
    done = store.import_file(GOLDEN / name)
    assert (done.outcome, done.path) == ("imported", str(GOLDEN / name))
    (entry,) = store.entries()
    header = read_kv_header(GOLDEN / name)
    assert (entry.entry_id, entry.token_count) == (done.entry_id, len(header.tokens))
    assert (entry.model_id, entry.ns, entry.created_at_ms) == (header.model_id, header.ns, 1760000000123)
    assert done.saved is not None
    assert done.saved.logical_bytes == entry.logical_bytes
    if name in LOADABLE:
        assert_holds(store, done, GOLDEN / name)
    assert_clean(store)
    # Once more: nothing happens.
    before = tree(Path(store.root))
    assert store.import_file(str(GOLDEN / name)) == Imported(str(GOLDEN / name), "present", done.entry_id)
    after = tree(Path(store.root))
    assert {path: data for path, data in after.items() if not path.startswith("index/")} == {
        path: data for path, data in before.items() if not path.startswith("index/")
    }
    assert lease_folders(store) == []
    assert ((GOLDEN / name).stat().st_mtime_ns, (GOLDEN / name).read_bytes()) == (status.st_mtime_ns, data)


def test_all_of_them_one_after_the_other(store: Store) -> None:
    """They have one identity and few lengths: of those with equal tokens the first one stays, being as new."""
    expected: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name in MANIFEST:
        header = read_kv_header(GOLDEN / name)
        key = (header.model_id, header.config_fingerprint, header.tokenizer_hash, header.ns, header.tokens)
        standing = first.setdefault(key, name)
        same = described(standing) == described(name)
        expected[name] = "imported" if standing == name else "present" if same else "superseded"
    found = {name: store.import_file(GOLDEN / name).outcome for name in MANIFEST}
    assert found == expected
    assert set(found.values()) == {"imported", "present", "superseded"}
    assert len(store.entries()) == len(first)
    assert_exact(store)
    assert_clean(store)


def described(name: str) -> Any:
    return MANIFEST[name]["caches"], MANIFEST[name]["attachments"]


def test_everything_that_a_file_says_is_kept(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.mlxkv", attachments=attachments(), generation_checkpoint=CHECKPOINT)
    done = store.import_file(path)
    assert_holds(store, done, path)
    assert store.load(done.entry_id).meta.generation_checkpoint == CHECKPOINT
    assert not store.entry(done.entry_id).shortens
    match = store.find(range(10), Identity("org/model", "config", "tokenizer", "prüfung"))
    assert match is not None
    assert (match.entry_id, match.length) == (done.entry_id, 9)


def test_an_absent_identity_stays_absent(store: Store, tmp_path: Path) -> None:
    nothing = dict.fromkeys(("model_id", "config_fingerprint", "tokenizer_hash", "ns"))
    done = store.import_file(write(tmp_path / "a.mlxkv", **nothing))
    assert store.find(range(9), Identity("", "", "", "")) is None
    match = store.find(range(9), Identity(None, None, None, None))
    assert match is not None
    assert match.entry_id == done.entry_id


def test_it_is_found_and_shortened_as_what_was_saved_here(store: Store, tmp_path: Path) -> None:
    store.import_file(write(tmp_path / "a.mlxkv", tokens=40))
    restored = store.restore([*range(17), 99, 98], Identity("org/model", "config", "tokenizer", "prüfung"))
    assert restored is not None
    assert [facts(cache) for cache in restored.caches] == [facts(cache) for cache in layers(17)]


# ---- deduplication


def test_blocks_are_shared_across_versions_and_with_what_was_saved_here(store: Store, tmp_path: Path) -> None:
    saved = store.save(TOKENS, layers(9), Identity("here", None, None))
    blocks = block_names(store)
    for number, layout in enumerate(("monolith", "rows")):
        done = store.import_file(write(tmp_path / f"{layout}.mlxkv", layout=layout, ns=str(number)))
        assert done.saved is not None
        assert (done.saved.blocks_written, done.saved.reused_bytes) == (0, saved.logical_bytes)
        assert done.saved.written_bytes == Path(done.saved.path).stat().st_size
    assert block_names(store) == blocks
    assert_exact(store)


def test_a_longer_file_writes_what_is_new(store: Store, tmp_path: Path) -> None:
    first = store.import_file(write(tmp_path / "a.mlxkv", tokens=40)).saved
    second = store.import_file(write(tmp_path / "b.mlxkv", tokens=44, layout="rows")).saved
    assert first is not None
    assert second is not None
    assert second.reused_bytes == first.logical_bytes
    assert second.logical_bytes - second.reused_bytes == 2 * 2 * 2 * 4 * 8 * 4


@pytest.mark.parametrize("kind", ["rotating: not full, token by token", "rotating-qkv: trimmed"])
def test_rows_of_a_ring_that_hold_nothing_are_left_behind(kind: str, store: Store, tmp_path: Path) -> None:
    caches = CASES[f"ours {kind}"]()
    count = token_count(caches)
    save_kv_cache(tmp_path / "a.mlxkv", range(count), caches)
    assert read_kv_header(tmp_path / "a.mlxkv").caches[0].tensors[0].shape[2] >= count
    done = store.import_file(tmp_path / "a.mlxkv")
    stored = store.load(done.entry_id)
    assert stored.header.caches[0].tensors[0].shape[2] == count
    assert [facts(cache) for cache in stored.caches] == [facts(cache) for cache in CASES[f"ours {kind}"]()]


# ---- an entry of equal identity and tokens


@pytest.mark.parametrize(
    ("later", "alike", "outcome"),
    [
        (1, True, "imported"),
        (1, False, "imported"),
        (0, True, "present"),
        (0, False, "superseded"),
        (-1, True, "superseded"),
        (-1, False, "superseded"),
    ],
)
@pytest.mark.parametrize("layout", ["monolith", "rows"])
def test_only_a_later_file_replaces(
    later: int, alike: bool, outcome: str, layout: str, store: Store, tmp_path: Path
) -> None:
    """alike: to judge by their headers. What was saved in the same millisecond is the same."""
    first = store.import_file(write(tmp_path / "a.mlxkv", created_at_ms=1000))
    more = {} if alike else {"attachments": attachments()}
    path = write(tmp_path / "b.mlxkv", seed=5, layout=layout, created_at_ms=1000 + later, **more)
    done = store.import_file(path)
    assert done.outcome == outcome
    (entry,) = store.entries()
    assert entry.entry_id == done.entry_id
    assert (done.saved is None) == (outcome != "imported")
    if outcome == "imported":
        assert done.entry_id != first.entry_id
        assert_holds(store, done, path)
    else:
        assert done.entry_id == first.entry_id
        assert_holds(store, first, tmp_path / "a.mlxkv")
    assert store.import_file(path).outcome == ("present" if outcome == "imported" else outcome)
    store.gc()
    assert_exact(store)


def test_an_entry_that_nobody_can_read_is_replaced(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.mlxkv")
    for damage in (lambda file: file.write_bytes(file.read_bytes()[:50]), lambda file: file.unlink()):
        done = store.import_file(path)
        assert done.saved is not None
        damage(Path(done.saved.path))
        again = store.import_file(path)
        assert (again.outcome, again.entry_id == done.entry_id) == ("imported", False)
        assert_holds(store, again, path)
        store.remove(again.entry_id)


def test_importing_heals_what_shares_its_blocks(store: Store, tmp_path: Path) -> None:
    saved = store.save(TOKENS, layers(9), Identity("here", None, None))
    name = sorted(block_names(store))[0]
    (Path(store.root) / "blocks" / name).write_bytes(b"")
    store.import_file(write(tmp_path / "a.mlxkv"))
    assert [facts(cache) for cache in store.load(saved.entry_id).caches] == [facts(cache) for cache in layers(9)]


# ---- files that cannot be imported


@pytest.mark.parametrize("layout", ["monolith", "rows"])
def test_a_damaged_file_changes_nothing(layout: str, store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "files" / "a.mlxkv", layout=layout)
    damaged = path if layout == "monolith" else next((tmp_path / "files" / "blocks").iterdir())
    data = damaged.read_bytes()
    for bad in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], data[:40]):
        damaged.write_bytes(bad)
        with pytest.raises(CorruptEntry):
            store.import_file(path)
        assert (store.entries(), block_names(store), lease_folders(store)) == ([], set(), [])
    damaged.write_bytes(data)
    assert store.import_file(path).outcome == "imported"


def test_what_is_no_file(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.import_file(tmp_path / "none.mlxkv")
    (tmp_path / "a.mlxkv").symlink_to(GOLDEN / "v3-kv.mlxkv")
    os.mkfifo(tmp_path / "pipe.mlxkv")
    for path in (tmp_path, tmp_path / "a.mlxkv", tmp_path / "pipe.mlxkv"):
        with pytest.raises(CorruptEntry, match="not a regular file"):
            store.import_file(path)
    (tmp_path / "text.mlxkv").write_text("no cache")
    with pytest.raises(CacheMiss):
        store.import_file(tmp_path / "text.mlxkv")


def test_a_store_without_room(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mlxkv")
    with Store(tmp_path / "small", durability="none", max_bytes=4096) as store:
        with pytest.raises(StoreFull):
            store.import_file(path)
        store.gc()
        assert (store.entries(), block_names(store)) == ([], set())


def test_header_and_tensors_are_of_one_file(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, other = write(tmp_path / "a.mlxkv", seed=1), write(tmp_path / "b.mlxkv", seed=2)
    expected = [facts(cache) for cache in layers(9, 1)]
    prepared = moving._prepared

    def replaced(*args: Any) -> Any:
        other.replace(path)
        return prepared(*args)

    monkeypatch.setattr(moving, "_prepared", replaced)
    loaded = store.load(store.import_file(path).entry_id)
    assert [facts(cache) for cache in loaded.caches] == expected


# ---- another provider


def test_a_file_of_another_provider_keeps_its_providers_id(tmp_path: Path) -> None:
    acme = CodecProvider("acme", kvcodecs.default_provider().codecs)
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, layers(9), meta(), provider=acme)
    identity = Identity("org/model", "config", "tokenizer", "prüfung")
    with Store(tmp_path / "store", durability="none") as store:
        done = store.import_file(tmp_path / "a.mlxkv")
        assert store.find(range(10), identity) is None
        with pytest.raises(UnsupportedFormat):
            store.load(done.entry_id)
        assert len(store.entries()) == 1  # not understood is not damaged
        assert store.import_file(tmp_path / "a.mlxkv").outcome == "present"
    with Store(tmp_path / "store", provider=acme) as store:
        restored = store.restore(range(10), identity)
        assert restored is not None
        assert [facts(cache) for cache in restored.caches] == [facts(cache) for cache in layers(9)]


# ---- directories


def test_a_directory_is_searched(tmp_path: Path) -> None:
    root = tmp_path / "files"
    wanted = [write(root / "a.mlxkv"), write(root / "sub" / "deep" / "b.mlxkv"), write(root / "sub" / "c.mlxkv")]
    for path in ("d.mlxkv.bak", "e.txt", ".f.mlxkv.0123456789ab.tmp", ".g.mlxkv", "h.tmp"):
        (root / path).write_bytes(wanted[0].read_bytes())
    (root / "folder.mlxkv").mkdir()
    outside = write(tmp_path / "outside" / "i.mlxkv")
    (root / "linked").symlink_to(outside.parent)
    assert set(cache_files([str(root)])) == {str(path) for path in wanted}
    assert list(cache_files([str(root)])) == list(cache_files([str(root)]))
    # What is named is taken, whatever it is called; what is not there is left to the reader.
    named = [str(root / "d.mlxkv.bak"), str(tmp_path / "none")]
    assert list(cache_files([*named, str(root / "sub")])) == [*named, str(wanted[2]), str(wanted[1])]


def test_a_v5_directory_as_mlx_bun_has_it(store: Store) -> None:
    names = [name for name in MANIFEST if name.startswith("v5/")]
    found = list(cache_files([str(GOLDEN / "v5")]))
    assert sorted(found) == sorted(str(GOLDEN / name) for name in names)
    before = {path: path.stat().st_mtime_ns for path in (GOLDEN / "v5").rglob("*")}
    outcomes = {store.import_file(path).outcome for path in found}
    assert outcomes == {"imported", "superseded"}
    assert {path: path.stat().st_mtime_ns for path in (GOLDEN / "v5").rglob("*")} == before
    assert_clean(store)


@pytest.mark.parametrize("hash_name", ["blake3", "sha256"])
@pytest.mark.parametrize("layout", ["segments", "rows"])
def test_the_entries_of_another_store(hash_name: str, layout: str, store: Store, tmp_path: Path) -> None:
    with Store(tmp_path / "other", durability="none", hash=hash_name, span=8, block_bytes=2048) as other:
        saved = [
            other.save(range(n), [*layers(n), ssm(n)], Identity(f"model {n}", None, None), layout=layout).entry_id
            for n in (9, 20)
        ]
        other.save(
            TOKENS,
            layers(9),
            Identity("attached", "c", "t"),
            attachments=attachments(),
            generation_checkpoint=CHECKPOINT,
        )
        before = tree(tmp_path / "other")
        done = [store.import_file(path) for path in cache_files([str(tmp_path / "other" / "entries")])]
        assert {one.outcome for one in done} == {"imported"}
        assert tree(tmp_path / "other") == before
        assert not {one.entry_id for one in done} & set(saved)
        for mine, theirs in zip(sorted_entries(store), sorted_entries(other), strict=True):
            assert [facts(c) for c in mine.caches] == [facts(c) for c in theirs.caches]
            assert plain_attachments(mine.attachments) == plain_attachments(theirs.attachments)
            assert without_tensors(mine.meta) == without_tensors(theirs.meta)
    assert {store.import_file(one.path).outcome for one in done} == {"present"}
    assert_clean(store)


def sorted_entries(store: Store) -> list[Any]:
    return [store.load(one.entry_id) for one in sorted(store.entries(), key=lambda one: str(one.model_id))]


def test_its_own_entries_are_there_already(store: Store) -> None:
    saved = store.save(TOKENS, layers(9), Identity("m", None, None))
    done = store.import_file(saved.path)
    assert (done.outcome, done.entry_id) == ("present", saved.entry_id)


def test_a_copy_of_an_entries_folder_needs_its_blocks(store: Store, tmp_path: Path) -> None:
    with Store(tmp_path / "other", durability="none") as other:
        saved = other.save(TOKENS, layers(9), Identity("m", None, None))
    shutil.copytree(tmp_path / "other" / "entries", tmp_path / "copy" / "entries")
    (path,) = cache_files([str(tmp_path / "copy")])
    with pytest.raises(CorruptEntry, match="a block is missing"):
        store.import_file(path)
    shutil.copytree(tmp_path / "other" / "blocks", tmp_path / "copy" / "blocks")
    assert store.import_file(path).outcome == "imported"
    assert Path(path).name == f"{saved.entry_id}.mlxkv"


def test_what_an_import_says_can_be_written_as_json(store: Store, tmp_path: Path) -> None:
    done = msgspec.to_builtins(store.import_file(write(tmp_path / "a.mlxkv")))
    assert set(done) == {"path", "outcome", "entry_id", "saved"}
    assert msgspec.json.decode(msgspec.json.encode(done)) == done
