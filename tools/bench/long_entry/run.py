"""An entry of 100,000 tokens of an 8B-class model: 32 layers, 8 heads of 128, 128 KiB a token, 12.5 GiB.

    python tools/bench/long_entry/run.py --json

The arrays are stand-ins with heads of 4 and blocks of 32 KiB instead of 1 MiB, so the entry has just as many blocks,
which is checked against the cut of the real shapes. The save continues an entry that is 256 tokens shorter. What its
hashing would take at full size (blocks that are new, and those of the sample) is added from the speed of packing and
digesting real blocks, measured in the same run.
"""

import os
import sys
import time
from collections.abc import Generator
from statistics import median
from typing import Final

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import numpy as np

from blockstore import cut
from blockstore.digest import digest
from blockstore.history import forget
from kvcodecs.entry import HeaderEntry, slot
from tools.bench.kit import IDENTITY, MIB, Bench, Contender, Row, at_most, main, new_store, noted, require
from tools.bench.workloads import PlainKV, same, saved_in, saves_safetensors

GROWN: Final = 256
HEADS: Final = 8
DIM: Final = 128
STAND_IN: Final = 4
SAMPLED: Final = 0.01  # of the blocks that are taken over, and the last one of each group


def real_cut(layers: int, tokens: int) -> cut.CutPlan:
    tensor = slot((1, HEADS, tokens, DIM), "bfloat16")
    entries = [HeaderEntry("kv", tokens, tensors=(tensor, tensor))] * layers
    return cut.segments(entries, cut.DEFAULT_SPAN, cut.DEFAULT_BLOCK_BYTES)


class Long:
    """The entry, and what its saves gave."""

    def __init__(self, layers: int, tokens: int) -> None:
        self.layers, self.tokens = layers, tokens
        self.load = PlainKV(layers, tokens - GROWN, heads=HEADS, dim=STAND_IN)
        self.plan = real_cut(layers, tokens)
        self.blocks = sum(len(group.counts) for group in self.plan.groups)
        self.real_bytes = self.load.token_bytes * tokens * DIM // STAND_IN
        self.header_bytes = 0

    def saves(self, *, known: bool) -> Contender:
        def contender(folder: str) -> Generator[None]:
            with new_store(folder, block_bytes=cut.DEFAULT_BLOCK_BYTES * STAND_IN // DIM) as store:
                caches = self.load.caches()
                saved_in(store, self.load, caches)
                self.load.append(caches, self.load.rows(GROWN))
                tokens = np.concatenate([self.load.tokens, self.load.more_tokens(GROWN)])
                if not known:
                    forget(caches)
                yield
                saved = store.save(tokens, caches, IDENTITY)
                yield
                require(saved.blocks_written + saved.blocks_reused == self.blocks, "not as many blocks as the real one")
                self.header_bytes = store.entry(saved.entry_id).header_bytes
                loaded = store.load(saved.entry_id, self.load.prototypes())
                require(same(loaded.caches, caches, self.tokens), "the store gave other bytes")

        return contender

    def hashed_bytes(self) -> float:
        """What such a save digests at full size: what is new, with a span's rest, and the sample."""
        groups = len(self.plan.groups)
        sample = (groups + SAMPLED * self.blocks) * cut.DEFAULT_BLOCK_BYTES
        return sample + (GROWN + cut.DEFAULT_SPAN) * self.real_bytes / self.tokens


def hashing_rate(bench: Bench) -> float:
    """Bytes a second that one thread packs out of strided arrays and digests, in blocks of 1 MiB."""
    count = bench.size(256, 4)
    source = np.frombuffer(np.random.default_rng(3).bytes(count * MIB), np.uint8).reshape(16, count, MIB // 16)
    block = np.empty((16, MIB // 16), np.uint8)
    began = time.perf_counter()
    for number in range(count):
        np.copyto(block, source[:, number])
        digest("blake3", block.reshape(-1).data)
    return count * MIB / (time.perf_counter() - began)


def measure(bench: Bench) -> list[Row]:
    bench.medians({"warm": Long(1, 512).saves(known=True)}, 1)  # what only the first call costs
    long = Long(bench.size(32, 4), bench.size(100_000, 1000))
    peer = PlainKV(bench.size(16, 1), bench.size(4096, 256))
    rounds = bench.rounds(5)
    seconds = bench.medians({"ours": long.saves(known=True), "save_prompt_cache": saves_safetensors(peer)}, rounds)
    hashing = long.hashed_bytes() / median(hashing_rate(bench) for _ in range(rounds))
    theirs = seconds["save_prompt_cache"] * long.real_bytes / peer.bytes
    what = f"an entry of {long.tokens:,} tokens, {long.blocks:,} blocks"
    return [
        at_most(f"{what}: header", 1.5, long.header_bytes / 1e6, "MB"),
        at_most(
            f"{what}: save after growing by {GROWN}, remembered: × save_prompt_cache's whole file",
            0.05,
            (seconds["ours"] + hashing) / theirs,
            stand_in_s=seconds["ours"],
            added_hashing_s=hashing,
            save_prompt_cache_s=theirs,
        ),
        noted(f"{what}: time a block", 1e6 * seconds["ours"] / long.blocks, "µs"),
    ]


if __name__ == "__main__":
    main("long_entry", __doc__, measure)
