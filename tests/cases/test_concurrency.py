"""Cases 1 to 5, 11 and 12: several processes at once, some of them killed, and others' hands in the directory."""

import contextlib
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockstore import CorruptEntry, Meta, Store, admission, full_mark, save_kv_cache, saving
from blockstore import fs as fs_module
from blockstore.admission import used_bytes
from blockstore.blocks import Blocks
from blockstore.index import Index
from cases.kit import (
    BAD,
    BIG,
    TOKENS,
    assert_loads,
    assert_served,
    assert_sound,
    before_first,
    command,
    ended,
    files_below,
    first_block,
    header_file,
    save,
    start,
)
from fs_doubles import Watching
from store_kit import block_names, block_path, damage
from token_caches import IDENTITY, plain, small_store

META = Meta("model", "config", "tokenizer", "")
OTHERS = [*range(20), 90, 91, 92, 93, 94]


@pytest.fixture
def fs() -> Watching:
    return Watching()


@pytest.fixture
def store(tmp_path: Path, fs: Watching) -> Iterator[Store]:
    with small_store(tmp_path / "store", fs=fs) as opened:
        yield opened


def write_file(layout: Any) -> Callable[[Path], object]:
    return lambda folder: save_kv_cache(folder / "a.mlxkv", TOKENS, plain(TOKENS), META, layout=layout)


def save_into(folder: Path) -> None:
    with small_store(folder / "store") as store:
        save(store, ns=threading.current_thread().name)


def export_from(folder: Path) -> None:
    with small_store(folder / "store") as store:
        entry_id = save(store, ns=threading.current_thread().name).entry_id
        store.export_entry(entry_id, folder / "out", layout="rows")


CAPS = itertools.count(1 << 40)


def set_the_cap(folder: Path) -> None:
    with small_store(folder / "store") as store:
        store.set_limits(max_bytes=next(CAPS))


# ---- 1

