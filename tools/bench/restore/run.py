"""A full restore, verified and not, up to and including the first append of one token, evaluated.

    python tools/bench/restore/run.py --json

Beside mlx-lm's load_prompt_cache to the same point, and plain reading of as many bytes into new memory as the physical
reference. What the machine allows is measured, too: as many bytes in files of 1 MiB read, digested and copied into new
memory by as many threads, and nothing else. The page cache is warm: all of it was written just before.
"""

import os
import sys
from collections.abc import Generator

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import numpy as np
from blake3 import blake3
from mlx_lm.models.cache import save_prompt_cache

from blockstore.buffers import Scratch
from blockstore.rooms import MARGINS
from blockstore.workers import spread
from tools.bench.kit import IDENTITY, Bench, Contender, Row, at_least, main, new_store, noted, require
from tools.bench.workloads import PlainKV, Workload, loads_safetensors, main_loads, peer_path, same, saved_in

BLOCK = 1 << 20


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


def bare(load: Workload) -> Contender:
    """What no verified restore can do without, in plain numpy."""

    def contender(folder: str) -> Generator[None]:
        paths = [os.path.join(folder, str(number)) for number in range(-(-load.bytes // BLOCK))]
        for path in paths:
            with open(path, "xb") as file:
                file.write(os.urandom(BLOCK))
        scratch = Scratch(BLOCK)
        yield
        into = np.empty((len(paths), BLOCK), np.uint8)

        def restore(number: int) -> None:
            block = scratch.take(BLOCK)
            with open(paths[number], "rb", buffering=0) as file:
                file.readinto(block.data)
            blake3(block.data).digest()
            into[number] = block

        spread(range(len(paths)), restore, MARGINS.threads_for(BLOCK))
        yield

    return contender


def compared(bench: Bench, load: Workload, rounds: int) -> list[Row]:
    seconds = bench.medians(
        {
            "verified": restores(load, verify=True),
            "load_prompt_cache": loads_safetensors(load),
            "unverified": restores(load, verify=False),
            "read": reads(load),
            "bare": bare(load),
        },
        rounds,
    )
    peer, what = seconds["load_prompt_cache"], f"restore, {load.name}, first append included"
    speeds = {f"{name}_mb_per_s": load.bytes / taken / 1e6 for name, taken in seconds.items()}
    return [
        at_least(f"{what}, verified: × load_prompt_cache (aim: 2.2)", 1.8, peer / seconds["verified"], **speeds),
        at_least(f"{what}, unverified: × load_prompt_cache", 2.8, peer / seconds["unverified"]),
        noted(f"{what}, verified: × reading one file", seconds["read"] / seconds["verified"]),
        noted(f"{what}: bare read, digest and copy on all CPUs: × load_prompt_cache", peer / seconds["bare"]),
    ]


def measure(bench: Bench) -> list[Row]:
    compared(bench, PlainKV(1, 256, dim=8), 1)  # what only the first call costs, on all sides
    rows = []
    for load, rounds in main_loads(bench.quick):
        rows += compared(bench, load, bench.rounds(rounds))
    return rows


if __name__ == "__main__":
    main("restore", __doc__, measure)
