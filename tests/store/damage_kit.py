"""Damage as disks and people do it to a file, and the small store that it is done to."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from blockstore import CacheMiss, Store, check, probe
from store_kit import all_facts, block_names, block_path, flip, header_of, header_paths
from token_caches import IDENTITY, plain, small_store

VICTIM = tuple(range(12))
SHARING = (*range(8), 90, 91, 92, 93)  # its first two blocks are the victim's
APART = tuple(range(50, 62))
TOKENS = {"victim": VICTIM, "sharing": SHARING, "apart": APART}


# ---- what is done to a file; `other` is one of its kind


def _swap(path: Path, other: Path) -> None:
    aside = path.with_name(path.name + ".aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def zero(path: Path, start: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(size))


def _size(path: Path) -> int:
    return path.stat().st_size


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "deleted": lambda path, other: path.unlink(),
    "short by one": lambda path, other: os.truncate(path, _size(path) - 1),
    "empty": lambda path, other: os.truncate(path, 0),
    "long by one": lambda path, other: _extend(path),
    "bit at the beginning": lambda path, other: flip(path, 0),
    "bit in the middle": lambda path, other: flip(path, _size(path) // 2),
    "bit at the end": lambda path, other: flip(path, -1),
    "swapped": _swap,
    "zeroed": lambda path, other: zero(path, _size(path) // 3, _size(path) // 3),
}
# What a look at the size finds without reading.
SEEN_BY_SIZE = {"deleted", "short by one", "empty", "long by one"}


# ---- what is put in a file's place


def _link_to_a_copy(place: Path, outside: Path) -> None:
    shutil.copy(place, outside / "copy")
    place.unlink()
    place.symlink_to(outside / "copy")


def _socket(place: Path, outside: Path) -> None:
    """Something that is neither file, folder, link nor pipe. Its path may only be short when it is made."""
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(place.parent)
        try:
            made.bind("s")
        finally:
            os.chdir(here)
    (place.parent / "s").rename(place)


THINGS: dict[str, Callable[[Path, Path], None]] = {
    "link to a copy": _link_to_a_copy,
    "link to nothing": lambda place, outside: place.symlink_to(outside / "nothing"),
    "link to another file": lambda place, outside: place.symlink_to(outside / "precious"),
    "link to a folder": lambda place, outside: place.symlink_to(outside / "sub"),
    "pipe": lambda place, outside: os.mkfifo(place),
    "socket": _socket,
    "folder": lambda place, outside: place.mkdir(),
}


def put_instead(place: Path, outside: Path, thing: str) -> None:
    """Put one of THINGS, which may point to the folder `outside`, where a file stands."""
    if thing != "link to a copy":
        place.unlink()
    THINGS[thing](place, outside)


# ---- the store


@dataclass
class World:
    """A store with a victim, an entry that shares blocks with it, and one that shares nothing."""

    store: Store
    ids: dict[str, str]

    def save(self, name: str) -> str:
        self.ids[name] = self.store.save(TOKENS[name], plain(TOKENS[name]), IDENTITY).entry_id
        return self.ids[name]

    def loading(self) -> set[str]:
        """Which entries load, bit for bit; the others are misses."""
        return {name for name, entry_id in self.ids.items() if loads(self.store, entry_id, TOKENS[name])}

    def header(self, name: str) -> Path:
        return header_paths(self.store)[self.ids[name]]

    def blocks(self, name: str) -> list[Path]:
        """The files of an entry's blocks, in the order of its tokens."""
        header = header_of(self.store, self.ids[name])
        return [block_path(self.store, digest) for group in header.segments or () for digest in group.digests()]

    def restored(self) -> list[tuple[int, ...]]:
        """The tokens of every entry that the store lists; each loads, bit for bit."""
        found = [self.store.load(entry.entry_id) for entry in self.store.entries()]
        for loaded in found:
            assert all_facts(loaded.caches) == all_facts(plain(loaded.tokens))
        return sorted(tuple(loaded.tokens) for loaded in found)

    def repair(self) -> check.Report:
        """Close, repair in depth, open again."""
        self.store.close()
        report = repaired(self.store)
        self.store = small_store(self.store.root)
        return report


@contextmanager
def world(root: Path) -> Iterator[World]:
    made = World(small_store(root), {})
    try:
        for name in TOKENS:
            made.save(name)
        assert len(block_names(made.store)) == 3 + 1 + 3
        yield made
    finally:
        made.store.close()


def loads(store: Store, entry_id: str, tokens: tuple[int, ...]) -> bool:
    """True where an entry loads bit for bit, False where it is a miss. Anything else is an error."""
    try:
        loaded = store.load(entry_id)
    except CacheMiss:
        return False
    assert tuple(loaded.tokens) == tokens
    assert all_facts(loaded.caches) == all_facts(plain(tokens))
    return True


def repaired(closed: Store) -> check.Report:
    """What a repair of a sound index says, without a second process that walks it first."""
    with mock.patch.object(probe, "survey", return_value={}):
        return check.repair(closed._layout, deep=True, progress=lambda done, total: None)


# ---- what stands around a store


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every name below `folder`: its kind, and what it holds or points to. Sparse giants are known by their size."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            size = path.stat().st_size
            found[name] = ("file", size, path.read_bytes() if size < 1 << 20 else b"")
        else:
            found[name] = (oct(path.stat().st_mode),)
    return found