WRITERS = {
    "a save": save_into, "an export": export_from, "the cap in store.json": set_the_cap,
    "a file": write_file("monolith"), "a file with blocks": write_file("rows"),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_case_01_writers_at_once_never_share_a_temporary_name(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_store(tmp_path / "store").close()
    made: list[str] = []
    real = os.open

    def noting(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_EXCL:
            made.append(os.fspath(path))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(fs_module.os, "open", noting)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            write(tmp_path)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(made) == len(set(made)) >= len(threads)


SAVER = """
import sys
from cases.kit import TOKENS, save
from token_caches import small_store
with small_store(sys.argv[1]) as store:
    for n in range(12):
        save(store, TOKENS[: 8 + n])
"""


def test_case_01_losing_the_race_to_publish_is_success_between_threads(store: Store, fs: Watching) -> None:
    """Right before the first block gets its name somebody else gives all of them theirs."""
    ids: list[str] = []
    fs.once(lambda call: call.places_block, lambda: ids.append(save(store, ns="other").entry_id))
    ids.append(save(store).entry_id)
    for entry_id in ids:
        assert_loads(store, entry_id)
    assert_sound(store)


def test_case_01_engines_in_several_processes_save_the_same_at_once(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    engines = [start(SAVER, tmp_path / "store") for _ in range(2)]
    assert [ended(engine) for engine in engines] == [(0, "")] * 2
    with small_store(tmp_path / "store") as store:
        assert sorted(entry.token_count for entry in store.entries()) == list(range(8, 20))
        for entry in store.entries():
            assert_loads(store, entry.entry_id, TOKENS[: entry.token_count])
        assert_sound(store)


# ---- 2


def heal(folder: Path) -> None:
    with small_store(folder / "store") as store:
        damage(block_path(store, min(block_names(store))), "truncate")
        save(store)


def remove_and_collect(folder: Path) -> None:
    with small_store(folder / "store") as store:
        for entry in store.entries():
            store.remove(entry.entry_id)
        store.gc(full=True)


REWRITERS = {**WRITERS, "a save that heals": heal, "a removal": remove_and_collect}


@pytest.mark.parametrize("write", REWRITERS.values(), ids=REWRITERS)
def test_case_02_a_published_name_is_never_opened_for_writing(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (save_into, write_file("monolith"), write_file("rows"), export_from):
        first(tmp_path)
    opened: list[str] = []
    real = os.open

    def noting(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            opened.append(os.fspath(path))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(fs_module.os, "open", noting)
    write(tmp_path)
    assert opened
    assert [path for path in opened if Path(path).parent.name == "blocks" or path.endswith(".mlxkv")] == []


def test_case_02_whoever_reads_a_name_that_is_replaced_keeps_what_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.mlxkv"
    save_kv_cache(path, TOKENS, plain(TOKENS), META)
    before = path.read_bytes()
    with path.open("rb") as reader:
        save_kv_cache(path, OTHERS, plain(OTHERS), META)
        assert reader.read() == before != path.read_bytes()


# ---- 3

DYING = """
import os, sys
from blockstore import saving
from blockstore.blocks import Blocks
from blockstore.admission import used_bytes
from blockstore.index import Index
from cases.kit import TOKENS, save
from token_caches import small_store
owner, step = {"a block": (Blocks, "publish"), "the header": (saving._Saver, "_write_header"),
               "the index": (Index, "publish")}[sys.argv[2]]
with small_store(sys.argv[1]) as store:
    for n in range(3):
        save(store, [n, *TOKENS])
    setattr(owner, step, lambda *given: os.kill(os.getpid(), 9))
    save(store, [7, *TOKENS])
"""


@pytest.mark.parametrize("step", ["a block", "the header", "the index"])
def test_case_03_a_killed_shutdown_has_committed_each_entry_by_itself_and_leaves_nothing_lasting(
    step: str, tmp_path: Path
) -> None:
    assert ended(start(DYING, tmp_path / "store", step))[0] == -signal.SIGKILL
    with small_store(tmp_path / "store") as store:
        assert store.stats().unfinished_saves == 1
        before = store.stats().physical_bytes
        for n in range(3):
            assert_served(store, [n, *TOKENS])
        assert store.find([7, *TOKENS, 1], IDENTITY) is None
        assert store.gc().count("lease") == 1
        assert store.stats().physical_bytes < before
        assert_sound(store)
        assert len(store.entries()) == 3


# ---- 4


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_case_04_one_bad_entry_costs_one_entry(spoil: Callable[[Store, str], object], tmp_path: Path) -> None:
    lists = [[n, *TOKENS] for n in range(8)]
    with small_store(tmp_path / "store") as store:
        ids = [save(store, tokens).entry_id for tokens in lists]
        spoil(store, ids[3])
    with small_store(tmp_path / "store") as store:
        for n, tokens in enumerate(lists):
            if n == 3:
                assert store.restore([*tokens, 1], IDENTITY) is None
            else:
                assert_served(store, tokens)
        assert {entry.entry_id for entry in store.entries()} == {*ids} - {ids[3]}
        assert_sound(store)


# ---- 5


def gone(path: Path, aside: Path) -> Path:
    path.rename(aside)
    return path


DELETED: dict[str, Callable[[Store, str], Path]] = {
    "a block": first_block, "the header": header_file,
    "its scope": lambda store, entry_id: header_file(store, entry_id).parent,
    "all headers": lambda store, entry_id: Path(store.root, "entries"),
    "all blocks": lambda store, entry_id: Path(store.root, "blocks"),
}  # fmt: skip


@pytest.mark.parametrize("what", DELETED.values(), ids=DELETED)
def test_case_05_what_is_deleted_from_outside_is_a_miss_that_names_it(
    what: Callable[[Store, str], Path], store: Store, tmp_path: Path
) -> None:
    entry_id = save(store).entry_id
    names = block_names(store)
    place = gone(what(store, entry_id), tmp_path / "aside")
    with pytest.raises(CorruptEntry) as caught:
        store.load(entry_id)
    missing = str(caught.value.path)
    assert missing.startswith(str(place))
    assert not os.path.exists(missing)
    assert (caught.value.digest in names) is (Path(missing).parent.name == "blocks")
    assert store.restore([*TOKENS, 1], IDENTITY) is None


# ---- 11


def forget_all(store: Store) -> None:
    for entry in store.entries():
        store.remove(entry.entry_id)


def collect(store: Store) -> None:
    store.gc()


def collect_fully(store: Store) -> None:
    store.gc(full=True)


def evict(store: Store) -> None:
    """A save that needs room, which collects what is dead, and then evicts what was used the longest ago."""
    victim = save(store, BIG, "victim").entry_id
    store.set_limits(max_bytes=used_bytes(store.rooms) + 4096)
    save(store, OTHERS, "needs room")
    assert victim not in {entry.entry_id for entry in store.entries()}


@pytest.mark.parametrize("sweep", [collect, collect_fully, evict])
def test_case_11_a_block_that_is_wanted_again_after_the_list_was_made_is_not_deleted(
    sweep: Callable[[Store], None], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store)
    forget_all(store)
    assert store.gc(dry_run=True).count("block") == len(block_names(store)) > 0
    saved: list[str] = []
    # Both may be at it: the one that comes in between began while there was room.
    monkeypatch.setattr(admission, "turn", lambda rooms: contextlib.nullcontext())
    before_first(monkeypatch, Index, "collect", lambda: saved.append(save(store).entry_id))
    sweep(store)
    assert_loads(store, saved[0])
    assert_sound(store)


def test_case_11_a_stray_file_that_becomes_a_block_while_it_is_swept_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection has found a file that no row names; right then a save gives it one."""
    with small_store(tmp_path / "elsewhere") as other:
        save(other)
        for name in block_names(other):
            shutil.copy(block_path(other, name), block_path(store, name))
    saved: list[str] = []
    before_first(monkeypatch, full_mark, "_unlink_orphan", lambda: saved.append(save(store).entry_id))
    store.gc(full=True)
    assert_loads(store, saved[0])
    assert_sound(store)


# ---- 12

POINTS: dict[str, tuple[Any, str]] = {
    "its temporaries stand": (Blocks, "publish"), "its blocks have names": (saving._Saver, "_write_header"),
    "its header has a name": (Index, "publish"),
}  # fmt: skip


def open_and_close(root: Path) -> None:
    small_store(root).close()


def open_in_a_process(root: Path) -> None:
    assert command(root, "stats")[0] == 0


def collect_fully_in_a_process(root: Path) -> None:
    assert command(root, "gc", "--full")[0] == 0


def collect_in_another_store(root: Path) -> None:
    with small_store(root) as store:
        store.gc()


def evict_in_another_store(root: Path) -> None:
    with small_store(root) as store:
        evict(store)


CLEANERS = [open_and_close, open_in_a_process, collect_in_another_store, collect_fully_in_a_process]
CLEANERS.append(evict_in_another_store)


@pytest.mark.parametrize("clean", CLEANERS, ids=lambda clean: clean.__name__)
@pytest.mark.parametrize(("owner", "step"), POINTS.values(), ids=POINTS)
def test_case_12_no_clean_up_takes_what_a_live_writer_has_made(
    owner: Any, step: str, clean: Callable[[Path], None], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def meanwhile() -> None:
        before = lease_files(store)
        clean(Path(store.root))
        seen.append(len(before))
        assert before <= lease_files(store)

    before_first(monkeypatch, owner, step, meanwhile)
    entry_id = save(store).entry_id
    assert seen[0] >= 1
    assert_loads(store, entry_id)
    assert_sound(store)


def lease_files(store: Store) -> set[str]:
    return {path for path in files_below(store.root) if path.startswith("leases/")}
