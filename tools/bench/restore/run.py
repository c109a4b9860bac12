"""A full restore, verified and not, up to and including the first append of one token, evaluated.

    python tools/bench/restore/run.py --json

Beside mlx-lm's load_prompt_cache to the same point, and plain reading of as many bytes into new memory as the physical
reference. The page cache is warm: all of it was written just before.
"""

import os
import sys
from collections.abc import Generator

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import numpy as np
from mlx_lm.models.cache import save_prompt_cache

from tools.bench.kit import IDENTITY, Bench, Contender, Row, at_least, main, new_store, noted, require
from tools.bench.workloads import PlainKV, Workload, loads_safetensors, main_loads, peer_path, same, saved_in


def restores(load: Workload, *, verify: bool) -> Contender:
    def contender(folder: str) -> Generator[None]:
        with new_store(folder) as store:
            saved_in(store, load)
            prompt, token, model = np.append(load.tokens, np.uint32(0)), load.rows(1), load.prototypes()
            yield
            loaded = store.restore(prompt, IDENTITY, model, verify=verify)
            if loaded is not None:
                load.append(loaded.caches, token)
            yield
            require(loaded is not None and loaded.token_count == load.count, "not all was found")
            require(loaded is not None and same(loaded.caches, load.caches(), load.count), "the store gave other bytes")

    return contender


def reads(load: Workload) -> Contender:
    def contender(folder: str) -> Generator[None]:
        save_prompt_cache(peer_path(folder), load.peers())
        yield
        data = np.fromfile(peer_path(folder), np.uint8)
        yield
        require(data.nbytes >= load.bytes, "the file is too short")

    return contender


def compared(bench: Bench, load: Workload, rounds: int) -> list[Row]:
    seconds = bench.medians(
        {
            "verified": restores(load, verify=True),
            "load_prompt_cache": loads_safetensors(load),
            "unverified": restores(load, verify=False),
            "read": reads(load),
        },
        rounds,
    )
    peer, what = seconds["load_prompt_cache"], f"restore, {load.name}, first append included"
    speeds = {f"{name}_mb_per_s": load.bytes / taken / 1e6 for name, taken in seconds.items()}
    return [
        at_least(f"{what}, verified: × load_prompt_cache (aim: 2.2)", 1.8, peer / seconds["verified"], **speeds),
        at_least(f"{what}, unverified: × load_prompt_cache", 2.8, peer / seconds["unverified"]),
        noted(f"{what}, verified: × reading one file", seconds["read"] / seconds["verified"]),
    ]


def measure(bench: Bench) -> list[Row]:
    compared(bench, PlainKV(1, 256, dim=8), 1)  # what only the first call costs, on all sides
    rows = []
    for load, rounds in main_loads(bench.quick):
        rows += compared(bench, load, bench.rounds(rounds))
    return rows


if __name__ == "__main__":
    main("restore", __doc__, measure)
