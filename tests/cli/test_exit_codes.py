"""How the command ends: the codes, and every failure as a message without a traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import blockstore.errors
from blockstore import (
    BlockstoreError,
    CacheMiss,
    Cancelled,
    InvalidInput,
    NotPermitted,
    NotStored,
    Store,
    StoreBroken,
    StoreBusy,
    StoreFull,
)
from blockstore.cli_exit import MEANINGS, Code, code_of


def test_the_codes_never_change() -> None:
    assert {code.name: code.value for code in Code} == {
        "OK": 0,
        "FOUND": 1,
        "USAGE": 2,
        "INPUT": 3,
        "BUSY": 4,
        "BROKEN": 5,
        "FULL": 6,
        "MISS": 7,
        "SYSTEM": 8,
        "MISSING_PACKAGE": 9,
        "INTERRUPTED": 130,
        "CLOSED_PIPE": 141,
    }
    assert set(MEANINGS) == set(Code)


def test_every_error_of_the_tree_has_its_code() -> None:
    by_root: dict[type, int] = {CacheMiss: 7, InvalidInput: 3, StoreBusy: 4, StoreBroken: 5, StoreFull: 6}
    by_root |= {NotPermitted: 8, NotStored: 1, Cancelled: 130}
    kinds = [kind for kind in vars(blockstore.errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, BlockstoreError) and kind is not BlockstoreError]
    assert {kind: code_of(kind("x")) for kind in kinds} == {
        kind: code for kind in kinds for root, code in by_root.items() if issubclass(kind, root)
    }
    assert code_of(OSError(errno.ENOSPC, "full")) == 6
    assert code_of(OSError(errno.EIO, "broken")) == 8


@pytest.mark.parametrize(
    "args", [["nope"], ["ls", "--nope"], ["ls", "--limit", "-1"], ["ls", "--limit", "many"], ["show"], ["rm"], []]
)
def test_a_bad_command_line_is_2(command: Any, args: list[str]) -> None:
    assert command(*args).code == 2


RAISED = [
    (StoreBusy("held", path="/x"), 4, "store-busy"),
    (StoreBroken("bad", path="/x"), 5, "store-broken"),
    (StoreFull("full", path="/x"), 6, "store-full"),
    (CacheMiss("gone", path="/x"), 7, "miss"),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), 8, "os-error"),
]


@pytest.mark.parametrize(("error", "code", "name"), RAISED)
def test_an_error_is_a_message_with_facts_or_json(
    command: Any, empty: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, name: str
) -> None:
    def fail(store: Store) -> None:
        raise error

    monkeypatch.setattr(Store, "stats", fail)
    text = command("stats", root=empty)
    assert (text.code, text.out) == (code, "")
    assert text.err.splitlines()[0].startswith("blockstore: ")
    assert "path /x" in text.err.splitlines()[0]
    assert len(text.err.splitlines()) == 1 + bool(getattr(error, "hint", ""))
    described = command("stats", "--json", root=empty)
    assert (described.code, described.err) == (code, "")
    assert described.json["error"]["code"] == name
    assert described.json["error"]["facts"]["path"] == "/x"
    assert set(described.json["error"]) == {"code", "message", "hint", "facts"}


def test_an_interruption_is_130(command: Any, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(store: Store, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "gc", interrupt)
    outcome = command("gc", root=empty)
    assert (outcome.code, outcome.err) == (130, "blockstore: interrupted\n")


def test_an_unforeseen_error_is_not_dressed_up(command: Any, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(store: Store) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Store, "stats", fail)
    with pytest.raises(ZeroDivisionError):
        command("stats", root=empty)


def test_the_operating_systems_refusal_is_8(command: Any, tmp_path: Path) -> None:
    outcome = command("stats", root=tmp_path / ("x" * 300))
    assert outcome.code == 8
    assert outcome.err.startswith(f"blockstore: {os.strerror(errno.ENAMETOOLONG)} (path ")


def test_an_empty_root_is_refused(command: Any) -> None:
    assert command("stats", root="").code == 3


def test_what_is_neither_an_id_nor_a_file_is_3(command: Any, empty: Path) -> None:
    outcome = command("show", "chat.mlxkv", root=empty)
    assert outcome.code == 3
    assert "An id has only the digits" in outcome.err


def test_a_file_that_is_no_cache_and_an_entry_that_is_gone_are_7(command: Any, empty: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange.mlxkv"
    strange.write_bytes(b"x" * 100)
    outcome = command("show", str(strange), "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (7, "corrupt")
    assert command("show", str(tmp_path)).code == 7
    assert command("show", "0123456789", root=empty).code == 7


def test_an_entry_with_a_lost_header_is_7(command: Any, filled: Any) -> None:
    (header,) = filled.root.glob(f"entries/*/{filled.short}.mlxkv")
    header.unlink()
    assert command("show", filled.short, root=filled.root).code == 7


@pytest.mark.parametrize("text", [b"", b"{", b'{"format": 1}'])
@pytest.mark.parametrize("args", [["stats"], ["check"], ["check", "--repair"]])
def test_an_unreadable_configuration_is_5(command: Any, empty: Path, text: bytes, args: list[str]) -> None:
    (empty / "store.json").write_bytes(text)
    assert command(*args, root=empty).code == 5


def test_a_newer_store_is_7(command: Any, empty: Path) -> None:
    (empty / "store.json").write_bytes(b'{"format": 99}')
    assert command("stats", root=empty).code == 7


HOLD = "import sys; from blockstore import Store; s = Store(sys.argv[1]); print('open', flush=True); sys.stdin.read()"


def test_repair_beside_an_open_store_is_4(command: Any, filled: Any, environment: dict[str, str]) -> None:
    line = [sys.executable, "-c", HOLD, str(filled.root)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        outcome = command("check", "--repair", root=filled.root)
        assert outcome.code == 4
        assert outcome.err.splitlines()[1] == "Stop them, then repair again."
        assert command("check", root=filled.root).code == 0
        holder.communicate()
    assert command("check", "--repair", root=filled.root).code == 0


# ---- the demo

NO_MLX = """
import sys
sys.modules["mlx_lm"] = sys.modules["mlx"] = sys.modules["mlx.core"] = None
from blockstore.cli import main
sys.argv = ["blockstore", "demo"]
main()
"""


def test_the_demo_says_what_to_install(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", NO_MLX], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    first, second = done.stderr.splitlines()
    assert "the demo needs mlx and mlx-lm" in first
    assert 'pip install "mlx-blockstore[' in second


@pytest.mark.parametrize(
    ("args", "expected"), [(["demo"], None), (["demo", "--root", "/y"], "/y"), (["--root", "/z", "demo"], "/z")]
)
def test_the_demo_takes_only_a_root_that_was_typed(
    command: Any, monkeypatch: pytest.MonkeyPatch, args: list[str], expected: str | None
) -> None:
    roots: list[str | None] = []

    class Demo:
        @staticmethod
        def run(root: str | None) -> int:
            roots.append(root)
            return 7

    monkeypatch.setitem(sys.modules, "blockstore.demo", Demo)
    monkeypatch.setenv("BLOCKSTORE_ROOT", "/x")
    assert command(*args).code == 7
    assert roots == [expected]
