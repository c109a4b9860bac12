"""import and export: what they print and do, for people and for programs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcodecs
from blockstore import Identity, Store, load_kv_cache, save_kv_cache
from cache_cases import facts, feed

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
REFERENCE = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Three good files of three versions, one of them in a folder below, and a v5 directory's blocks."""
    folder = tmp_path / "files"
    (folder / "below").mkdir(parents=True)
    for name in ("v3-kv.mlxkv", "v3-ssm.mlxkv"):
        shutil.copy(GOLDEN / name, folder / name)
    shutil.copy(GOLDEN / "v5" / "long-kv.mlxkv", folder / "below" / "long.mlxkv")
    shutil.copytree(GOLDEN / "v5" / "blocks", folder / "below" / "blocks")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def damaged(folder: Path) -> Path:
    path = folder / "bad.mlxkv"
    data = (GOLDEN / "v3-qkv.mlxkv").read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return path


def entries(root: Path) -> list[Any]:
    with Store(root, create=False) as store:
        return store.entries()


# ---- import


def test_import_takes_files_and_directories_and_makes_the_store(command: Any, files: Path, root: Path) -> None:
    outcome = command("import", str(files / "v3-kv.mlxkv"), str(files), root=root)
    assert (outcome.code, outcome.err) == (0, "")
    assert re.fullmatch(r"imported 3 files: [\d.]+ KiB of tensors, [\d.]+ KiB written", outcome.lines[0])
    assert outcome.lines[1:] == ["1 file was there already"]
    assert sorted(entry.token_count for entry in entries(root)) == [5, 9, 300]
    assert {entry.model_id for entry in entries(root)} == {"golden/tiny-1"}


def test_import_again_does_nothing(command: Any, files: Path, root: Path) -> None:
    command("import", str(files), root=root)
    before = [entry.entry_id for entry in entries(root)]
    outcome = command("import", str(files), root=root)
    assert (outcome.code, outcome.lines) == (
        0, ["imported 0 files: 0 B of tensors, 0 B written", "3 files were there already"],
    )  # fmt: skip
    assert [entry.entry_id for entry in entries(root)] == before


def test_import_of_an_empty_directory(command: Any, tmp_path: Path, root: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert command("import", str(tmp_path / "empty"), root=root).lines == [
        "imported 0 files: 0 B of tensors, 0 B written"
    ]


def test_a_bad_file_is_reported_and_passed_over(command: Any, files: Path, root: Path) -> None:
    bad, missing = damaged(files), files / "none.mlxkv"
    outcome = command("import", str(files), str(missing), root=root)
    assert outcome.code == 1
    assert outcome.lines[0].startswith("imported 3 files: ")
    first, second = outcome.err.splitlines()
    assert first.startswith(f"blockstore: {bad}: a tensor does not have the bytes of its hash (field tensor ")
    assert second == f"blockstore: {missing}: No such file or directory"
    assert len(entries(root)) == 3


def test_import_as_json(command: Any, files: Path, root: Path) -> None:
    bad = damaged(files)
    outcome = command("import", "--json", str(files), root=root)
    assert (outcome.code, outcome.err) == (1, "")
    found = outcome.json
    assert set(found) == {"files", "failed"}
    assert {one["outcome"] for one in found["files"]} == {"imported"}
    assert {one["entry_id"] for one in found["files"]} == {entry.entry_id for entry in entries(root)}
    assert all(one["saved"]["written_bytes"] > 0 for one in found["files"])
    (failed,) = found["failed"]
    assert set(failed) == {"path", "code", "message", "exit_code"}
    assert (failed["path"], failed["code"], failed["exit_code"]) == (str(bad), "corrupt", 7)
    again = command("import", "--json", str(files), root=root).json
    assert [(one["outcome"], one["saved"]) for one in again["files"]] == [("present", None)] * 3


def test_a_file_that_another_entry_stands_in_the_way_of_is_named(command: Any, files: Path, root: Path) -> None:
    command("import", str(files), root=root)
    (entry,) = (entry for entry in entries(root) if entry.token_count == 5)
    path = str(GOLDEN / "v4-kv.mlxkv")
    outcome = command("import", path, root=root)
    assert outcome.code == 0
    assert outcome.lines[1] == (
        f"passed over {path}: entry {entry.entry_id} has the same identity and tokens, and is as new"
    )


def test_the_files_stay_as_they_are(command: Any, files: Path, root: Path) -> None:
    def state() -> dict[Path, Any]:
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files.rglob("*") if path.is_file()}

    before = state()
    command("import", str(files), root=root)
    command("rm", *(entry.entry_id for entry in entries(root)), root=root)
    command("gc", "--full", root=root)
    assert state() == before


