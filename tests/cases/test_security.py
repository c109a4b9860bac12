"""Cases 40 and 41: links in a file's place, and pickles."""

import hashlib
import itertools
import os
import pickle
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from blockstore import (
    BlockstoreError,
    CacheMiss,
    Meta,
    check,
    load_kv_cache,
    read_kv_header,
    save_kv_cache,
)
from blockstore.fs import FileSystem
from blockstore.layout import open_layout
from cases.kit import TOKENS, assert_loads, assert_sound, save
from store_kit import block_names, block_path, header_of, named_blocks
from token_caches import IDENTITY, plain, small_store

META = Meta("model", "config", "tokenizer", "")


class Chance:
    """An attacker who foretells every name that is drawn by chance: the same ones again after each reset()."""

    def __init__(self) -> None:
        self._drawn = itertools.count()

    def reset(self) -> None:
        self._drawn = itertools.count()

    def token_hex(self, size: int) -> str:
        return hashlib.sha256(str(next(self._drawn)).encode()).hexdigest()[: 2 * size]


@pytest.fixture
def chance(monkeypatch: pytest.MonkeyPatch) -> Chance:
    foretold = Chance()
    monkeypatch.setattr(secrets, "token_hex", foretold.token_hex)
    return foretold


# ---- 40

LINKED = b"not to be touched"
FEW = TOKENS[:8]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside of everything, alone in its folder; both must stay as they are."""
    folder = tmp_path / "victim"
    folder.mkdir()
    file = folder / "file"
    file.write_bytes(LINKED)
    return file


def assert_untouched(victim: Path, name: str) -> None:
    assert victim.read_bytes() == LINKED, name
    assert list(victim.parent.iterdir()) == [victim], name


def prepare(place: Path) -> None:
    small_store(place / "store").close()
    save_kv_cache(place / "in.mlxkv", FEW, plain(FEW), META)


def act_save(place: Path) -> None:
    with small_store(place / "store") as store:
        save(store, FEW)


def act_import(place: Path) -> None:
    with small_store(place / "store") as store:
        store.import_file(place / "in.mlxkv")


def act_export(place: Path, layout: str = "monolith") -> None:
    with small_store(place / "store") as store:
        store.export_entry(save(store, FEW).entry_id, place / "out", layout=layout)


def act_file(place: Path, layout: Any = "monolith") -> None:
    save_kv_cache(place / "out.mlxkv", FEW, plain(FEW), META, layout=layout)


ACTS: dict[str, Callable[[Path], None]] = {
    "save": act_save, "import": act_import, "export": act_export,
    "export rows": lambda place: act_export(place, "rows"), "file": act_file,
    "file rows": lambda place: act_file(place, "rows"),
}  # fmt: skip


def collect_fully(place: Path) -> None:
    with small_store(place / "store") as store:
        store.gc(full=True)


def repair(place: Path) -> None:
    layout = open_layout(FileSystem(), str(place / "store"))
    if layout is not None:
        check.repair(layout, deep=False, progress=lambda done, total: None)


def names_written(act: Callable[[Path], None], place: Path) -> list[str]:
    """Every name below `place`, lasting or passing, that `act` creates, opens for writing, or renames to."""
    found: list[str] = []
    real_open, real_mkdir, real_rename = os.open, os.mkdir, os.rename

    def noting_open(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            found.append(path)
        return real_open(path, flags, *more, **options)

    def noting_mkdir(path: Any, *more: Any) -> None:
        found.append(path)
        real_mkdir(path, *more)

    def noting_rename(source: Any, target: Any) -> None:
        found.append(target)
        real_rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", noting_open)
        patch.setattr(os, "mkdir", noting_mkdir)
        patch.setattr(os, "rename", noting_rename)
        act(place)
    return sorted({os.path.relpath(path, place) for path in found if os.fspath(path).startswith(f"{place}/")})


def put_link(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("to", ["a file", "a folder", "nothing"])
@pytest.mark.parametrize("what", ACTS)
def test_case_40_a_link_under_any_name_that_is_written_leads_nowhere(
    what: str, to: str, victim: Path, tmp_path: Path, chance: Chance
) -> None:
    """Either the link is replaced, or the attempt is an error; what it leads to is never written."""
    target = {"a file": victim, "a folder": victim.parent, "nothing": victim.parent / "new"}[to]
    prepare(tmp_path / "plan")
    chance.reset()
    names = names_written(ACTS[what], tmp_path / "plan")
    assert len(names) >= 2
    for number, name in enumerate(names):
        if name == "out" or (what.startswith("export") and name.startswith("store")):
            continue  # where an export goes is the caller's choice; what a save writes stands under "save"
        place = tmp_path / str(number)
        prepare(place)
        put_link(place / name, target)
        chance.reset()
        with suppress(BlockstoreError, OSError):
            ACTS[what](place)
        assert_untouched(victim, name)


STANDING = ["store.lock", "index/lock", "index/lock.turn", "index/data.mdb", "store.json", "index.stamp"]
STANDING += ["blocks", "entries", "leases", "quarantine", "index"]


@pytest.mark.parametrize("to", ["a file", "a folder"])
@pytest.mark.parametrize("name", STANDING)
def test_case_40_a_link_in_the_place_of_a_part_of_the_store_is_not_written_through(
    name: str, to: str, victim: Path, tmp_path: Path
) -> None:
    act_save(tmp_path)
    put_link(tmp_path / "store" / name, victim if to == "a file" else victim.parent)
    for act in (act_save, collect_fully, repair):
        with suppress(BlockstoreError, OSError):
            act(tmp_path)
        assert_untouched(victim, name)


@pytest.mark.parametrize("name", ["../../victim/file", "..", "A" * 32, "ab" * 15, "ab" * 17, f"{'ab' * 15}/x", "", "*"])
def test_case_40_only_exact_hex_digits_name_an_entry(name: str, victim: Path, tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        save(store)
        for call in (store.load, store.remove, store.pin, lambda name: store.export_entry(name, tmp_path)):
            with pytest.raises(BlockstoreError):
                call(name)
        assert len(store.entries()) == 1


@pytest.mark.parametrize("what", ["block", "header"])
def test_case_40_a_link_is_not_read_through_either(what: str, tmp_path: Path) -> None:
    """Not even to the very bytes that are wanted: who can change the target could change the entry."""
    with small_store(tmp_path / "store") as store:
        saved = save(store)
        block = block_path(store, min(named_blocks(header_of(store, saved.entry_id))))
        path = block if what == "block" else Path(saved.path)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CacheMiss):
            store.load(saved.entry_id)
        assert_loads(store, save(store).entry_id)
        assert not path.is_symlink()
        assert (tmp_path / "elsewhere").exists()
        assert_sound(store)


# ---- 41


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


PICKLED = ["cache file", "header", "block", "store.json", "index/data.mdb", "index.stamp"]


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("what", PICKLED)
def test_case_41_a_pickle_is_never_unpickled(what: str, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = pickle.dumps(Trap(mark), protocol)
    with small_store(tmp_path / "store") as store:
        saved = save(store)
        block = block_path(store, min(block_names(store)))
    place = {"cache file": tmp_path / "a.mlxkv", "header": Path(saved.path), "block": block}
    place.get(what, tmp_path / "store" / what).write_bytes(data)
    attempts: list[Callable[[], object]] = [
        lambda: read_everything(tmp_path / "store", saved.entry_id), lambda: load_kv_cache(tmp_path / "a.mlxkv"),
        lambda: read_kv_header(tmp_path / "a.mlxkv"), lambda: load_kv_cache(saved.path), lambda: repair(tmp_path),
    ]  # fmt: skip
    for attempt in attempts:
        with suppress(BlockstoreError, OSError):
            attempt()
    assert not mark.exists()
    pickle.loads(data)
    assert mark.exists(), "the trap works"


def read_everything(root: Path, entry_id: str) -> None:
    with small_store(root) as store:
        store.restore([*TOKENS, 1], IDENTITY)
        store.import_file(root.parent / "a.mlxkv")
        store.load(entry_id)
