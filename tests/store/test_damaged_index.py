"""The index row of the damage matrix, done while nobody has the store open.

A damaged map may kill who uses it, so all of it happens in other processes. None of them may die: the next opening
notices what was done without mapping the file, or it does no harm; a check reports it; a repair brings every entry
back. Run as a program this file is such a process.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import lmdb
import pytest

from blockstore import CacheMiss, Store, StoreBroken, check, layout
from blockstore.fs import FileSystem
from store.damage_kit import DAMAGES, TOKENS, World, world, zero
from store_kit import all_facts, report_of
from token_caches import IDENTITY, plain, small_store

PAGE_BYTES = 4096
PATIENCE_S = 120.0
DATA = "index/data.mdb"


# ---- in the other process: open, load, check, repair, load again


def live_with(root: str) -> dict[str, Any]:
    ids: dict[str, str] = json.loads(Path(root + ".ids").read_text())
    opened, mapped, loads = _use(root, ids)
    before = _check(root)
    repaired = check.repair(_layout(root), deep=True, progress=lambda done, total: None)
    _, _, after = _use(root, ids)
    return {
        "opened": opened, "mapped": mapped, "loads": loads, "clean": before.is_clean, "findings": len(before.problems),
        "lost": [problem.what for problem in repaired.problems], "after": after, "clean after": _is_clean(root),
    }  # fmt: skip


def _layout(root: str) -> layout.Layout:
    found = layout.open_layout(FileSystem(), root)
    assert found is not None
    return found


def _use(root: str, ids: dict[str, str]) -> tuple[str, bool, dict[str, str]]:
    """What opening came to, whether this process had mapped the index by then, and how each entry loads."""
    with ExitStack() as stack:
        mapping = stack.enter_context(mock.patch.object(lmdb, "open", wraps=lmdb.open))
        try:
            store = stack.enter_context(small_store(root))
            store.entries()
        except StoreBroken:
            return "broken", mapping.called, {}
        return "open", mapping.called, {name: _loaded(store, name, ids[name]) for name in TOKENS}


def _loaded(store: Store, name: str, entry_id: str) -> str:
    try:
        by_tokens = store.restore([*TOKENS[name], 1], IDENTITY)
        if by_tokens is not None:
            assert tuple(by_tokens.tokens) == TOKENS[name][: by_tokens.token_count]
            assert all_facts(by_tokens.caches) == all_facts(plain(by_tokens.tokens))
        loaded = store.load(entry_id)
    except CacheMiss:
        return "missed"
    except StoreBroken:
        return "broken"
    assert tuple(loaded.tokens) == TOKENS[name]
    assert all_facts(loaded.caches) == all_facts(plain(TOKENS[name]))
    return "right"


def _check(root: str) -> check.Report:
    """As the command does it."""
    try:
        with small_store(root) as store:
            return check.check(store._layout, store._rooms, deep=True, progress=lambda done, total: None)
    except StoreBroken:
        return check.check(_layout(root), None, deep=True, progress=lambda done, total: None)


def _is_clean(root: str) -> bool:
    with small_store(root) as store:
        return report_of(store).is_clean


# ---- the damage


class Kit:
    """A store as it was closed, copies of its index from before and from elsewhere, and the damage that is done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sound, self.older, self.foreign = folder / "sound", folder / "older.mdb", folder / "foreign"
        with world(self.foreign) as other:
            for _ in range(9):  # so that its transactions are later ones
                other.store.remove(other.save("victim"))
        made = self._fill()
        self.ids = made.ids
        self.used_bytes = _used_bytes(self.sound / DATA)

    def _fill(self) -> World:
        with world(self.sound) as made:
            made.store.close()
            shutil.copyfile(self.sound / DATA, self.older)
            made.store = small_store(self.sound)
            for name in TOKENS:
                made.save(name)
            made.store.gc()
            return made

    def copy(self, name: str) -> Path:
        """Another store just like it, whose index looks untouched to whoever compares the times of its file."""
        root = self.folder / name.replace(" ", "-")
        shutil.copytree(self.sound, root, ignore=shutil.ignore_patterns("data.mdb"))
        source, target = self.sound / DATA, root / DATA
        with source.open("rb") as file:  # what follows is a hole of many megabytes
            target.write_bytes(file.read(self.used_bytes))
        os.truncate(target, source.stat().st_size)
        shutil.copystat(source, target)
        Path(f"{root}.ids").write_text(json.dumps(self.ids))
        return root


