"""docs/command.md says everything that the command takes, and nothing that it does not."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from blockstore.cli import app
from blockstore.cli_exit import MEANINGS

TEXT = (Path(__file__).resolve().parent.parent.parent / "docs" / "command.md").read_text(encoding="utf-8")
GROUP: Any = typer.main.get_command(app)
SECTIONS = {
    part.split("\n", 1)[0].split()[1].strip("`"): part for part in re.split(r"^## ", TEXT, flags=re.M) if part[0] == "`"
}


def options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name.startswith("-")}


def test_every_command_has_its_section_and_no_other_has() -> None:
    assert list(SECTIONS) == list(GROUP.commands)


@pytest.mark.parametrize("name", list(GROUP.commands))
def test_every_option_of_a_command_is_described(name: str) -> None:
    described = set(re.findall(r"^\| `(--[a-z-]+)", SECTIONS[name], flags=re.M))
    assert described == options_of(GROUP.commands[name]) - options_of(GROUP)


def test_the_options_of_all_commands_are_described() -> None:
    common = TEXT.split("\n## ")[0]
    assert {option for option in options_of(GROUP) if f"`{option}" not in common} == set()


def test_the_exit_codes_are_those_of_the_command() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|$", TEXT, flags=re.M)
    assert rows == [(str(code.value), text) for code, text in MEANINGS.items()]


@pytest.mark.parametrize("args", [["stats"], ["ls"], ["show", "ID"], ["rm", "--dry-run", "ID"], ["gc"], ["check"]])
def test_every_key_of_the_json_is_described(command: Any, filled: Any, args: list[str]) -> None:
    words = [filled.short if word == "ID" else word for word in args]
    found = command(*words, "--json", root=filled.root).json
    keys = {*found, *(found["entries"][0] if "entries" in found and args == ["ls"] else [])}
    assert {key for key in keys if f"`{key}`" not in SECTIONS[args[0]]} == set()
