"""Bytes on the disk after an agent's day: 8 conversations that share a prompt of 2,000 tokens, 6 turns of 350 each.

    python tools/bench/agents_day/run.py --json

Every turn is saved. Either all turns are kept, or a turn supersedes the one before: that is removed, then collected.
The whole directory counts: blocks, headers, index. Beside it mlx-lm's save_prompt_cache, one file a turn.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import numpy as np
from mlx_lm.models.cache import save_prompt_cache

from blockstore import Store
from blockstore.fs import FileSystem
from tools.bench.kit import IDENTITY, Bench, Row, at_most, main, new_store, require
from tools.bench.workloads import PlainKV, same

TURNS = 6
Turn = tuple[int, "np.ndarray[Any, np.dtype[np.uint32]]", list[Any]]


class Day:
    """Conversations over one prompt; each turn is (conversation, tokens, caches)."""

    def __init__(self, bench: Bench) -> None:
        self.conversations, self.turn = bench.size(8, 2), bench.size(350, 100)
        self.load = PlainKV(bench.size(4, 1), bench.size(2000, 300), dim=bench.size(128, 16))

    @property
    def distinct_bytes(self) -> int:
        return self.load.token_bytes * (self.load.count + self.conversations * TURNS * self.turn)

    def turns(self) -> Iterator[Turn]:
        for conversation in range(self.conversations):
            caches, tokens = self.load.caches(), self.load.tokens
            for _ in range(TURNS):
                self.load.append(caches, self.load.rows(self.turn))
                tokens = np.concatenate([tokens, self.load.more_tokens(self.turn)])
                yield conversation, tokens, caches


def kept(day: Day, store: Store) -> int:
    for _, tokens, caches in day.turns():
        saved = store.save(tokens, caches, IDENTITY)
    require(same(store.load(saved.entry_id, day.load.prototypes()).caches, caches, len(tokens)), "other bytes")
    require(len(store.entries()) == day.conversations * TURNS, "not every turn is kept")
    return store.stats().physical_bytes


def superseded(day: Day, store: Store) -> int:
    before: dict[int, str] = {}
    for conversation, tokens, caches in day.turns():
        saved = store.save(tokens, caches, IDENTITY)
        if conversation in before:
            store.remove(before[conversation])
        before[conversation] = saved.entry_id
    store.gc()
    require(same(store.load(saved.entry_id, day.load.prototypes()).caches, caches, len(tokens)), "other bytes")
    require(len(store.entries()) == day.conversations, "not one entry a conversation")
    return store.stats().physical_bytes


def files(day: Day, folder: str) -> int:
    for number, (_, _, caches) in enumerate(day.turns()):
        save_prompt_cache(os.path.join(folder, f"{number}.safetensors"), caches)
    return FileSystem().tree_bytes(folder)


def measure(bench: Bench) -> list[Row]:
    day = Day(bench)
    with new_store(bench.new_folder()) as store:
        every = kept(day, store)
    with new_store(bench.new_folder()) as store:
        last = superseded(day, store)
    peers = files(day, bench.new_folder())
    sizes = {"distinct": day.distinct_bytes, "kept": every, "superseded": last, "safetensors": peers}
    what = "bytes on the disk after an agent's day"
    return [
        at_most(f"{what}, every turn kept: × the distinct bytes", 1.2, every / day.distinct_bytes, **sizes),
        at_most(f"{what}, a turn supersedes: × the distinct bytes", 1.05, last / day.distinct_bytes),
        at_most(f"{what}, every turn kept: × one safetensors file a turn (1/7)", 1 / 7, every / peers),
    ]


if __name__ == "__main__":
    main("agents_day", __doc__, measure)
