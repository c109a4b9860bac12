"""An index that something else changed is walked by another process before it is mapped; an older copy is refused.

How that process ends says whether the index is sound, or damaged, or whether nobody could look.
"""

import errno
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lmdb
import pytest

import blockstore
from blockstore import (
    BlockstoreError,
    NotPermitted,
    Store,
    StoreBroken,
    StoreBusy,
    StoreFull,
    check,
    probe,
    stamp,
    walk,
)
from store_kit import all_facts, assert_clean
from token_caches import IDENTITY, plain, small_store

TOKENS = list(range(12))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with small_store(tmp_path / "store") as store:
        store.save(TOKENS, plain(TOKENS), IDENTITY)
    return tmp_path / "store"


def data(root: Path) -> Path:
    return root / "index" / "data.mdb"


def walks() -> Any:
    return mock.patch.object(probe, "survey", side_effect=probe.survey)


def test_an_index_as_it_was_left_is_walked_by_nobody(root: Path) -> None:
    with walks() as survey:
        for _ in range(2):
            with small_store(root) as store:
                store.save([5, 6, 7], plain([5, 6, 7]), IDENTITY)
                assert len(store.entries()) == 2
        assert survey.call_count == 0


@pytest.mark.parametrize("how", ["touched", "no stamp", "garbage for a stamp", "a copy"])
def test_a_sound_index_that_was_changed_is_walked_once(root: Path, how: str) -> None:
    if how == "touched":
        os.utime(data(root), ns=(1, 1))
    elif how == "no stamp":
        (root / stamp.NAME).unlink()
    elif how == "garbage for a stamp":
        (root / stamp.NAME).write_bytes(b"garbage")
    else:
        shutil.copy(data(root), data(root).with_suffix(".new"))
        data(root).with_suffix(".new").replace(data(root))
    with walks() as survey:
        for _ in range(2):
            with small_store(root) as store:
                assert len(store.entries()) == 1
        assert survey.call_count == 1


def test_an_older_copy_of_the_index_is_refused_and_repaired(root: Path) -> None:
    older = data(root).read_bytes()
    with small_store(root) as store:
        saved = store.save([5, 6, 7], plain([5, 6, 7]), IDENTITY)
        layout = store._layout
    data(root).write_bytes(older)
    with small_store(root) as store, pytest.raises(StoreBroken, match="older copy"):
        store.entries()
    check.repair(layout, deep=True, progress=lambda done, total: None)
    with small_store(root) as store:
        assert all_facts(store.load(saved.entry_id).caches) == all_facts(plain([5, 6, 7]))
        assert len(store.entries()) == 2
        assert_clean(store)


