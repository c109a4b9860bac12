"""What the tests of the cases share: saves and looks through the public face, processes, doubles that fail half-way."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from blockstore import Saved, Store
from fs_doubles import Recording
from store_kit import (
    all_facts,
    assert_clean,
    assert_exact,
    block_path,
    damage,
    header_of,
    header_paths,
    named_blocks,
)
from token_caches import identity, plain

PATIENCE_S = 60.0
TOKENS = list(range(30))
BIG = range(1000, 1200)


# ---- through the public face


def save(store: Store, tokens: Sequence[int] = TOKENS, ns: str = "", **options: Any) -> Saved:
    return store.save(tokens, plain(tokens), identity(ns), **options)


def assert_loads(store: Store, entry_id: str, tokens: Sequence[int] = TOKENS) -> None:
    """Bit for bit what was saved."""
    assert all_facts(store.load(entry_id).caches) == all_facts(plain(tokens))


def assert_served(store: Store, tokens: Sequence[int] = TOKENS, ns: str = "") -> None:
    """A prompt that goes on after `tokens` gets all of them, bit for bit."""
    loaded = store.restore([*tokens, 999_999], identity(ns))
    assert loaded is not None
    assert loaded.tokens == list(tokens)
    assert all_facts(loaded.caches) == all_facts(plain(tokens))


def assert_sound(store: Store) -> None:
    """One collection is enough: then everything is what the headers say."""
    store.gc()
    assert_exact(store)
    assert_clean(store)


def files_below(root: str | os.PathLike[str]) -> dict[str, bytes | None]:
    """Every name below `root` but for what opening notes, locks and the stamp: a file's bytes, None for a directory."""
    return {
        path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in Path(root).rglob("*")
        if path.name not in ("store.lock", "lock", "index.stamp")
    }


# ---- damage


def header_file(store: Store, entry_id: str) -> Path:
    return header_paths(store)[entry_id]


def first_block(store: Store, entry_id: str) -> Path:
    return block_path(store, min(named_blocks(header_of(store, entry_id))))


def swap_headers(store: Store, entry_id: str) -> None:
    """The bytes of another entry's header, as two mixed saves would leave them."""
    other = next(path for name, path in header_paths(store).items() if name != entry_id)
    header_file(store, entry_id).write_bytes(other.read_bytes())


BAD: dict[str, Callable[[Store, str], object]] = {
    "header gone": lambda store, entry_id: header_file(store, entry_id).unlink(),
    "header cut short": lambda store, entry_id: damage(header_file(store, entry_id), "truncate"),
    "header flipped": lambda store, entry_id: damage(header_file(store, entry_id), "flip"),
    "header of another entry": swap_headers,
    "block gone": lambda store, entry_id: first_block(store, entry_id).unlink(),
    "block cut short": lambda store, entry_id: damage(first_block(store, entry_id), "truncate"),
    "block flipped": lambda store, entry_id: damage(first_block(store, entry_id), "flip"),
}


def before_first(patch: pytest.MonkeyPatch, owner: Any, step: str, act: Callable[[], object]) -> None:
    """Let another actor in right before the first time that `owner` takes `step`."""
    real: Callable[..., Any] = getattr(owner, step)
    waiting = [act]

    def stepped(*given: Any, **options: Any) -> Any:
        if waiting:
            waiting.pop()()
        return real(*given, **options)

    patch.setattr(owner, step, stepped)


# ---- processes of their own


def surroundings(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def start(code: str, *arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Python code in a process of its own; output and errors are one text."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env or surroundings()
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """How a process ended, and what it said."""
    try:
        text, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, text


def python(code: str, *arguments: object, env: dict[str, str] | None = None) -> str:
    """What code says that must end well."""
    status, text = ended(start(code, *arguments, env=env))
    assert status == 0, text
    return text


def command(root: str | os.PathLike[str], *arguments: str) -> tuple[int, Any]:
    """The command's exit code, and its JSON where it printed any."""
    line = [sys.executable, "-m", "blockstore", "--root", os.fspath(root), *arguments, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=surroundings())
    return done.returncode, json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout


# ---- doubles


class Listing(Recording):
    """Records also which directories were listed."""

    def names(self, path: str) -> Any:
        self.calls.append(self.described("names", [path]))
        return super().names(path)

    def tree_bytes(self, path: str) -> int:
        self.calls.append(self.described("tree_bytes", [path]))
        return super().tree_bytes(path)

    def listed(self) -> set[str]:
        return {os.path.basename(call.path) for call in self.named("names", "tree_bytes")}


class HalfWritten(Recording):
    """A disk that fills: from the k-th write on, half of the bytes arrive and then there is an error."""

    def __init__(self, error_number: int = errno.ENOSPC) -> None:
        super().__init__()
        self.error_number = error_number
        self.left: int | None = None
        self.failed = 0

    def write_all(self, fd: int, data: memoryview) -> None:
        self._pass(lambda half: os.write(fd, half), data)
        super().write_all(fd, data)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self._pass(lambda half: os.pwrite(fd, half, offset), data)
        super().write_at(fd, data, offset)

    def _pass(self, write: Callable[[memoryview], object], data: memoryview) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.failed += 1
            write(data[: len(data) // 2])
            raise OSError(self.error_number, os.strerror(self.error_number))


class BadReads(Recording):
    """The k-th read of a block or a cache file ends early ("short"), or fails with an error number."""

    def __init__(self) -> None:
        super().__init__()
        self.how: str | int = "short"
        self.left: int | None = None
        self.failed = False

    def arm(self, k: int, how: str | int) -> None:
        self.left, self.how, self.failed = k, how, False

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        path = self._paths.get(fd, "")
        if self.left is not None and (path.endswith(".mlxkv") or os.path.basename(os.path.dirname(path)) == "blocks"):
            self.left -= 1
            if self.left == -1:
                self.failed = True
                return self._badly(fd, buffer, offset)
        return super().read_into(fd, buffer, offset)

    def _badly(self, fd: int, buffer: memoryview, offset: int) -> int:
        if isinstance(self.how, int):
            raise OSError(self.how, os.strerror(self.how))
        return super().read_into(fd, buffer[: len(buffer) // 2], offset)