def _used_bytes(data: Path) -> int:
    with lmdb.open(str(data.parent), lock=False, readonly=True, max_dbs=1) as env:
        return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])


Damage = Callable[[Kit, Path], object]


def _overwrite(data: Path, source: Path) -> None:
    with data.open("r+b") as file:
        file.write(source.read_bytes())


def _rename_over(data: Path, source: Path) -> None:
    shutil.copy(source, data.with_name("copy"))
    data.with_name("copy").rename(data)


def _instead(data: Path, make: Callable[[Path], object]) -> None:
    data.unlink()
    make(data)


def zeroed(page: int) -> Damage:
    return lambda kit, data: zero(data, page * PAGE_BYTES, PAGE_BYTES)


def flipped(bit: int) -> Damage:
    return lambda kit, data: _flip(data, bit % (kit.used_bytes * 8))


def flipped_in_rows(part: int) -> Damage:
    """One bit everywhere where the victim's id stands, `part` bytes behind where that begins: in keys and in rows."""

    def act(kit: Kit, data: Path) -> None:
        found = data.read_bytes()[: kit.used_bytes]
        name = bytes.fromhex(kit.ids["victim"])
        at = found.find(name)
        while at >= 0:
            _flip(data, 8 * min(at + part, kit.used_bytes - 1))
            at = found.find(name, at + 1)

    return act


