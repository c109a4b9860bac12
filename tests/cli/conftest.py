"""Small stores, and the command run in this process or in one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvcodecs
from blockstore import Identity, Store
from blockstore.cli import app
from cache_cases import feed

SOURCES = Path(__file__).resolve().parent.parent.parent
IDENTITY = Identity("org/model", "configuration", "tokenizer", "")


@dataclass
class Outcome:
    """What a run of the command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Command = Callable[..., Outcome]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in this process: command("ls", "--json", root=...). A traceback is a failure."""
    monkeypatch.delenv("BLOCKSTORE_ROOT", raising=False)

    def run(*args: str, root: Path | str | None = None) -> Outcome:
        place = ["--root", str(root)] if root is not None else []
        result = CliRunner().invoke(app, [*place, *args], prog_name="blockstore")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def environment() -> dict[str, str]:
    """What a process of its own needs to find the sources, installed or not."""
    paths = [str(SOURCES), str(SOURCES / "codecs")]
    kept = {name: value for name, value in os.environ.items() if name != "BLOCKSTORE_ROOT"}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def process(environment: dict[str, str]) -> Command:
    """Run the command in a process of its own."""

    def run(*args: str | bytes, **options: Any) -> Outcome:
        line = [sys.executable, "-m", "blockstore", *args]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, **options}
        done = subprocess.run(line, check=False, timeout=100, **options)
        return Outcome(done.returncode, (done.stdout or b"").decode(), (done.stderr or b"").decode())

    return run


def conversation(tokens: int) -> list[Any]:
    """Two layers that encode tokens 0, 1, ...: the same bytes for a token, however many follow."""
    return [feed(kvcodecs.KVCache(), *[1] * tokens) for _ in range(2)]


def save(root: Path, counts: Sequence[int], identity: Identity = IDENTITY) -> list[str]:
    """Entries of `counts` tokens that share their beginnings; their ids."""
    with Store(root, durability="none") as store:
        return [store.save(range(count), conversation(count), identity).entry_id for count in counts]


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    root = tmp_path / "empty"
    Store(root, durability="none").close()
    return root


@dataclass
class Filled:
    """A store with two entries, the second of which continues the first."""

    root: Path
    short: str
    long: str


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    root = tmp_path / "filled"
    short, long = save(root, [70, 140])
    return Filled(root, short, long)


@pytest.fixture
def save_into() -> Callable[..., list[str]]:
    return save
