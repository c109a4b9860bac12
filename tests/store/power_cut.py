"""A file system that keeps a tape of all changes, and a medium that shows what a power cut may leave of any part of it.

The medium is as pessimistic as file systems may be, name by name. Bytes of a file are durable once it was synced; until
then all, none or half of them may be there, or zeros. A name is durable once its directory was synced; until then it
shows what it named before, or anything that it named since. The index is LMDB's: where the store is durable each commit
is, at its end; otherwise any commit so far may be the last one that arrived.
"""

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from blockstore.environment import DATA_NAME, Environment
from blockstore.fs import FileSystem
from blockstore.transaction import Transaction

INDEX = os.path.join("index", DATA_NAME)
CONFIG = "store.json"
_TEMPORARY_INDEX = ("index/lock", "index/lock.turn", "index.stamp")  # made anew, or not believed, after a cut


@dataclass(frozen=True)
class Change:
    """What happened to a path, relative to the root: write, sync, rename, unlink, make_dir, sync_names, commit."""

    what: str
    path: str
    target: str = ""
    data: bytes = field(default=b"", repr=False)


class Tape(FileSystem):
    """Passes everything on but the waiting for the disk, and remembers it. `fail` names a change that fails once."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.changes: list[Change] = []
        self.fail: tuple[str, str] | None = None

    def note(self, what: str, path: str, target: str = "", data: bytes = b"") -> None:
        names = [os.path.relpath(name, self.root) if name else "" for name in (path, target)]
        self.changes.append(Change(what, *names, data))

    def write_new(self, path: str, parts: Sequence[bytes | memoryview], *, sync: bool = False) -> None:
        super().write_new(path, parts)
        self.note("write", path, data=b"".join(parts))
        if sync:
            self.note("sync", path)

    def open_lock(self, path: str) -> int:
        is_new = not os.path.exists(path)
        fd = super().open_lock(path)
        if is_new:
            self.note("write", path)
        return fd

    def sync_file(self, path: str) -> None:
        self.note("sync", path)

    def sync_dir(self, path: str) -> None:
        if self.fail == ("sync_dir", os.path.relpath(path, self.root)):
            self.fail = None
            raise OSError(5, "the disk did not answer", path)
        self.note("sync_names", path)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.note("rename", source, target)

    def unlink(self, path: str) -> bool:
        done = super().unlink(path)
        if done:
            self.note("unlink", path)
        return done

    def make_dir(self, path: str) -> bool:
        done = super().make_dir(path)
        if done:
            self.note("make_dir", path)
        return done

    def remove_dir(self, path: str) -> None:
        super().remove_dir(path)
        if not os.path.exists(path):
            self.note("unlink", path)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note each commit of the index, too."""
        write = Environment.write

        @contextlib.contextmanager
        def noted(env: Environment, made: Callable[[Transaction], Any]) -> Iterator[Any]:
            with write(env, made) as inside:
                yield inside
            self.note("commit", env.path, data=index_bytes(env.path))

        with mock.patch.object(Environment, "write", noted):
            yield


def index_bytes(path: str | os.PathLike[str]) -> bytes:
    """The index without the hole at its end."""
    return Path(path).read_bytes().rstrip(b"\0")


DIRECTORY = -1


class Medium:
    """The disk below a tape, change by change."""

    def __init__(self, root: Path) -> None:
        """All that stands at `root` now is durable."""
        self.index_size = os.path.getsize(root / INDEX)
        self.commits = [index_bytes(root / INDEX)]
        self.contents: list[bytes] = []
        self.synced: set[int] = set()
        self.shown: dict[str, int | None] = {}
        self.durable: dict[str, int | None] = {}
        self.pending: dict[str, list[int | None]] = {}
        for path in root.rglob("*"):
            name = os.path.relpath(path, root)
            if name != INDEX:
                self.durable[name] = DIRECTORY if path.is_dir() else self._file(path.read_bytes())
        self.synced.update(range(len(self.contents)))
        self.shown.update(self.durable)

    def _file(self, data: bytes) -> int:
        self.contents.append(data)
        return len(self.contents) - 1

    def _show(self, name: str, value: int | None) -> None:
        self.shown[name] = value
        self.pending.setdefault(name, []).append(value)

    def apply(self, change: Change) -> None:
        if change.what == "write":
            self._show(change.path, self._file(change.data))
        elif change.what == "make_dir":
            self._show(change.path, DIRECTORY)
        elif change.what == "unlink":
            self._show(change.path, None)
        elif change.what == "rename":
            self._show(change.target, self.shown[change.path])
            self._show(change.path, None)
        elif change.what == "sync":
            self.synced.add(self.shown[change.path] or 0)
        elif change.what == "sync_names":
            self._sync_names("" if change.path == "." else change.path)
        else:
            self.commits.append(change.data)

    def _sync_names(self, folder: str) -> None:
        for name, value in self.shown.items():
            if os.path.dirname(name) == folder:
                self.durable[name] = value
                self.pending.pop(name, None)

    # ---- after the cut

    def leave(self, root: Path, luck: "Luck", *, durable: bool) -> None:
        """Make at `root` what may be left. The store there waits for no disk: it is only looked at."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for name in sorted(self.shown):
            value = luck.name(self.durable.get(name), self.pending.get(name, []))
            path = root / name
            if value is None or not path.parent.is_dir() or name in _TEMPORARY_INDEX:
                continue
            if value == DIRECTORY:
                path.mkdir()
            else:
                data = self.contents[value]
                path.write_bytes(data if value in self.synced else luck.content(data))
        config = root / CONFIG
        config.write_bytes(config.read_bytes().replace(b'"full"', b'"none"'))
        (root / INDEX).write_bytes(self.commits[-1] if durable else luck.commit(self.commits))
        os.truncate(root / INDEX, self.index_size)


class Luck:
    """What becomes of that which was not synced: `how` is "lost", "names" (without their bytes) or "any"."""

    def __init__(self, how: str, seed: int) -> None:
        self.how, self.rng = how, random.Random(seed)

    def name(self, durable: int | None, pending: list[int | None]) -> int | None:
        if self.how == "lost" or not pending:
            return durable
        return pending[-1] if self.how == "names" else self.rng.choice([durable, *pending])

    def content(self, data: bytes) -> bytes:
        forms = [b"", data[: len(data) // 2], bytes(len(data)), data]
        return self.rng.choice(forms[:3] if self.how == "names" else forms)

    def commit(self, commits: list[bytes]) -> bytes:
        return commits[0] if self.how == "lost" else commits[-1] if self.how == "names" else self.rng.choice(commits)