def _flip(data: Path, bit: int) -> None:
    with data.open("r+b") as file:
        file.seek(bit // 8)
        [byte] = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


# What the next opening notices.
NOTICED: dict[str, Damage] = {
    "deleted": lambda kit, data: data.unlink(),
    "empty": lambda kit, data: os.truncate(data, 0),
    "one page": lambda kit, data: os.truncate(data, PAGE_BYTES),
    "meta pages alone": lambda kit, data: os.truncate(data, 2 * PAGE_BYTES),
    "half": lambda kit, data: os.truncate(data, kit.used_bytes // 2),
    "short by one": lambda kit, data: os.truncate(data, kit.used_bytes - 1),
    "an older copy": lambda kit, data: _overwrite(data, kit.older),
    "an older copy renamed": lambda kit, data: _rename_over(data, kit.older),
    "first meta page zeroed": zeroed(0),
    "second meta page zeroed": zeroed(1),
    "zeros behind the meta pages": lambda kit, data: zero(data, 2 * PAGE_BYTES, kit.used_bytes - 2 * PAGE_BYTES),
    "noise": lambda kit, data: data.write_bytes(os.urandom(kit.used_bytes)),
    "a folder": lambda kit, data: _instead(data, Path.mkdir),
    "a pipe": lambda kit, data: _instead(data, os.mkfifo),
    "a link": lambda kit, data: _instead(data, lambda place: place.symlink_to(kit.sound / DATA)),
}
# What does no harm.
HARMLESS: dict[str, Damage] = {
    "untouched": lambda kit, data: None,
    "touched": lambda kit, data: os.utime(data),
    "no page too many": lambda kit, data: os.truncate(data, kit.used_bytes),
    "long by one": lambda kit, data: DAMAGES["long by one"](data, data),
    "without its stamp": lambda kit, data: Path(data.parent.parent, "index.stamp").unlink(),
}
# What may hit something that matters, or may not: pages in turn, and bits all over.
EITHER: dict[str, Damage] = {
    "another store's": lambda kit, data: _overwrite(data, kit.foreign / DATA),
    **{f"page {page} zeroed": zeroed(page) for page in (4, 10, 16, 28)},
    **{f"rows changed {part} bytes from an id": flipped_in_rows(part) for part in (-1, 3, 16, 20, 40)},
}
EVERYWHERE: dict[str, Damage] = {
    **{f"page {page} zeroed": zeroed(page) for page in range(2, 40)},
    **{f"bit {bit} flipped": flipped(bit) for bit in range(5, 8 * 29 * PAGE_BYTES, 3_001)},
    **{f"rows changed {part} bytes from an id": flipped_in_rows(part) for part in range(-40, 200)},
}


# ---- the cells


def outcomes(roots: list[Path]) -> dict[str, dict[str, Any]]:
    """What became of each store, by name: one process goes from one to the next, for as long as it lives."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < len(roots):
        left = [str(root) for root in roots if root.name not in found]
        surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, __file__, *left], capture_output=True, text=True, env=surroundings,
            timeout=PATIENCE_S + 5 * len(left), check=False,
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {Path(root).name: line for root, line in zip(left, lines, strict=False)}
        if len(lines) < len(left):
            found[Path(left[len(lines)]).name] = {"died": done.returncode, "said": done.stderr[-4000:]}
    return found


def after_damage(folder: Path, damages: dict[str, Damage]) -> dict[str, dict[str, Any]]:
    kit = Kit(folder)
    roots = {name: kit.copy(name) for name in damages}
    for name, root in roots.items():
        damages[name](kit, root / DATA)
    found = outcomes(list(roots.values()))
    return {name: found[root.name] for name, root in roots.items()}


Cells = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def noticed(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    return after_damage(tmp_path_factory.mktemp("index"), NOTICED)


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    return after_damage(tmp_path_factory.mktemp("index"), HARMLESS)


@pytest.fixture(scope="module")
def either(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    return after_damage(tmp_path_factory.mktemp("index"), EITHER)


ALL_RIGHT = dict.fromkeys(TOKENS, "right")


def assert_mended(cell: dict[str, Any]) -> None:
    """Nobody died, and the repair left a clean store; what no load had condemned before is there, bit for bit."""
    assert "died" not in cell, cell
    assert cell["clean after"]
    assert cell["lost"] == []
    missed = {name for name, how in cell["loads"].items() if how == "missed"}
    assert {name: how for name, how in cell["after"].items() if how != "right" and name not in missed} == {}


@pytest.mark.slow
@pytest.mark.parametrize("damage", NOTICED)
def test_the_next_opening_notices_without_mapping_and_a_repair_brings_everything_back(
    noticed: Cells, damage: str
) -> None:
    cell = noticed[damage]
    assert_mended(cell)
    assert (cell["opened"], cell["mapped"], cell["clean"]) == ("broken", False, False)
    assert cell["after"] == ALL_RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("damage", HARMLESS)
def test_what_does_no_harm_is_let_pass(harmless: Cells, damage: str) -> None:
    cell = harmless[damage]
    assert_mended(cell)
    assert (cell["opened"], cell["loads"], cell["clean"], cell["after"]) == ("open", ALL_RIGHT, True, ALL_RIGHT)


def assert_noticed_or_harmless(cell: dict[str, Any]) -> None:
    """Either opening notices, without mapping; or entries load, or a check says why they do not."""
    assert_mended(cell)
    if cell["opened"] == "broken":
        assert (cell["mapped"], cell["clean"], cell["after"]) == (False, False, ALL_RIGHT)
    else:
        assert cell["loads"] == ALL_RIGHT or cell["findings"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("damage", EITHER)
def test_damage_anywhere_is_noticed_or_harmless(either: Cells, damage: str) -> None:
    assert_noticed_or_harmless(either[damage])


@pytest.mark.soak
@pytest.mark.parametrize("part", range(8))
def test_damage_everywhere_is_noticed_or_harmless(tmp_path: Path, part: int) -> None:
    for damage, cell in after_damage(tmp_path, dict(list(EVERYWHERE.items())[part::8])).items():
        try:
            assert_noticed_or_harmless(cell)
        except AssertionError as error:
            raise AssertionError(f"{damage}: {cell}") from error


if __name__ == "__main__":
    for root_ in sys.argv[1:]:
        print(json.dumps(live_with(root_)), flush=True)
