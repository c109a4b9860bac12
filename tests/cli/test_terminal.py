"""What reaches a terminal: no control characters, a bar only for who watches, silence when nobody listens."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore import Identity
from blockstore.cli_ids import short_digits
from blockstore.cli_text import age, count, name, printable, size, table

ODD = [
    "\x1b[31mred\x1b[0m",
    "two\nlines\ttab\r",
    "[bold]markup[/bold] :smile:",
    "\u202eright to left\u2066",
    "\x9b2J\x07\x00\x7f",
    "模型 ünï",
    "",
]


@pytest.mark.parametrize("odd", ODD)
def test_names_from_a_store_are_data(
    command: Any, tmp_path: Path, save_into: Callable[..., list[str]], odd: str
) -> None:
    root = tmp_path / "store"
    (entry_id,) = save_into(root, [3], Identity(odd, odd, odd, odd))
    for args in (["ls"], ["show", entry_id], ["rm", "--dry-run", entry_id]):
        text = command(*args, root=root)
        assert all(char.isprintable() for char in text.out + text.err if char != "\n"), args
        assert (printable(odd) or '""') in text.out
        raw = command(*args, "--json", root=root)
        assert all(char.isprintable() for char in raw.out if char != "\n")
        assert raw.out.isascii()
    assert command("ls", "--json", root=root).json["entries"][0]["model_id"] == odd


def test_names_from_the_command_line_are_data_too(process: Any, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/\x1b[31m\xff"
    outcome = process("stats", "--root", odd)
    assert outcome.code == 3
    assert "\\x1b[31m\\udcff" in outcome.err
    assert "\x1b" not in outcome.err
    assert process("stats", "--json", "--root", odd).json["error"]["facts"]["path"] == os.fsdecode(odd)


def test_a_terminal_without_the_letters_still_gets_its_listing(
    process: Any, filled: Any, environment: dict[str, str]
) -> None:
    outcome = process("ls", "--root", str(filled.root), env={**environment, "PYTHONIOENCODING": "ascii"})
    assert outcome.code == 0
    assert "kv\\xd72" in outcome.out


# ---- progress


def on_a_terminal(environment: dict[str, str], *args: str) -> tuple[str, str]:
    """(stdout, what the terminal on stderr saw) of the command."""
    ours, theirs = os.openpty()
    line = [sys.executable, "-m", "blockstore", *args]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, stderr=theirs, env={**environment, "TERM": "xterm"}, check=False
    )
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert done.returncode == 0, seen
    return done.stdout.decode(), seen.decode()


def test_long_work_shows_a_bar_on_a_terminal_and_nowhere_else(
    command: Any, process: Any, filled: Any, environment: dict[str, str]
) -> None:
    root = str(filled.root)
    out, seen = on_a_terminal(environment, "check", "--root", root)
    assert "checking" in seen
    assert "\x1b" not in out
    _, silent = on_a_terminal(environment, "check", "--root", root, "--json")
    assert silent == ""
    assert process("check", "--root", root).err == ""
    command("rm", filled.long, root=root)
    _, seen = on_a_terminal(environment, "gc", "--root", root)
    assert "collecting" in seen


def test_a_closed_pipe_is_quiet(filled: Any, environment: dict[str, str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    line = [sys.executable, "-m", "blockstore", "ls", "--root", str(filled.root)]
    done = subprocess.run(line, stdout=theirs, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_output_is_an_error_and_no_traceback(filled: Any, process: Any) -> None:
    with Path("/dev/full").open("wb") as full:
        outcome = process("ls", "--root", str(filled.root), stdout=full)
    assert outcome.code == 6
    assert outcome.err.count("\n") == 1


# ---- what the light commands import

LIGHT = """
import json, sys
import typer
before = set(sys.modules)
from blockstore.cli import main
sys.argv = ["blockstore", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code, sorted({name.split(".")[0] for name in set(sys.modules) - before})]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "args", ["stats", "ls", "show ID", "rm ID", "gc", "gc --full", "check --deep", "check --repair"]
)
def test_light_commands_import_neither_mlx_nor_numpy_nor_rich(
    filled: Any, environment: dict[str, str], args: str
) -> None:
    words = [*args.replace("ID", filled.short).split(), "--root", str(filled.root)]
    line = [sys.executable, "-c", LIGHT, json.dumps(words)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    code, loaded = json.loads(done.stderr)
    assert code == 0
    assert "blockstore" in loaded
    assert {"mlx", "mlx_lm", "numpy", "rich"} & set(loaded) == set()


# ---- words and numbers


@given(st.text(st.characters(codec=None)))
def test_printable_text_is_printable_and_plain_text_stays(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (10_235, "10.0 KiB"),
        (1536 << 10, "1.50 MiB"),
        (100 << 20, "100 MiB"),
        ((1 << 30) - 1, "1.00 GiB"),
        (5 << 60, "5120 PiB"),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (172_800, "2 d"), (4e8, "4,629 d")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age(0, int(seconds * 1000)) == text


def test_counts_and_absent_names() -> None:
    assert [count(0, "block"), count(1, "entry", "entries"), count(2000, "entry", "entries")] == [
        "0 blocks",
        "1 entry",
        "2,000 entries",
    ]
    assert [name(None), name(""), name("a")] == ["-", '""', "a"]


def test_columns_line_up_under_wide_letters() -> None:
    assert table(["A", "B"], [["模型", "1"], ["e\u0301", "22"]], right=["B"]) == [
        "A      B",
        "模型   1",
        "e\u0301     22",
    ]


@given(st.lists(st.text("01", min_size=32, max_size=32), unique=True))
def test_short_ids_tell_all_apart(ids: list[str]) -> None:
    digits = short_digits(ids)
    assert digits >= 8
    assert len({entry_id[:digits] for entry_id in ids}) == len(ids)
