"""What each command prints and does, for people and for programs."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockstore import Identity, Store

GOLDEN = sorted((Path(__file__).resolve().parent.parent / "golden").rglob("*.mlxkv"))
SaveInto = Callable[..., list[str]]


def disk_bytes(root: Path) -> int:
    """What headers and blocks take on the disk."""
    files = [*root.glob("blocks/*"), *root.glob("entries/*/*")]
    return sum(path.lstat().st_blocks * 512 for path in files)


# ---- where the store is, and how results are printed


def test_root_and_json_stand_before_or_behind_the_command(command: Any, empty: Path) -> None:
    root = str(empty)
    outputs = [
        command("--root", root, "--json", "ls"),
        command("ls", "--root", root, "--json"),
        command("--json", "ls", "--root", root),
        command("--root", root, "ls", "--json"),
    ]
    assert [outcome.json for outcome in outputs] == [{"total": 0, "entries": []}] * 4


def test_the_root_behind_the_command_wins_then_the_one_before_it_then_the_environment(
    command: Any, empty: Path, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKSTORE_ROOT", str(filled.root))
    assert command("ls", "--json").json["total"] == 2
    assert command("--root", str(empty), "ls", "--json").json["total"] == 0
    assert command("--root", str(empty), "ls", "--json", "--root", str(filled.root)).json["total"] == 2


def test_the_default_root_is_in_the_users_cache(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command("ls", "--json").json["error"]["facts"]["path"] == str(tmp_path / ".cache" / "blockstore")


@pytest.mark.parametrize("args", [["stats"], ["ls"], ["show", "abcd"], ["rm", "abcd"], ["gc"], ["check"]])
def test_a_light_command_creates_no_store(command: Any, tmp_path: Path, args: list[str]) -> None:
    outcome = command(*args, root=tmp_path / "none")
    assert (outcome.code, outcome.out) == (3, "")
    assert "there is no store here" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("name", ["", "stats", "ls", "show", "rm", "gc", "check", "demo"])
def test_help_is_everywhere(command: Any, name: str, flag: str) -> None:
    outcome = command(*filter(None, [name, flag]))
    assert outcome.code == 0
    assert f"Usage: blockstore {name}".strip() in outcome.out
    assert "completion" not in outcome.out


def test_the_main_help_has_examples_and_the_exit_codes(command: Any) -> None:
    text = command("--help").out
    assert "  blockstore show 3f2a   " in text
    assert "  4    another process holds the store" in text


def test_the_version_is_printed(command: Any) -> None:
    assert command("--version").out.startswith("blockstore ")


# ---- stats


def test_stats_of_an_empty_store(command: Any, empty: Path) -> None:
    numbers = command("stats", "--json", root=empty).json
    assert (numbers["entries"], numbers["tokens"], numbers["logical_bytes"]) == (0, 0, 0)
    assert numbers["deduplication_ratio"] is None
    text = command("stats", root=empty).out
    assert "entries        0\n" in text
    assert "deduplication  -\n" in text


def test_stats_are_exact(command: Any, filled: Any) -> None:
    numbers = command("stats", "--json", root=filled.root).json
    with Store(filled.root, create=False) as store:
        expected = store.stats()
    assert numbers["entries"] == 2
    assert numbers["tokens"] == 210
    assert numbers["logical_bytes"] == expected.logical_bytes == 210 * 2 * 2 * (64 + 32) * 4
    assert numbers["deduplication_ratio"] == expected.logical_bytes / expected.block_bytes > 1
    names = ["root", "max_bytes", "free_bytes", "block_hash", "span", "durability"]
    assert {name: numbers[name] for name in names if name != "free_bytes"} == {
        name: getattr(expected, name) for name in names if name != "free_bytes"
    }


def test_stats_for_people(command: Any, filled: Any) -> None:
    shown = dict(line.split("  ", 1) for line in command("stats", root=filled.root).lines)
    shown = {key: value.strip() for key, value in shown.items()}
    assert shown["entries"] == "2"
    assert shown["tokens"] == "210"
    assert shown["logical size"] == "315 KiB (all tensors of all entries)"
    assert shown["span"] == "64 tokens"
    assert shown["durability"] == "none"
    assert shown["blocks"].endswith("(0 dead)")


# ---- ls


def test_ls_of_an_empty_store(command: Any, empty: Path) -> None:
    assert command("ls", root=empty).out == "no entries\n"


def test_ls_has_the_newest_use_first(command: Any, filled: Any) -> None:
    assert [e["entry_id"] for e in command("ls", "--json", root=filled.root).json["entries"]] == [
        filled.long,
        filled.short,
    ]
    with Store(filled.root) as store:
        store.load(filled.short)
    assert [e["entry_id"] for e in command("ls", "--json", root=filled.root).json["entries"]] == [
        filled.short,
        filled.long,
    ]


def test_ls_for_people(command: Any, filled: Any) -> None:
    head, first, second = command("ls", root=filled.root).lines
    assert head.split() == ["ID", "MODEL", "NS", "TOKENS", "SIZE", "AGE", "PINNED", "KINDS"]
    assert first.split()[:6] == [filled.long[:8], "org/model", '""', "140", "210", "KiB"]
    assert second.split()[:6] == [filled.short[:8], "org/model", '""', "70", "105", "KiB"]
    assert first.endswith("-       kv×2")


def test_ls_shows_pins(command: Any, filled: Any) -> None:
    with Store(filled.root) as store:
        store.pin(filled.short)
    assert [e["pinned"] for e in command("ls", "--json", root=filled.root).json["entries"]] == [False, True]
    assert "yes" in command("ls", root=filled.root).lines[2].split()


def test_ls_with_a_limit_says_how_many_are_left_out(command: Any, filled: Any) -> None:
    limited = command("ls", "--limit", "1", "--json", root=filled.root).json
    assert limited["total"] == 2
    assert [entry["entry_id"] for entry in limited["entries"]] == [filled.long]
    assert command("ls", "--limit", "1", root=filled.root).lines[-1] == "and 1 more entry"
    assert command("ls", "--limit", "0", "--json", root=filled.root).json["entries"] == []


# ---- show


def test_show_takes_the_beginning_of_an_id(command: Any, filled: Any) -> None:
    found = command("show", filled.long[:6], "--json", root=filled.root).json
    assert found["entry_id"] == filled.long
    assert found["token_count"] == 140
    assert found["model_id"] == "org/model"
    assert found["format_version"] == 5
    assert [cache["kind"] for cache in found["caches"]] == ["kv", "kv"]
    keys = found["caches"][0]["tensors"][0]
    assert keys == {"name": "keys", "dtype": "float32", "shape": [1, 2, 140, 64], "bytes": 140 * 2 * 64 * 4}
    assert "tokens" not in found
    assert command("show", filled.long[:6].upper(), "--json", root=filled.root).json == found


def test_show_for_people(command: Any, filled: Any) -> None:
    lines = [" ".join(line.split()) for line in command("show", filled.long, root=filled.root).lines]
    assert f"entry {filled.long}" in lines
    assert "shortens to any length" in lines
    assert "0-1 kv 140 - keys float32 1×2×140×64; values float32 1×2×140×32" in lines


def test_show_prints_tokens_on_request(command: Any, filled: Any) -> None:
    assert command("show", filled.short, "--tokens", "--json", root=filled.root).json["tokens"] == list(range(70))
    lines = command("show", filled.short, "--tokens", root=filled.root).lines
    assert lines[-1] == " ".join(map(str, range(70)))


@pytest.mark.parametrize("which", ["short", "long"])
def test_what_a_removal_gives_back_is_known_before(command: Any, filled: Any, which: str) -> None:
    space = command("show", getattr(filled, which), "--json", root=filled.root).json["space"]
    assert space["shared_bytes"] > 0
    assert space["removal_bytes"] == space["unique_bytes"] + space["header_bytes"]
    before = disk_bytes(filled.root)
    assert command("rm", getattr(filled, which), root=filled.root).code == 0
    assert command("gc", root=filled.root).code == 0
    assert before - disk_bytes(filled.root) == space["removal_bytes"]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_show_describes_files_of_every_version(command: Any, path: Path) -> None:
    found = command("show", str(path), "--json").json
    version = int(path.name[1]) if path.name[0] == "v" else 5
    assert (found["format_version"], found["entry_id"], found["space"]) == (version, None, None)
    assert found["caches"]
    assert f"format          version {version}, " in command("show", str(path)).out


def test_show_needs_no_store_for_a_file(command: Any, filled: Any, tmp_path: Path) -> None:
    (header,) = filled.root.glob(f"entries/*/{filled.short}.mlxkv")
    found = command("show", str(header), "--json", root=tmp_path / "none").json
    assert (found["token_count"], found["path"]) == (70, str(header))


# ---- rm


def test_rm_removes_several(command: Any, filled: Any) -> None:
    outcome = command("rm", filled.short[:7], filled.long[:7], filled.long, "--json", root=filled.root)
    assert outcome.code == 0
    assert outcome.json["removed"] == [filled.short, filled.long]
    assert outcome.json["failed"] == []
    assert command("ls", "--json", root=filled.root).json["total"] == 0
    collected = command("gc", "--json", root=filled.root).json
    assert collected["bytes"] == outcome.json["collectable_bytes"] > 0


def test_rm_reports_what_it_does_not_know_and_removes_the_others(command: Any, filled: Any) -> None:
    outcome = command("rm", "00000000", filled.short, "abc", "no/path", root=filled.root)
    assert outcome.code == 1
    assert outcome.lines[0].startswith(f"removed {filled.short}")
    assert outcome.lines[1].startswith("1 entry; ")
    assert "`blockstore gc`" in outcome.lines[1]
    assert outcome.err.count("\n") == 3
    assert "there is no such entry (entry_id 00000000)" in outcome.err
    remaining = command("rm", "00000000", "--json", root=filled.root)
    assert [(one["entry"], one["code"]) for one in remaining.json["failed"]] == [("00000000", "entry-gone")]
    assert remaining.code == 1
    assert command("ls", "--json", root=filled.root).json["total"] == 1


def test_rm_dry_run_changes_nothing(command: Any, filled: Any) -> None:
    outcome = command("rm", "--dry-run", filled.short, root=filled.root)
    assert outcome.lines[0].startswith(f"would remove {filled.short}")
    assert command("ls", "--json", root=filled.root).json["total"] == 2
    real = command("rm", filled.short, "--json", root=filled.root).json
    assert real["collectable_bytes"] > 0


# ---- gc


def test_gc_of_an_empty_store(command: Any, empty: Path) -> None:
    assert command("gc", root=empty).out == "nothing to collect\n"
    plan = command("gc", "--json", root=empty).json
    assert plan == {"dry_run": False, "full": False, "bytes": 0, "summary": [], "items": []}


def test_a_dry_run_prints_what_gc_then_does(command: Any, filled: Any) -> None:
    command("rm", filled.short, filled.long, root=filled.root)
    planned = command("gc", "--dry-run", "--json", root=filled.root).json
    assert planned["dry_run"] is True
    assert command("gc", "--dry-run", root=filled.root).lines[-1].startswith("would give back ")
    done = command("gc", "--json", root=filled.root).json
    assert done["items"] == planned["items"] != []
    assert done["summary"] == planned["summary"]
    assert sum(line["count"] for line in done["summary"]) == len(done["items"])
    assert list((filled.root / "blocks").iterdir()) == []


def test_gc_for_people(command: Any, filled: Any) -> None:
    command("rm", filled.short, filled.long, root=filled.root)
    head, *_, block, last = command("gc", root=filled.root).lines
    assert head.split() == ["WHAT", "WHY", "COUNT", "SIZE"]
    assert block.startswith("block  nothing refers to it")
    assert last.startswith("gave back ")


def test_full_gc_sweeps_files_that_nobody_knows(command: Any, filled: Any) -> None:
    stray = filled.root / "blocks" / ("ab" * 32)
    stray.write_bytes(b"stray")
    assert command("gc", "--json", root=filled.root).json["items"] == []
    (item,) = command("gc", "--full", "--dry-run", "--json", root=filled.root).json["items"]
    assert (item["what"], item["name"]) == ("block", "ab" * 32)
    assert stray.exists()
    assert command("gc", "--full", root=filled.root).code == 0
    assert not stray.exists()


def test_full_gc_says_so_when_a_header_stops_it(command: Any, filled: Any) -> None:
    (header,) = filled.root.glob(f"entries/*/{filled.short}.mlxkv")
    header.with_name("ab" * 16 + ".mlxkv").write_bytes(b"no header")
    outcome = command("gc", "--full", root=filled.root)
    assert outcome.code == 1
    assert "left out: a header cannot be read" in outcome.out


# ---- check


@pytest.mark.parametrize("flags", [[], ["--deep"]])
def test_check_of_a_sound_store(command: Any, filled: Any, flags: list[str]) -> None:
    outcome = command("check", *flags, root=filled.root)
    assert outcome.code == 0
    assert outcome.lines[-1] == "the store is whole"
    found = command("check", *flags, "--json", root=filled.root).json
    assert (found["clean"], found["repaired"], found["headers"], found["problems"]) == (True, False, 2, [])


def test_leftovers_are_no_problem(command: Any, filled: Any) -> None:
    (filled.root / "blocks" / ("ab" * 32)).write_bytes(b"stray")
    outcome = command("check", root=filled.root)
    assert outcome.code == 0
    assert "leftover" in outcome.out
    assert outcome.lines[-1] == "the store is whole; `blockstore gc --full` takes the leftovers"


def test_only_a_deep_check_reads_the_blocks(command: Any, filled: Any) -> None:
    block = max((filled.root / "blocks").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(block.read_bytes())
    data[5] ^= 1
    block.write_bytes(data)
    assert command("check", root=filled.root).code == 0
    outcome = command("check", "--deep", "--json", root=filled.root)
    assert outcome.code == 1
    assert {problem["severity"] for problem in outcome.json["problems"]} == {"damage"}
    assert block.name in {problem["name"] for problem in outcome.json["problems"]}


def test_repair_drops_what_is_damaged_and_says_so(command: Any, filled: Any) -> None:
    (header,) = filled.root.glob(f"entries/*/{filled.short}.mlxkv")
    header.write_bytes(b"no header")
    outcome = command("check", root=filled.root)
    assert outcome.code == 1
    assert outcome.lines[-1].endswith("run `blockstore check --repair`")
    mended = command("check", "--repair", root=filled.root)
    assert mended.code == 1
    assert f"repaired: header {filled.short}: moved to quarantine/" in mended.out
    assert mended.lines[-1] == "the store is whole again, without what was damaged"
    assert command("check", root=filled.root).code == 0
    assert [e["entry_id"] for e in command("ls", "--json", root=filled.root).json["entries"]] == [filled.long]


def truncated(index: Path) -> None:
    with index.open("r+b") as file:
        file.truncate(5000)


def garbage(index: Path) -> None:
    index.write_bytes(b"\xa5" * 40_000)


@pytest.mark.parametrize("damage", [truncated, garbage, Path.unlink])
def test_a_broken_index_is_found_and_rebuilt(command: Any, filled: Any, damage: Callable[[Path], None]) -> None:
    listed = command("ls", "--json", root=filled.root).json
    damage(filled.root / "index" / "data.mdb")
    for args in (["ls"], ["stats"], ["gc"], ["show", filled.short], ["rm", filled.short]):
        outcome = command(*args, root=filled.root)
        assert outcome.code == 5
        assert outcome.err.splitlines()[-1].endswith("`blockstore check --repair`.")
    found = command("check", "--json", root=filled.root)
    assert found.code == 1
    assert [problem["what"] for problem in found.json["problems"]] == ["index"]
    mended = command("check", "--repair", "--json", root=filled.root)
    assert (mended.code, mended.json["clean"], mended.json["repaired"]) == (0, True, True)
    assert mended.json["repairs"][0].startswith("index: ")
    assert "last uses and pins are lost" in mended.json["repairs"][0]
    again = command("ls", "--json", root=filled.root).json
    uses = {one["entry_id"]: one.pop("used_at_ms") for one in [*listed["entries"], *again["entries"]]}
    assert min(uses.values()) >= max(one["created_at_ms"] for one in again["entries"]), "as if used by the repair"
    assert sorted(map(json.dumps, again["entries"])) == sorted(map(json.dumps, listed["entries"]))


# ---- ids


def test_ambiguous_beginnings_are_refused_and_short_ids_told_apart(
    command: Any, tmp_path: Path, save_into: SaveInto, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter(["12345678" + "9" + "0" * 23, "12345678" + "a" + "0" * 23])
    monkeypatch.setattr("blockstore.leases.secrets", SimpleNamespace(token_hex=lambda count: next(ids)))
    first, second = save_into(tmp_path / "store", [5, 9], Identity("m", "c", "t"))
    root = tmp_path / "store"
    assert command("show", "12345678", root=root).code == 3
    assert "several entries begin like that" in command("show", "1234", root=root).err
    assert [line.split()[0] for line in command("ls", root=root).lines[1:]] == [second[:9], first[:9]]
    outcome = command("rm", "12345678", "--json", root=root)
    assert (outcome.code, outcome.json["failed"][0]["code"]) == (1, "invalid-input")
    assert command("rm", "123456789", root=root).code == 0
