"""Cases 6 to 9 and 14: a load that fails gives nothing, changes nothing, and is not tried for ever."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockstore import (
    CacheMiss,
    CorruptEntry,
    EntryGone,
    IdentityMismatch,
    Meta,
    Store,
    files,
    load_kv_cache,
    placing,
    save_kv_cache,
)
from blockstore import fs as fs_module
from blockstore.header import PREFIX_BYTES
from cases.kit import (
    BAD,
    TOKENS,
    BadReads,
    assert_sound,
    save,
)
from format.headers import pack
from fs_doubles import Recording
from store_kit import all_facts, block_path, header_of
from token_caches import IDENTITY, plain, small_store

META = Meta("model", "config", "tokenizer", "")


# ---- 6 and 7


def load_entry(store: Store, folder: Path) -> Any:
    return store.load(store.entries()[0].entry_id).caches


def restore_entry(store: Store, folder: Path) -> Any:
    loaded = store.restore([*TOKENS, 1], IDENTITY)
    return loaded.caches if loaded is not None else None


def load_unverified(store: Store, folder: Path) -> Any:
    return store.load(store.entries()[0].entry_id, verify=False).caches


def load_file(name: str, *, verify: bool | None = None) -> Callable[[Store, Path], Any]:
    return lambda store, folder: load_kv_cache(folder / name, verify=verify).caches


def import_again(name: str) -> Callable[[Store, Path], Any]:
    """Under an identity of its own, so that the entry that stands there does not stand in for it."""

    def run(store: Store, folder: Path) -> Any:
        return store.load(store.import_file(folder / name).entry_id).caches

    return run


def export_and_load(store: Store, folder: Path) -> Any:
    entry_id = next(entry.entry_id for entry in store.entries() if entry.ns == "")
    return load_kv_cache(store.export_entry(entry_id, folder / "out")).caches


READERS: dict[str, Callable[[Store, Path], Any]] = {
    "load": load_entry, "load unverified": load_unverified, "restore": restore_entry,
    "a file": load_file("monolith.mlxkv"), "a file, verified": load_file("monolith.mlxkv", verify=True),
    "a file with blocks": load_file("rows.mlxkv"), "import": import_again("monolith.mlxkv"),
    "import with blocks": import_again("rows.mlxkv"), "export": export_and_load,
}  # fmt: skip
each_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


def fill_folder(folder: Path) -> None:
    meta = Meta("model", "config", "tokenizer", "imported")
    save_kv_cache(folder / "monolith.mlxkv", TOKENS, plain(TOKENS, 2), meta)
    save_kv_cache(folder / "rows.mlxkv", TOKENS, plain(TOKENS, 2), meta, layout="rows", block_bytes=300)


def assert_whole_or_raised(read: Callable[[Store, Path], Any], store: Store, folder: Path) -> BaseException | None:
    """Right caches, a miss, or an error: never anything else."""
    try:
        caches = read(store, folder)
    except (CacheMiss, OSError, MemoryError) as error:
        return error
    assert caches is None or all_facts(caches) == all_facts(plain(TOKENS, 2))
    return None


@each_reader
def test_case_06_an_allocation_that_fails_halfway_gives_no_cache(
    read: Callable[[Store, Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_folder(tmp_path)
    left = [0]

    def scarce(real: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise MemoryError
            return real(*given, **named)

        return allocate

    monkeypatch.setattr(placing.Target, "take", scarce(placing.Target.take))
    monkeypatch.setattr(placing.Target, "allocate_host", scarce(placing.Target.allocate_host))
    for k in range(4):
        with small_store(tmp_path / f"store-{k}") as store:
            left[0] = 99
            entry_id = store.save(TOKENS, plain(TOKENS, 2), IDENTITY).entry_id
            left[0] = k
            assert isinstance(assert_whole_or_raised(read, store, tmp_path), MemoryError)
            left[0] = 99
            assert [entry.entry_id for entry in store.entries()] == [entry_id], "no fault of the entry's"
            assert assert_whole_or_raised(read, store, tmp_path) is None
            assert_sound(store)


@pytest.mark.parametrize("how", ["short", errno.EIO, errno.ENOMEM], ids=["short", "EIO", "ENOMEM"])
@each_reader
def test_case_07_no_failed_read_counts_as_loaded(
    read: Callable[[Store, Path], Any], how: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_folder(tmp_path)
    fs = BadReads()
    monkeypatch.setattr(files, "FileSystem", lambda: fs)
    with small_store(tmp_path / "store", fs=fs) as store:
        entry_id = store.save(TOKENS, plain(TOKENS, 2), IDENTITY).entry_id
        for k in range(200):
            fs.arm(k, how)
            raised = assert_whole_or_raised(read, store, tmp_path)
            if not fs.failed:
                break
            if how != "short":
                assert raised is not None
                assert entry_id in {entry.entry_id for entry in store.entries()}, "a passing error condemns nothing"
        assert (k > 2, raised) == (True, None)


@each_reader
def test_case_07_reads_of_a_few_bytes_each_are_put_together(
    read: Callable[[Store, Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a signal or a strange file system may do to any read."""
    fill_folder(tmp_path)
    with small_store(tmp_path / "store") as store:
        store.save(TOKENS, plain(TOKENS, 2), IDENTITY)
        real = os.preadv
        monkeypatch.setattr(fs_module.os, "preadv", lambda fd, parts, at: real(fd, [parts[0][:7]], at))
        assert assert_whole_or_raised(read, store, tmp_path) is None


