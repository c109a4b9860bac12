"""A store that one may only read: what only looks works, what would change it says so, and nothing is changed."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockstore import CorruptEntry, InvalidInput, NotPermitted, Store, check
from blockstore.fs import FileSystem
from store_kit import all_facts, block_names, block_path, flip
from token_caches import IDENTITY, plain, small_store

TOKENS = list(range(12))


class Unwritable(FileSystem):
    """What a user without the right to write sees; every change is refused."""

    def is_writable(self, path: str) -> bool:
        return False


def _refused(name: str) -> Callable[..., Any]:
    def call(self: FileSystem, *args: Any, **options: Any) -> Any:
        raise AssertionError(f"{name} was called on a store for reading only")

    return call


for _name in ("write_new", "create", "write_at", "write_all", "extend", "extend_fd", "reserve", "rename", "unlink"):
    setattr(Unwritable, _name, _refused(_name))
for _name in ("make_dir", "remove_dir", "set_aside", "discard"):
    setattr(Unwritable, _name, _refused(_name))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with small_store(tmp_path / "store") as store:
        store.save(TOKENS, plain(TOKENS), IDENTITY)
        store.save([*TOKENS, 50], plain([*TOKENS, 50]), IDENTITY)
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store(root, fs=Unwritable()) as opened:
        yield opened


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_what_only_looks_works_and_changes_nothing(root: Path, store: Store) -> None:
    before = everything(root)
    match = store.find([*TOKENS, 99], IDENTITY)
    assert match is not None
    assert all_facts(store.load(match).caches) == all_facts(plain(TOKENS))
    restored = store.restore([*TOKENS, 99], IDENTITY)
    assert restored is not None
    assert len(store.entries()) == 2
    assert store.stats().read_only
    assert store.limits.max_bytes > 0
    assert store.gc(dry_run=True).items == ()
    assert store.gc(dry_run=True, full=True).items == ()
    assert store.space(match.entry_id).header_bytes > 0
    assert check.check(store._layout, store._rooms, deep=True, progress=lambda done, total: None).problems == ()
    store.close()
    assert everything(root) == before


@pytest.mark.parametrize(
    "act",
    [
        lambda store, one: store.save(TOKENS, plain(TOKENS), IDENTITY),
        lambda store, one: store.prepare(TOKENS, plain(TOKENS), IDENTITY),
        lambda store, one: store.remove(one),
        lambda store, one: store.pin(one),
        lambda store, one: store.gc(),
        lambda store, one: store.set_limits(max_age_s=1),
        lambda store, one: store.import_file("any.mlxkv"),
    ],
    ids=["save", "prepare", "remove", "pin", "gc", "set_limits", "import"],
)
def test_what_would_change_it_says_that_it_may_not(
    root: Path, store: Store, act: Callable[[Store, str], object]
) -> None:
    before = everything(root)
    with pytest.raises(NotPermitted) as raised:
        act(store, store.entries()[0].entry_id)
    assert raised.value.code == "not-permitted"
    assert isinstance(raised.value, PermissionError)
    assert everything(root) == before


def test_a_bad_block_is_a_miss_and_stays_for_those_who_may_drop_it(root: Path, store: Store) -> None:
    for name in block_names(store):
        flip(block_path(store, name))
    with pytest.raises(CorruptEntry):
        store.load(store.entries()[0].entry_id)
    assert len(store.entries()) == 2


def test_reading_only_by_choice_beside_a_writer_in_the_same_process(root: Path) -> None:
    with Store(root, read_only=True) as reader, Store(root) as writer:
        saved = writer.save([7, 8, 9], plain([7, 8, 9]), IDENTITY)
        assert reader.load(saved.entry_id).token_count == 3
        with pytest.raises(NotPermitted):
            reader.remove(saved.entry_id)
        writer.remove(saved.entry_id)
        writer.gc()


def test_who_insists_on_writing_is_told_at_once(root: Path) -> None:
    with pytest.raises(NotPermitted, match="may not be written"):
        Store(root, fs=Unwritable(), read_only=False)


def test_reading_only_creates_no_store(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no store"):
        Store(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


class Forbidden(FileSystem):
    """Refuses to make a directory, as a parent does that belongs to somebody else."""

    def make_dir(self, path: str) -> bool:
        raise PermissionError(13, "Permission denied", path)


def test_a_store_that_may_not_be_made_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(NotPermitted, match="may not be made here") as raised:
        Store(tmp_path / "s", fs=Forbidden())
    assert raised.value.path == str(tmp_path / "s")


@pytest.fixture
def mounted(root: Path, tmp_path: Path) -> Iterator[Path]:
    """The store once more under a mount that nobody may write, not even root."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount; the doubles above stand in")
    target = tmp_path / "mounted"
    target.mkdir()
    if subprocess.run(["mount", "--bind", root, target], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount; the doubles above stand in")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
        yield target
    finally:
        subprocess.run(["umount", target], check=True)


def test_a_store_on_a_mount_for_reading_only(mounted: Path, root: Path) -> None:
    before = everything(root)
    with Store(mounted) as store:
        assert store.stats().read_only
        found = store.restore([*TOKENS, 99], IDENTITY)
        assert found is not None
        assert all_facts(found.caches) == all_facts(plain(TOKENS))
        with pytest.raises(NotPermitted):
            store.save(TOKENS, plain(TOKENS), IDENTITY)
    assert everything(root) == before