def test_a_store_without_room_ends_the_import(command: Any, files: Path, root: Path) -> None:
    """The next file would fail alike, after it was read."""
    Store(root, durability="none", max_bytes=4096).close()
    outcome = command("import", str(files), root=root)
    assert outcome.code == 6
    assert outcome.err.splitlines()[0].startswith("blockstore: the store's cap leaves no room")


def test_import_from_another_stores_entries(command: Any, filled: Any, root: Path) -> None:
    outcome = command("import", str(filled.root / "entries"), root=root)
    assert (outcome.code, outcome.lines[0].split(":")[0]) == (0, "imported 2 files")
    assert sorted(entry.token_count for entry in entries(root)) == [70, 140]


def test_file_names_are_data(command: Any, root: Path, tmp_path: Path) -> None:
    odd = tmp_path / "\x1b[31m\n.mlxkv"
    odd.write_bytes(b"nothing")
    outcome = command("import", str(odd), root=root)
    assert outcome.code == 1
    assert "\x1b" not in outcome.err + outcome.out
    assert len(outcome.err.splitlines()) == 1


def test_progress_is_for_who_watches(files: Path, root: Path, environment: dict[str, str], process: Any) -> None:
    seen = on_a_terminal(environment, "import", str(files), "--root", str(root))
    assert "importing" in seen
    assert on_a_terminal(environment, "import", str(files), "--json", "--root", str(root)) == ""
    assert process("import", str(files), "--root", str(root)).err == ""
    (entry, *_) = entries(root)
    out = str(root.parent / "out")
    assert "exporting" in on_a_terminal(environment, "export", entry.entry_id, out, "--root", str(root))
    assert process("export", entry.entry_id, out, "--root", str(root)).err == ""


def on_a_terminal(environment: dict[str, str], *args: str) -> str:
    """What a terminal saw that stderr was."""
    ours, theirs = os.openpty()
    line = [sys.executable, "-m", "blockstore", *args]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=theirs, env={**environment, "TERM": "xterm"}, check=True)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert b"\x1b" not in done.stdout
    return seen.decode()


# ---- export


@pytest.mark.parametrize("layout", ["monolith", "rows"])
def test_export_writes_files_that_load(command: Any, filled: Any, tmp_path: Path, layout: str) -> None:
    out = tmp_path / "out"
    outcome = command("export", filled.short[:8], filled.long, str(out), "--layout", layout, root=filled.root)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.lines == [str(out / f"{entry_id}.mlxkv") for entry_id in (filled.short, filled.long)]
    with Store(filled.root) as store:
        for entry_id in (filled.short, filled.long):
            file, stored = load_kv_cache(out / f"{entry_id}.mlxkv", verify=True), store.load(entry_id)
            assert file.tokens == stored.tokens
            assert [facts(cache) for cache in file.caches] == [facts(cache) for cache in stored.caches]
    assert (out / "blocks").exists() == (layout == "rows")


def test_export_as_json(command: Any, filled: Any, tmp_path: Path) -> None:
    outcome = command("export", "--json", filled.short, "ffffffff", str(tmp_path), root=filled.root)
    assert (outcome.code, outcome.err) == (1, "")
    assert outcome.json["exported"] == [{"entry_id": filled.short, "path": str(tmp_path / f"{filled.short}.mlxkv")}]
    (failed,) = outcome.json["failed"]
    assert (failed["entry"], failed["code"], failed["exit_code"]) == ("ffffffff", "entry-gone", 7)
    assert set(failed) == {"entry", "code", "message", "exit_code"}


def test_an_entry_that_is_not_there_hides_no_other(command: Any, filled: Any, tmp_path: Path) -> None:
    outcome = command("export", "ffffffff", filled.short, str(tmp_path), root=filled.root)
    assert outcome.code == 1
    assert outcome.lines == [str(tmp_path / f"{filled.short}.mlxkv")]
    assert outcome.err.startswith("blockstore: ffffffff: there is no such entry")
    assert command("export", "ffffffff", str(tmp_path), root=filled.root).lines == ["nothing was exported"]