def test_damage_done_while_the_store_is_open_is_never_mapped_again(root: Path) -> None:
    with small_store(root) as store:
        assert len(store.entries()) == 1
        with data(root).open("r+b") as file:
            file.seek(2 * 4096)
            file.write(bytes(os.path.getsize(data(root)) // 2))
        with pytest.raises(StoreBroken):
            store.entries()
        with pytest.raises(StoreBroken):
            store.save(TOKENS, plain(TOKENS), IDENTITY)


def test_a_stamp_that_cannot_be_written_costs_others_a_walk_and_nothing_else(root: Path) -> None:
    with mock.patch.object(stamp.Stamp, "write"), small_store(root) as store:
        store.save([5, 6, 7], plain([5, 6, 7]), IDENTITY)
    with walks() as survey, small_store(root) as store:
        assert len(store.entries()) == 2
        assert survey.call_count == 1


def test_a_store_for_reading_only_has_a_changed_index_walked_for_itself(root: Path) -> None:
    os.utime(data(root), ns=(1, 1))
    before = (root / stamp.NAME).read_bytes()
    with walks() as survey, Store(root, read_only=True) as store:
        assert len(store.entries()) == 1
        assert len(store.entries()) == 1
        assert survey.call_count == 1
    assert (root / stamp.NAME).read_bytes() == before


# ---- the process that walks


def ends(program: str) -> Any:
    """Let the other process do this instead."""
    return mock.patch.object(probe, "_PROGRAM", program)


def survey(root: Path) -> dict[str, probe.Remembered] | None:
    return probe.survey(str(root / "index"))


def dies_by(number: int) -> str:
    return f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {number})"


DEADLY = [signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE]
DAMAGED = [*map(dies_by, DEADLY), "raise SystemExit(86)"]
PASSING = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
UNKNOWN = [
    *map(dies_by, PASSING), "raise SystemExit(1)", "import nothing_of_that_name", "raise KeyboardInterrupt",
    "raise MemoryError", "print('no json')", "pass",
]  # fmt: skip


@pytest.mark.parametrize("program", DAMAGED)
def test_who_is_killed_by_an_index_or_finds_it_bad_says_that_it_is_damaged(root: Path, program: str) -> None:
    with ends(program):
        assert survey(root) is None


@pytest.mark.parametrize("program", UNKNOWN)
def test_who_ends_for_another_reason_says_nothing_of_the_index(root: Path, program: str) -> None:
    with ends(program), pytest.raises(StoreBusy) as error:
        survey(root)
    assert error.value.path == str(root / "index")
    assert error.value.found
    assert error.value.hint


def test_who_takes_too_long_or_cannot_be_started_says_nothing_of_the_index(root: Path) -> None:
    with mock.patch.object(probe, "_PATIENCE_S", 0.2), ends("import time; time.sleep(60)"), pytest.raises(StoreBusy):
        survey(root)
    with mock.patch.object(sys, "executable", str(root / "no such program")), pytest.raises(StoreBusy):
        survey(root)


def test_who_may_not_read_the_index_is_told_so(root: Path) -> None:
    with ends("print('PermissionError: it is not yours'); raise SystemExit(87)"), pytest.raises(NotPermitted):
        survey(root)


def test_an_index_that_nobody_could_look_at_is_used_later(root: Path) -> None:
    (root / stamp.NAME).unlink()
    with small_store(root) as store:
        with ends(dies_by(signal.SIGTERM)), pytest.raises(StoreBusy):
            store.entries()
        assert len(store.entries()) == 1


def test_what_lies_in_the_working_directory_is_not_imported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lmdb", "json", "msgspec", "blockstore"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was here')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    found = survey(root)
    assert found is not None
    assert len(found) == 1
    assert not (tmp_path / "was here").exists()


def test_a_colon_in_the_path_of_the_package_does_no_harm(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(blockstore.__file__).parent
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b" / "blockstore").symlink_to(home)
    others = [entry for entry in sys.path if entry and Path(entry).resolve() != home.parent]
    monkeypatch.setattr(sys, "path", [*others, str(tmp_path / "a:b")])
    monkeypatch.setattr(probe, "_NEEDED", ())
    assert survey(root) is not None


def test_an_interruption_from_the_terminal_is_not_meant_for_it(root: Path) -> None:
    with ends("import json, os; print(json.dumps({'alone': [int(os.getsid(0) == os.getpid())]}))"):
        assert survey(root) == {"alone": probe.Remembered(1)}


def caused(error: BlockstoreError, cause: Exception) -> BlockstoreError:
    error.__cause__ = cause
    return error


NO_MEMORY, NO_DESCRIPTOR = lmdb.Error(os.strerror(errno.ENOMEM)), lmdb.Error(f"mdb: {os.strerror(errno.EMFILE)}")
ENDS: list[tuple[Exception, int]] = [
    (StoreBroken("no meta pages"), probe.FOUND_BAD),
    (caused(StoreBroken("bad page"), lmdb.CorruptedError("x")), probe.FOUND_BAD),
    (caused(StoreFull("on a full disk"), lmdb.PageNotFoundError("x")), probe.FOUND_BAD),
    (ValueError("no row of ours"), probe.FOUND_BAD),
    (PermissionError(errno.EACCES, "no"), probe.MAY_NOT_READ),
    (caused(StoreBroken("no memory"), lmdb.MemoryError("x")), 1),
    (caused(StoreBroken("no memory at all"), NO_MEMORY), 1),
    (caused(StoreBroken("no descriptor"), NO_DESCRIPTOR), 1),
    (StoreBusy("somebody holds it"), 1),
    (OSError(errno.EIO, "the disk"), 1),
    (MemoryError(), 1),
    (ImportError("lmdb"), 1),
]


@pytest.mark.parametrize(("error", "code"), ENDS, ids=lambda value: repr(value) if isinstance(value, Exception) else "")
def test_only_what_is_wrong_with_the_index_itself_is_damage(error: Exception, code: int) -> None:
    with mock.patch.object(walk, "walk", side_effect=error):
        assert walk.main("index") == code