# ---- 8

Json = dict[str, Any]


def rewrite(path: Path, change: Callable[[Json], object]) -> None:
    """Change what a header says; it is sound by itself, and its hash fits."""
    header = json.loads(path.read_bytes()[PREFIX_BYTES:])
    change(header)
    path.write_bytes(pack(header))


def lose_last_layer(header: Json) -> None:
    header["caches"].pop()


def empty_last_layer(header: Json) -> None:
    header["caches"][-1]["tensors"] = []


def lose_last_tensor(header: Json) -> None:
    header["caches"][-1]["tensors"].pop()


def lose_blocks(header: Json) -> None:
    header["caches"][-1]["tensors"][-1]["blocks"] = []


LAYERS: dict[str, tuple[Callable[[Json], object], int]] = {
    "the model has one more": (lambda header: None, 3), "the model has one less": (lambda header: None, 1),
    "the header has lost one": (lose_last_layer, 2), "the last one is empty": (empty_last_layer, 2),
    "the last one lacks a tensor": (lose_last_tensor, 2), "the last one lacks its blocks": (lose_blocks, 2),
}  # fmt: skip


@pytest.mark.parametrize(("change", "wanted"), LAYERS.values(), ids=LAYERS)
def test_case_08_an_entry_without_every_layer_is_not_loaded(
    change: Callable[[Json], object], wanted: int, tmp_path: Path
) -> None:
    with small_store(tmp_path / "store") as store:
        saved = store.save(TOKENS, plain(TOKENS, 2), IDENTITY, layout="rows")
        rewrite(Path(saved.path), change)
        model = plain([], wanted)
        with pytest.raises(CacheMiss):
            store.load(saved.entry_id, model)
        assert store.restore([*TOKENS, 1], IDENTITY, model) is None
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, plain(TOKENS, 2), META, layout="rows")
    rewrite(tmp_path / "a.mlxkv", change)
    with pytest.raises(CacheMiss):
        load_kv_cache(tmp_path / "a.mlxkv", model)


