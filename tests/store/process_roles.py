"""What the roles of several processes share: what they say, what they count, what is right."""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from token_caches import plain


class Tally:
    """What a role counts, in a mapped file: its death does not lose it."""

    NAMES = ("saves", "written_bytes", "loads", "hits", "removals", "collections")
    FORM = struct.Struct(f"={len(NAMES)}Q")

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(self.FORM.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def add(self, **counts: int) -> None:
        numbers = list(self.FORM.unpack(self._map[:]))
        for name, count in counts.items():
            numbers[self.NAMES.index(name)] += count
        self._map[:] = self.FORM.pack(*numbers)

    @classmethod
    def total(cls, folder: Path) -> dict[str, int]:
        found = (path.read_bytes() for path in folder.glob("*.tally"))
        rows = [cls.FORM.unpack(data) for data in found if data]  # empty: death came before the first number
        return dict(zip(cls.NAMES, map(sum, zip(*rows, strict=True)), strict=True))


def is_right(caches: list[Any], tokens: list[int]) -> bool:
    """Bit for bit what the tokens say."""
    return live(caches, len(tokens)) == live(plain(tokens, len(caches)), len(tokens))


def live(caches: list[Any], count: int) -> list[bytes]:
    return [np.array(side[:, :, :count]).tobytes() for cache in caches for side in (cache.keys, cache.values)]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)
