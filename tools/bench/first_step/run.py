"""The first decode step after a prepare, beside ordinary ones: with history known, and with a snapshot that is pinned.

    python tools/bench/first_step/run.py --json

A step appends one token in every layer and evaluates. The prepared snapshot is alive meanwhile, as it is in a server
that commits on another thread.
"""

import os
import sys
import time
from statistics import median
from typing import Any

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import numpy as np

from blockstore.history import forget
from tools.bench.kit import IDENTITY, Bench, Row, at_most, main, new_store, noted, require
from tools.bench.workloads import PlainKV, same, saved_in

ORDINARY = 30


class Decoding:
    """Caches that decode: each step takes one token that was computed before."""

    def __init__(self, load: PlainKV) -> None:
        self.load = load
        self.caches = load.caches()
        self.steps = 0
        self._rows = [load.rows(1) for _ in range(ORDINARY + 3)]

    @property
    def tokens(self) -> "np.ndarray[Any, np.dtype[np.uint32]]":
        return np.concatenate([self.load.tokens, np.arange(self.steps, dtype=np.uint32)])

    def step(self) -> float:
        began = time.perf_counter()
        self.load.append(self.caches, self._rows[self.steps])
        self.steps += 1
        return time.perf_counter() - began


def one_round(bench: Bench, load: PlainKV) -> tuple[float, float, float]:
    """Seconds of an ordinary step (the median), of the first with history known, of the first with a pinned one."""
    with new_store(bench.new_folder()) as store:
        decoding = Decoding(load)
        saved_in(store, load, decoding.caches)
        decoding.step()  # makes room for the next 256
        bench.settle()
        ordinary = median(decoding.step() for _ in range(ORDINARY))
        known = store.prepare(decoding.tokens, decoding.caches, IDENTITY)
        after_known = decoding.step()
        count = load.count + decoding.steps - 1
        saved = store.commit(known)
        loaded = store.load(saved.entry_id, load.prototypes())
        require(same(loaded.caches, decoding.caches, count), "the store gave other bytes")
        del known, loaded
        forget(decoding.caches)
        bench.settle()
        pinned = store.prepare(decoding.tokens, decoding.caches, IDENTITY)
        after_pinned = decoding.step()
        del pinned
    return ordinary, after_known, after_pinned


def measure(bench: Bench) -> list[Row]:
    one_round(bench, PlainKV(1, 256, dim=8))  # what only the first call costs
    load = PlainKV(bench.size(16, 2), bench.size(4096, 256), dim=bench.size(128, 16))
    rounds = [one_round(bench, load) for _ in range(bench.rounds(11))]
    ordinary, known, pinned = (median(column) for column in zip(*rounds, strict=True))
    what = f"first decode step after prepare, {load.name}"
    return [
        at_most(f"{what}, remembered: × an ordinary step", 1.5, known / ordinary, ordinary_s=ordinary, known_s=known),
        noted(f"{what}, pinned: × an ordinary step", pinned / ordinary, pinned_s=pinned),
    ]


if __name__ == "__main__":
    main("first_step", __doc__, measure)
