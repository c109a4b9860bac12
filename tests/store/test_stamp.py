"""An index that something else changed is walked by another process before it is mapped; an older copy is refused."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from blockstore import Store, StoreBroken, check, probe, stamp
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