def test_a_kind_that_mlx_bun_does_not_know_is_named(command: Any, tmp_path: Path) -> None:
    with Store(tmp_path / "store", durability="none") as store:
        cache = feed(kvcodecs.RotatingKVCache(8, keep=2), 9)
        entry_id = store.save(range(9), [cache], Identity("m", None, None)).entry_id
    outcome = command("export", entry_id, str(tmp_path / "out"), root=tmp_path / "store")
    assert outcome.code == 1
    assert f"blockstore: {entry_id}: mlx-bun has no cache of kind rotating with keep" in outcome.err
    assert not (tmp_path / "out").exists()


def test_export_of_an_unknown_layout(command: Any, filled: Any, tmp_path: Path) -> None:
    outcome = command("export", filled.short, str(tmp_path / "out"), "--layout", "v3", root=filled.root)
    assert outcome.code == 2
    assert "'monolith'" in outcome.err
    assert not (tmp_path / "out").exists()


def test_export_makes_no_store(command: Any, tmp_path: Path) -> None:
    outcome = command("export", "abcdabcd", str(tmp_path / "out"), root=tmp_path / "none")
    assert (outcome.code, list(tmp_path.iterdir())) == (3, [])


def test_what_was_exported_can_be_imported(command: Any, filled: Any, root: Path, tmp_path: Path) -> None:
    command("export", filled.short, filled.long, str(tmp_path / "out"), "--layout", "rows", root=filled.root)
    outcome = command("import", "--json", str(tmp_path / "out"), root=root).json
    assert [one["outcome"] for one in outcome["files"]] == ["imported"] * 2
    described = [command("show", "--json", one["entry_id"], root=root).json for one in outcome["files"]]
    original = [command("show", "--json", entry_id, root=filled.root).json for entry_id in (filled.short, filled.long)]
    for key in ("model_id", "ns", "token_count", "created_at_ms", "caches", "logical_bytes"):
        assert sorted(str(one[key]) for one in described) == sorted(str(one[key]) for one in original)


# ---- both


@pytest.mark.parametrize("args", [["import"], ["export"], ["export", "abcdabcd"], ["import", "--nope", "x"]])
def test_a_bad_command_line_is_2(command: Any, args: list[str]) -> None:
    assert command(*args).code == 2


WITHOUT_MLX = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mlx":
            raise ModuleNotFoundError("No module named 'mlx'", name="mlx")
sys.meta_path.insert(0, Missing())
from blockstore.cli import main
main()
"""


@pytest.mark.parametrize("args", [["import", "x"], ["export", "abcdabcd", "out"]])
def test_without_mlx_they_say_what_to_install(
    args: list[str], filled: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    line = [sys.executable, "-c", WITHOUT_MLX, *args, "--root", str(filled.root)]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (9, "")
    assert "pip install" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["import", "export"])
def test_help(command: Any, name: str) -> None:
    outcome = command(name, "--help")
    assert outcome.code == 0
    assert f"Usage: blockstore {name}" in outcome.out


def test_every_key_of_their_json_is_described(command: Any, files: Path, root: Path, tmp_path: Path) -> None:
    damaged(files)
    imported = command("import", "--json", str(files), root=root).json
    (entry, *_) = entries(root)
    exported = command("export", "--json", entry.entry_id, "ffffffff", str(tmp_path / "out"), root=root).json
    for name, found in (("import", imported), ("export", exported)):
        section = REFERENCE.split(f"## `blockstore {name}`")[1].split("\n## ")[0]
        keys = set(re.findall(r'"(\w+)":', json.dumps(found)))
        assert {key for key in keys if f"`{key}`" not in section} == set()


def test_a_file_shows_as_its_entry_does(command: Any, tmp_path: Path) -> None:
    save_kv_cache(tmp_path / "a.mlxkv", range(9), [feed(kvcodecs.KVCache(), 9)])
    shown = command("show", "--json", str(tmp_path / "a.mlxkv")).json
    entry_id = command("import", "--json", str(tmp_path / "a.mlxkv"), root=tmp_path / "s").json["files"][0]["entry_id"]
    stored = command("show", "--json", entry_id, root=tmp_path / "s").json
    for key in ("token_count", "kinds", "logical_bytes", "created_at_ms", "caches", "shortens"):
        assert shown[key] == stored[key]