def test_case_08_every_block_of_every_layer_is_looked_at_before_anything_is_read(tmp_path: Path) -> None:
    fs = Recording()
    with small_store(tmp_path / "store", fs=fs) as store:
        saved = store.save(TOKENS, plain(TOKENS, 3), IDENTITY, layout="rows")
        last = header_of(store, saved.entry_id).caches[-1].tensors[-1].blocks
        assert last
        block_path(store, last[-1].hash).unlink()
        fs.clear()
        with pytest.raises(CorruptEntry) as caught:
            store.load(saved.entry_id)
        assert caught.value.digest == last[-1].hash
        assert [call for call in fs.named("read_into") if call.within("blocks")] == []


# ---- 9

REJECTED: dict[str, Callable[[Store, str], object]] = {
    **BAD, "other layers": lambda store, entry_id: store.save(TOKENS, plain(TOKENS, 3), IDENTITY),
}  # fmt: skip


@pytest.mark.parametrize("spoil", REJECTED.values(), ids=REJECTED)
def test_case_09_a_rejected_load_leaves_the_live_caches_as_they_were(
    spoil: Callable[[Store, str], object], tmp_path: Path
) -> None:
    live = plain([5, 6, 7], 2)
    before = all_facts(live)
    with small_store(tmp_path / "store") as store:
        entry_id = store.save(TOKENS, plain(TOKENS, 2), IDENTITY).entry_id
        save(store, [4, *TOKENS])
        spoil(store, entry_id)
        assert store.restore([*TOKENS, 1], IDENTITY, live) is None
        assert all_facts(live) == before


@pytest.mark.parametrize("how", ["short", errno.EIO], ids=["short", "EIO"])
def test_case_09_a_load_that_fails_at_any_read_leaves_the_live_caches_as_they_were(
    how: str | int, tmp_path: Path
) -> None:
    live, fs = plain([5, 6, 7], 2), BadReads()
    before = all_facts(live)
    with small_store(tmp_path / "store", fs=fs) as store:
        entry_id = store.save(TOKENS, plain(TOKENS, 2), IDENTITY).entry_id
        for k in range(200):
            fs.arm(k, how)
            try:
                loaded = store.load(entry_id, live)
            except (CacheMiss, OSError):
                assert all_facts(live) == before
            else:
                break
        assert k > 2
        assert all_facts(loaded.caches) == all_facts(plain(TOKENS, 2))
        assert all_facts(live) == before, "even a load that succeeds makes new objects"


# ---- 14


def tries(fs: Recording, entry_id: str) -> int:
    return len([call for call in fs.calls if entry_id in call.path])


def test_case_14_an_entry_that_is_of_no_use_can_be_dropped_by_the_caller(tmp_path: Path) -> None:
    """Sound, found, and yet refused by this model each time."""
    fs = Recording()
    with small_store(tmp_path / "store", fs=fs) as store:
        shorter = store.save(TOKENS[:9], plain(TOKENS[:9]), IDENTITY)
        useless = store.save(TOKENS, plain(TOKENS, 2), IDENTITY)
        match = store.find([*TOKENS, 1], IDENTITY)
        assert match is not None
        assert match.entry_id == useless.entry_id
        with pytest.raises(IdentityMismatch):
            store.load(match, plain([]))
        store.remove(match.entry_id)
        fs.clear()
        loaded = store.restore([*TOKENS, 1], IDENTITY, plain([]))
        assert loaded is not None
        assert loaded.entry_id == shorter.entry_id
        assert tries(fs, useless.entry_id) == 0


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_case_14_an_entry_that_cannot_load_is_dropped_by_the_attempt(
    spoil: Callable[[Store, str], object], tmp_path: Path
) -> None:
    fs = Recording()
    with small_store(tmp_path / "store", fs=fs) as store:
        entry_id = save(store).entry_id
        save(store, [4, *TOKENS])
        spoil(store, entry_id)
        with pytest.raises(CorruptEntry):
            store.load(entry_id)
        fs.clear()
        assert store.find([*TOKENS, 1], IDENTITY) is None
        assert store.restore([*TOKENS, 1], IDENTITY) is None
        with pytest.raises(EntryGone):
            store.load(entry_id)
        assert tries(fs, entry_id) == 0
        assert_sound(store)
