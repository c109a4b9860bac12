"""A repair loses nothing that somebody still has: not when it is killed, not when something cannot be read just now.

And whatever is missing or misplaced in a store's directory is refused at opening, found by a check and mended.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lmdb
import pytest

from blockstore import NotPermitted, Store, StoreBroken, StoreBusy, check, layout, probe, rebuild
from blockstore.fs import FileSystem
from blockstore.index_rows import unpack_entry
from blockstore.layout import Layout
from fs_doubles import Crash, Killed
from store.damage_kit import TOKENS, World, world
from store_kit import all_facts, assert_clean, assert_exact, report_of
from token_caches import IDENTITY, plain, small_store

QUOTAS = {"model": 1 << 30}
NEVER = 400  # no repair makes as many changes


def nowhere(done: int, total: int) -> None:
    pass


def walked(directory: str) -> dict[str, probe.Remembered] | None:
    """What the real survey finds, without a process of its own: for an index that is sound, or not one at all."""
    try:
        with lmdb.open(directory, lock=False, readonly=True, max_dbs=20) as env, env.begin() as txn:
            table = env.open_db(b"entries", txn, create=False)
            rows = {key.hex(): unpack_entry(value) for key, value in txn.cursor(table)}
    except lmdb.Error:
        return None
    return {name: probe.Remembered(row.used, row.used_at_ms, row.pinned) for name, row in rows.items()}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with mock.patch.object(probe, "survey", walked):
        yield


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    """A store with limits, and a pin on `victim`, which was used last."""
    with world(tmp_path / "store") as built:
        built.store.pin(built.ids["victim"])
        built.store.load(built.ids["victim"])
        built.store.set_limits(quotas=QUOTAS)
        yield built


def root_of(made: World) -> Path:
    return Path(made.store.root)


def found_layout(root: Path, fs: FileSystem | None = None) -> Layout:
    found = layout.find_layout(fs or FileSystem(), str(root))
    assert found is not None
    return found


def repair(root: Path, fs: FileSystem | None = None, *, deep: bool = False) -> check.Report:
    return check.repair(found_layout(root, fs), deep=deep, progress=nowhere)


def pinned(store: Store) -> set[str]:
    return {entry.entry_id for entry in store.entries() if entry.pinned}


def copied(source: Path, target: Path) -> Path:
    """A copy of a store; of the index only what is no hole."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("data.mdb"))
    for data in source.glob("index*/data.mdb"):
        place = target / data.relative_to(source)
        with data.open("rb") as file:
            place.write_bytes(file.read(1 << 20))
        os.truncate(place, data.stat().st_size)
        shutil.copystat(data, place)
    return target


# ---- killed, and repeated


def leave(root: Path) -> None:
    pass


def ruin(root: Path) -> None:
    (root / "index" / "data.mdb").write_bytes(b"no index")


def cut_short(root: Path) -> None:
    """As if an earlier repair had died between setting a damaged index aside and putting the new one in its place."""
    building = root / ("index" + rebuild.BUILDING)
    building.mkdir()
    (root / "index" / "data.mdb").rename(building / "data.mdb")
    (root / "index.stamp").unlink()
    (building / "whole").touch()


@pytest.mark.parametrize(
    ("before", "keeps", "durability"),
    [(leave, True, "full"), (leave, True, "none"), (ruin, False, "none"), (cut_short, True, "none")],
)
def test_a_repair_that_dies_anywhere_is_repeated_and_nothing_is_lost(
    made: World, tmp_path: Path, before: Callable[[Path], None], keeps: bool, durability: str
) -> None:
    for _ in range(20):  # so that the new index has fewer transactions
        made.store.pin(made.ids["victim"])
    made.store.close()
    config = root_of(made) / "store.json"
    config.write_text(config.read_text().replace('"none"', f'"{durability}"'))
    before(root_of(made))
    for k in range(NEVER):
        root = copied(root_of(made), tmp_path / f"copy {k}")
        fs = Crash()
        fs.arm(k)
        try:
            repair(root, fs)
            died = False
        except Killed:
            died = True
        fs.bury()
        if before is leave:
            with Store(root) as store:
                assert pinned(store) == {made.ids["victim"]}
                assert len(store.entries()) == 3
        report = repair(root)
        assert report.problems == ()
        with Store(root) as store:
            entries = [entry.entry_id for entry in store.entries()]
            assert set(entries) == set(made.ids.values())
            assert pinned(store) == ({made.ids["victim"]} if keeps else set())
            assert not keeps or entries[0] == made.ids["victim"], "the one used last"
            assert store.limits.quotas == QUOTAS
            assert_exact(store)
            assert_clean(store)
            assert keeps is ((root / "quarantine").exists() and os.listdir(root / "quarantine") == [])
            assert not (root / "index.new").exists()
        shutil.rmtree(root)
        if not died:
            assert k > 30
            return
    raise AssertionError("it never got through")


