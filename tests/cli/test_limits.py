"""The commands that say what a store may take, and what stays; and commands on a store that one may only read."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from blockstore import Store, StoreBroken, probe
from blockstore.fs import FileSystem


def test_limits_are_printed_and_changed(command: Any, empty: Path) -> None:
    before = command("limits", "--json", root=empty).json
    assert (before["min_free_bytes"], before["max_age_s"], before["quotas"]) == (0, 0, {})
    changed = command(
        "limits", "--max-bytes", "2G", "--min-free", "512MiB", "--max-age", "1.5", "--quota", "org/m=1.5K",
        "--quota", "a=b=7", "--json", root=empty,
    ).json  # fmt: skip
    assert changed == {
        "max_bytes": 2 << 30,
        "min_free_bytes": 512 << 20,
        "max_age_s": 129_600,
        "quotas": {"org/m": 1536, "a=b": 7},
    }
    assert command("limits", "--json", root=empty).json == changed
    text = command("limits", "--quota", "a=b=0", root=empty).lines
    assert [line.split("  ")[0] for line in text] == ["cap", "left free on disk", "age limit", "quota of org/m"]
    lifted = command("limits", "--max-bytes", "0", "--min-free", "0", "--max-age", "0", "--json", root=empty).json
    assert lifted == {"max_bytes": 0, "min_free_bytes": 0, "max_age_s": 0, "quotas": {"org/m": 1536}}


@pytest.mark.parametrize(
    ("option", "text"), [("--max-bytes", "many"), ("--min-free", "-1"), ("--quota", "model"), ("--quota", "model=x")]
)
def test_what_is_no_size_is_refused_by_name(command: Any, empty: Path, option: str, text: str) -> None:
    found = command("limits", option, text, "--json", root=empty)
    assert found.code == 3
    assert found.json["error"]["facts"]["field"] == option


@pytest.mark.parametrize("text", ["inf", "1e308"])
def test_no_number_of_days_is_refused_by_name(command: Any, empty: Path, text: str) -> None:
    found = command("limits", "--max-age", text, "--json", root=empty)
    assert (found.code, found.json["error"]["facts"]["field"]) == (3, "--max-age")


def test_nan_is_no_number_of_days(command: Any, empty: Path) -> None:
    assert command("limits", "--max-age", "nan", root=empty).code in (2, 3)  # the parser may refuse it first


def test_what_is_little_lifts_no_limit(command: Any, empty: Path) -> None:
    little = ["--max-age", "0.000001", "--min-free", "0.001K", "--max-bytes", "0.1"]
    found = command("limits", *little, "--json", root=empty).json
    assert (found["max_age_s"], found["min_free_bytes"], found["max_bytes"]) == (1, 2, 1)


def test_a_size_is_exact_and_one_without_end_is_refused(command: Any, empty: Path) -> None:
    assert command("limits", "--max-bytes", "9007199254740993", "--json", root=empty).json["max_bytes"] == (1 << 53) + 1
    assert command("limits", "--max-bytes", "9" * 5000, "--json", root=empty).code == 3


def test_stats_show_the_limits_and_each_model(command: Any, filled: Any) -> None:
    command("limits", "--quota", "org/model=1G", "--min-free", "1M", "--max-age", "3", root=filled.root)
    models = command("stats", "--json", root=filled.root).json["models"]
    assert [(model["model_id"], model["entries"], model["quota_bytes"]) for model in models] == [
        ("org/model", 2, 1 << 30)
    ]
    assert 0 < models[0]["held_bytes"] < 1 << 30
    text = command("stats", root=filled.root).out
    assert "org/model: 2 entries" in text
    assert "of a quota of 1.00 GiB" in text
    assert "at least 1.00 MiB stay free" in text
    assert "3 days unused" in text


def test_pin_and_unpin(command: Any, filled: Any) -> None:
    done = command("pin", filled.short, "ffff", "--json", root=filled.root)
    assert (done.code, done.json["entries"], [one["entry"] for one in done.json["failed"]]) == (
        1,
        [filled.short],
        ["ffff"],
    )
    assert [entry.pinned for entry in listed(filled.root, filled.short)] == [True]
    assert command("pin", "--off", filled.short, root=filled.root).lines == [f"unpinned {filled.short}"]
    assert [entry.pinned for entry in listed(filled.root, filled.short)] == [False]


def listed(root: Path, entry_id: str) -> list[Any]:
    with Store(root) as store:
        return [entry for entry in store.entries() if entry.entry_id == entry_id]


LOOKS = [["stats"], ["ls"], ["show", "ID"], ["gc", "--dry-run"], ["gc", "--dry-run", "--full"], ["check", "--deep"],
         ["rm", "--dry-run", "ID"], ["limits"]]  # fmt: skip
CHANGES = [["rm", "ID"], ["gc"], ["pin", "ID"], ["limits", "--max-age", "1"]]


@pytest.mark.parametrize("args", LOOKS, ids=" ".join)
def test_looking_works_where_one_may_only_read(
    command: Any, filled: Any, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystem, "is_writable", lambda self, path: False)
    assert command(*[filled.long if word == "ID" else word for word in args], root=filled.root).code == 0


@pytest.mark.parametrize("args", CHANGES, ids=" ".join)
def test_changing_is_refused_where_one_may_only_read(
    command: Any, filled: Any, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystem, "is_writable", lambda self, path: False)
    found = command(*[filled.long if word == "ID" else word for word in args], "--json", root=filled.root)
    assert (found.code, found.json["error"]["code"]) == (8, "not-permitted")


# ---- what one may not read or write is no damage


def refuse(monkeypatch: pytest.MonkeyPatch, method: str, place: Path) -> None:
    """Let the system refuse a call of the file system for this path."""
    real = getattr(FileSystem, method)

    def refused(self: FileSystem, path: str, *args: Any) -> Any:
        if path == str(place):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(self, path, *args)

    monkeypatch.setattr(FileSystem, method, refused)


OPENED = {
    "index/data.mdb": "open_read",
    "index/lock": "open_lock",
    "index/lock.turn": "open_lock",
    "store.lock": "open_lock",
    "store.json": "read_file",
}
BY_CHECK = [(["check"], name) for name in OPENED]
BY_REPAIR = [(["check", "--repair"], name) for name in ("index/data.mdb", "store.lock", "store.json")]


@pytest.mark.parametrize(("args", "name"), [*BY_CHECK, *BY_REPAIR])
def test_a_check_of_what_one_may_not_read_says_so(
    command: Any, filled: Any, args: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (filled.root / "index.stamp").unlink()
    refuse(monkeypatch, OPENED[name], filled.root / name)
    found = command(*args, "--json", root=filled.root)
    assert (found.code, found.json["error"]["code"]) == (8, "not-permitted")
    assert found.json["error"]["facts"]["path"] == str(filled.root / name)
    assert found.json["error"]["hint"]


@pytest.mark.parametrize("args", [["check"], ["check", "--repair"]], ids=" ".join)
def test_an_index_that_the_process_which_walks_it_may_not_read_is_no_damage(
    command: Any, filled: Any, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_PROGRAM", "raise SystemExit(87)")
    found = command(*args, "--json", root=filled.root)
    assert (found.code, found.json["error"]["code"]) == (8, "not-permitted")


def test_a_repair_of_what_one_may_not_write_is_refused(
    command: Any, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystem, "is_writable", lambda self, path: False)
    found = command("check", "--repair", "--json", root=filled.root)
    assert (found.code, found.json["error"]["code"]) == (8, "not-permitted")
    assert found.json["error"]["hint"].startswith("Repair it as its owner")


# ---- a store of which something is missing


@pytest.mark.parametrize("name", ["leases", "index", "index/lock"])
def test_what_is_missing_or_misplaced_is_reported_and_mended(command: Any, filled: Any, name: str) -> None:
    place = filled.root / name
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    if name == "index/lock":
        place.mkdir()
    assert command("stats", root=filled.root).code == 5
    found = command("check", "--json", root=filled.root)
    assert (found.code, [one["name"] for one in found.json["problems"]]) == (1, [name])
    assert command("check", "--repair", root=filled.root).code == 0
    assert command("check", root=filled.root).code == 0
    assert len(command("ls", "--json", root=filled.root).json["entries"]) == 2


def test_a_repair_that_helps_nothing_does_not_say_that_it_did(
    command: Any, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: Store) -> None:
        raise StoreBroken("it is as it was")

    monkeypatch.setattr(Store, "entries", fail)
    assert command("check", "--repair", root=filled.root).code == 5
