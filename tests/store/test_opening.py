"""Making and opening a store: from several sides at once, over what a crash left, over what is not one."""

import threading
from pathlib import Path

import pytest

from blockstore import InvalidInput, Store, StoreBroken
from blockstore.fs import FileSystem
from fs_doubles import FailingAt
from token_caches import IDENTITY, plain


def test_many_at_once_make_one_store(tmp_path: Path) -> None:
    stores: list[Store] = []
    threads = [threading.Thread(target=lambda: stores.append(Store(tmp_path / "s"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 8
    saved = stores[0].save(range(5), plain(range(5)), IDENTITY)
    assert {store.entries()[0].entry_id for store in stores} == {saved.entry_id}
    for store in stores:
        store.close()


@pytest.mark.parametrize("k", range(1, 14))
def test_a_creation_that_was_cut_short_is_taken_up(tmp_path: Path, k: int) -> None:
    """A failure at any call, before store.json stands, leaves a directory in which the next attempt succeeds."""
    try:
        Store(tmp_path / "s", fs=FailingAt(k)).close()
    except OSError:
        assert not (tmp_path / "s" / "store.json").exists() or k > 10
    with Store(tmp_path / "s") as store:
        store.save(range(5), plain(range(5)), IDENTITY)
        assert len(store.entries()) == 1


def test_a_lost_store_json_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        saved = store.save(range(5), plain(range(5)), IDENTITY)
    config = tmp_path / "s" / "store.json"
    text = config.read_bytes()
    config.unlink()
    with pytest.raises(StoreBroken, match=r"store\.json is missing"):
        Store(tmp_path / "s")
    config.write_bytes(text)
    with Store(tmp_path / "s") as store:
        assert store.load(saved.entry_id).token_count == 5


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match="not a store"):
        Store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_temporaries_of_store_json_never_share_a_name(tmp_path: Path) -> None:
    """Case 1: two processes that set the cap at once must not write into each other's file."""
    created: list[str] = []

    class Names(FileSystem):
        def write_new(self, path: str, parts: object, *, sync: bool = False) -> None:
            created.append(path)
            super().write_new(path, parts, sync=sync)  # type: ignore[arg-type]  # passed on as it came

    for cap in (1 << 31, 1 << 32, 1 << 31):
        Store(tmp_path / "s", max_bytes=cap, fs=Names()).close()
    temporaries = [path for path in created if "store.json" in path]
    assert len(temporaries) == len(set(temporaries)) == 3