def test_an_unfinished_new_index_takes_no_place(made: World) -> None:
    """It has a part of the entries: whoever opened it would miss the others."""
    made.store.close()
    cut_short(root_of(made))
    (root_of(made) / "index.new" / "whole").unlink()
    report = repair(root_of(made))
    assert report.is_clean
    assert "pins are lost" in " ".join(report.repairs)
    with small_store(made.store.root) as store:
        assert pinned(store) == set()
        assert len(store.entries()) == 3


# ---- what nobody can say of the index


def test_a_repair_that_cannot_look_at_the_index_refuses(made: World) -> None:
    made.store.close()
    before = sorted(path.name for path in root_of(made).rglob("*"))
    with mock.patch.object(probe, "survey", side_effect=StoreBusy("not now")), pytest.raises(StoreBusy):
        repair(root_of(made))
    assert sorted(path.name for path in root_of(made).rglob("*")) == before
    assert repair(root_of(made)).is_clean
    with small_store(made.store.root) as store:
        assert pinned(store) == {made.ids["victim"]}


def test_who_may_not_write_is_told_so_before_anything_is_done(made: World) -> None:
    made.store.close()
    blocks = str(root_of(made) / "blocks")

    class Protected(FileSystem):
        def is_writable(self, path: str) -> bool:
            return path != blocks

    with pytest.raises(NotPermitted) as refused:
        repair(root_of(made), Protected())
    assert (refused.value.path, bool(refused.value.hint)) == (blocks, True)


# ---- entries that had a header


def test_an_entry_whose_header_is_gone_is_reported_and_its_blocks_wait_for_it(made: World, tmp_path: Path) -> None:
    header, blocks = made.header("victim"), made.blocks("victim")
    kept = shutil.copy(header, tmp_path / "backup")
    header.unlink()
    made.store.close()
    report = repair(root_of(made))
    assert report.problems == (check.Problem("damage", "entry", made.ids["victim"], "its header is gone"),)
    assert not report.is_clean
    assert "blocks: 1 that nothing names are left for `blockstore gc --full`" in report.repairs
    assert all(block.exists() for block in blocks)
    with small_store(made.store.root) as made.store:
        shutil.copy(kept, header)
        made.store.gc(full=True)
        assert made.loading() == set(TOKENS)


def test_of_a_lost_header_that_does_not_come_back_a_full_collection_takes_the_blocks(made: World) -> None:
    made.header("victim").unlink()
    made.store.close()
    repair(root_of(made))
    assert repair(root_of(made)).is_clean, "said once"
    with small_store(made.store.root) as store:
        store.gc(full=True)
        assert_exact(store)


def test_a_header_that_an_earlier_repair_set_aside_is_not_waited_for(made: World) -> None:
    header = made.header("victim")
    header.rename(root_of(made) / "quarantine" / f"0123abcd-{header.name}")
    made.store.close()
    [problem] = repair(root_of(made)).problems
    assert (problem.name, problem.why) == (made.ids["victim"], "its header is in quarantine/, since an earlier repair")
    with small_store(made.store.root) as store:
        assert_exact(store)


def test_what_an_older_copy_of_the_index_misses_was_removed_perhaps(made: World) -> None:
    made.store.close()
    data = root_of(made) / "index" / "data.mdb"
    older = data.read_bytes()
    with small_store(made.store.root) as store:
        store.remove(made.ids["apart"])
        store.gc()
    data.write_bytes(older)
    report = repair(root_of(made))
    assert report.problems == ()
    assert "an older copy" in report.repairs[-1]
    with small_store(made.store.root) as store:
        assert len(store.entries()) == 2
        assert_exact(store)


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_what_goes_with_a_lost_index_is_said_and_no_age_limit_takes_the_entries(made: World, how: str) -> None:
    made.store.close()
    data = root_of(made) / "index" / "data.mdb"
    data.write_bytes(b"no index") if how == "damaged" else data.unlink()
    with mock.patch.object(rebuild, "now_ms", return_value=1 << 50):
        report = repair(root_of(made))
    assert "last uses and pins are lost" in report.repairs[-1]
    with small_store(made.store.root) as store:
        assert {entry.used_at_ms for entry in store.entries()} == {1 << 50}


# ---- what cannot be read just now


class Refusing(FileSystem):
    """Refuses to open one file."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = str(path), number

    def open_read(self, path: str) -> int:
        if path == self.path:
            raise OSError(self.number, os.strerror(self.number), path)
        return super().open_read(path)


each_reason = pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])


@each_reason
def test_a_header_that_cannot_be_read_stays_and_stops_the_sweep_alone(made: World, number: int) -> None:
    header, blocks = made.header("victim"), made.blocks("victim")
    fs = Refusing(header, number)
    finding = check.Problem("unreadable", "header", made.ids["victim"], f"could not be read: {os.strerror(number)}")
    made.store.close()
    with small_store(made.store.root, fs=fs) as store:
        assert report_of(store).problems == (finding,)
        assert not report_of(store).is_clean
    report = repair(root_of(made), fs)
    assert (report.headers, report.problems) == (3, (finding,))
    assert "blocks: 1 that nothing names are left for `blockstore gc --full`" in report.repairs
    assert header.exists()
    assert all(block.exists() for block in blocks)
    with small_store(made.store.root, fs=fs) as store:
        assert {entry.entry_id for entry in store.entries()} == {made.ids["sharing"], made.ids["apart"]}
        assert {problem.severity for problem in report_of(store).problems} == {"unreadable"}
        assert [item.name for item in store.gc(full=True).items] == [made.ids["victim"], "blocks"]
        assert all(block.exists() for block in blocks)
    assert repair(root_of(made)).is_clean
    with small_store(made.store.root) as made.store:
        assert made.loading() == set(TOKENS)


@each_reason
def test_a_block_that_cannot_be_read_costs_no_entry(made: World, number: int) -> None:
    block = made.blocks("sharing")[0]
    fs = Refusing(block, number)
    made.store.close()
    with small_store(made.store.root, fs=fs) as store:
        found = report_of(store, deep=True)
    assert {(problem.severity, problem.name) for problem in found.problems} == {("unreadable", block.name)}
    report = repair(root_of(made), fs, deep=True)
    why = f"could not be read: {os.strerror(number)}"
    assert report.problems == (check.Problem("unreadable", "block", block.name, why),)
    with small_store(made.store.root) as made.store:
        assert made.loading() == set(TOKENS)
        assert_exact(made.store)


# ---- what a crash leaves in the root


def test_leftovers_of_a_repair_are_listed_and_the_next_one_takes_them(made: World) -> None:
    (root_of(made) / "index.new").mkdir()
    (root_of(made) / "index.new" / "data.mdb").write_bytes(b"x" * 9000)
    (root_of(made) / "index.new.stamp").touch()
    report = report_of(made.store)
    assert report.is_clean
    assert {(one.severity, one.name) for one in report.problems} == {
        ("leftover", "index.new"), ("leftover", "index.new.stamp"),
    }  # fmt: skip
    made.store.close()
    repair(root_of(made))
    with small_store(made.store.root) as store:
        assert_clean(store)
    assert not list(root_of(made).glob("index.new*"))


@pytest.mark.parametrize("by", ["gc", "repair"])
def test_leftovers_of_changed_limits_are_listed_and_taken(made: World, by: str) -> None:
    left = root_of(made) / ".store.json.0123456789abcdef.tmp"
    others = [root_of(made) / name for name in (".store.json.0123.tmp", ".store.json.0123456789abcdef", ".other.tmp")]
    for path in (left, *others):
        path.write_text("{")
    [problem] = report_of(made.store).problems
    assert (problem.severity, problem.name) == ("leftover", left.name)
    assert left.name in {item.name for item in made.store.gc(dry_run=True, full=True).items}
    made.store.gc()
    assert left.exists(), "a collection that is not full looks at no names"
    if by == "gc":
        assert left.name in {item.name for item in made.store.gc(full=True).items}
    else:
        made.store.close()
        repair(root_of(made))
    assert not left.exists()
    assert all(path.exists() for path in others)


# ---- missing folders, and things in the place of a lock

FOLDERS = ["index", "leases", "blocks", "entries"]
LOCKS = ["store.lock", "admission.lock", "index/lock", "index/lock.turn"]


def checked(root: Path) -> check.Report:
    """As the command does it where the store cannot be opened."""
    return check.check(found_layout(root), None, deep=False, progress=nowhere)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_missing_folder_is_refused_found_and_made_again(made: World, name: str) -> None:
    made.store.close()
    shutil.rmtree(root_of(made) / name)
    with pytest.raises(StoreBroken, match="folder is missing") as refused:
        small_store(made.store.root)
    assert (refused.value.path, "check --repair" in refused.value.hint) == (str(root_of(made) / name), True)
    assert [(one.severity, one.name) for one in checked(root_of(made)).problems] == [("damage", name)]
    report = repair(root_of(made))
    assert report.repairs[0] == f"folder {name}: it was missing; made"
    with small_store(made.store.root) as store:
        lost = name in ("blocks", "entries")
        assert len(store.entries()) == (0 if lost else 3)
        assert report.is_clean is not lost
        assert report_of(store).is_clean
        store.save([5, 6, 7], plain([5, 6, 7]), IDENTITY)


def test_quarantine_may_be_deleted_and_comes_back_with_a_repair(made: World) -> None:
    made.store.close()
    (root_of(made) / "quarantine").rmdir()
    with small_store(made.store.root) as store:
        assert_clean(store)
    repair(root_of(made))
    assert (root_of(made) / "quarantine").is_dir()


THINGS: dict[str, Callable[[Path], Any]] = {
    "folder": Path.mkdir, "link": lambda place: place.symlink_to("elsewhere"), "pipe": os.mkfifo,
}  # fmt: skip


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", LOCKS)
def test_what_is_no_file_in_a_locks_place_is_refused_found_and_set_aside(made: World, name: str, thing: str) -> None:
    made.store.close()
    place = root_of(made) / name
    place.unlink(missing_ok=True)
    THINGS[thing](place)
    with pytest.raises(StoreBroken, match="locks nothing") as refused:
        small_store(made.store.root)
    assert refused.value.path == str(place)
    assert [(one.severity, one.name) for one in checked(root_of(made)).problems] == [("damage", name)]
    assert repair(root_of(made)).is_clean
    assert [left.partition("-")[2] for left in os.listdir(root_of(made) / "quarantine")] == [place.name]
    with small_store(made.store.root) as made.store:
        assert made.loading() == set(TOKENS)
        assert pinned(made.store) == {made.ids["victim"]}
        made.save("victim")


def test_a_repair_that_locked_a_lock_of_the_past_has_nothing(made: World) -> None:
    """Another repair set it aside meanwhile, and may be at work."""
    made.store.close()
    lock = root_of(made) / "store.lock"

    class Overtaken(FileSystem):
        def open_lock(self, path: str) -> int:
            fd = super().open_lock(path)
            if path == str(lock):
                lock.unlink()
                lock.touch()
            return fd

    with pytest.raises(StoreBusy):
        repair(root_of(made), Overtaken())


# ---- no damage, only no right


@pytest.mark.parametrize("name", ["index/data.mdb", "index/lock", "index/lock.turn", "store.lock"])
def test_what_may_not_be_opened_is_no_damage(made: World, name: str) -> None:
    place = root_of(made) / name
    made.store.close()
    with pytest.raises(NotPermitted) as refused:
        check.check(found_layout(root_of(made), Refusing(place, errno.EACCES)), None, deep=False, progress=nowhere)
    assert (refused.value.path, "read" in refused.value.hint) == (str(place), True)


def test_what_a_repair_gave_back_is_loaded_bit_for_bit(made: World) -> None:
    made.store.close()
    ruin(root_of(made))
    (root_of(made) / "leases").rmdir()
    assert repair(root_of(made)).is_clean
    with small_store(made.store.root) as made.store:
        for name, tokens in TOKENS.items():
            assert all_facts(made.store.load(made.ids[name]).caches) == all_facts(plain(tokens))
