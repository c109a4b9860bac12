"""A cold save: everything is new, everything is written, digests included.

    python tools/bench/cold_save/run.py --json

Beside mlx-lm's save_prompt_cache, with and without an fsync behind it: our own rows cut with one fsync a block, and
`cp` of as many bytes as the physical reference. What the machine allows is measured, too: as many bytes copied,
digested and written to new files of 1 MiB by as many threads, and nothing else.
"""

import os
import subprocess
import sys
from collections.abc import Generator

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import numpy as np
from blake3 import blake3
from mlx_lm.models.cache import save_prompt_cache

from blockstore import Meta, save_kv_cache
from blockstore.buffers import Scratch
from blockstore.layout import Durability
from blockstore.rooms import MARGINS
from blockstore.workers import spread
from tools.bench.kit import IDENTITY, Bench, Contender, Row, at_least, main, new_store, noted, require
from tools.bench.workloads import PlainKV, Workload, main_loads, peer_path, same, saved_in, saves_safetensors

BLOCK = 1 << 20


def ours(load: Workload, durability: Durability) -> Contender:
    def contender(folder: str) -> Generator[None]:
        with new_store(folder, durability) as store:
            caches = load.caches()
            yield
            saved = saved_in(store, load, caches)
            yield
            loaded = store.load(saved.entry_id, load.prototypes())
            require(same(loaded.caches, caches, load.count), "the store gave other bytes")

    return contender


def rows_cut(load: Workload) -> Contender:
    """One fsync a block, as the program does that defined the rows cut."""
    meta = Meta(IDENTITY.model_id, IDENTITY.config_fingerprint, IDENTITY.tokenizer_hash, IDENTITY.ns)

    def contender(folder: str) -> Generator[None]:
        caches = load.caches()
        yield
        saved = save_kv_cache(os.path.join(folder, "cache.mlxkv"), load.tokens, caches, meta, layout="rows")
        yield
        require(saved.written_bytes >= load.bytes, "random blocks were shared")

    return contender


def copies(load: Workload) -> Contender:
    def contender(folder: str) -> Generator[None]:
        save_prompt_cache(peer_path(folder), load.peers())
        yield
        subprocess.run(["cp", peer_path(folder), os.path.join(folder, "copy")], check=True)
        yield

    return contender


def bare(load: Workload) -> Contender:
    """What no save of new blocks can do without, in plain numpy."""

    def contender(folder: str) -> Generator[None]:
        count = -(-load.bytes // BLOCK)
        source = np.random.default_rng(1).integers(0, 256, (count, BLOCK), dtype=np.uint8)
        scratch = Scratch(BLOCK)

        def save(number: int) -> None:
            block = scratch.take(BLOCK)
            block[...] = source[number]
            with open(os.path.join(folder, blake3(block.data).hexdigest()), "xb", buffering=0) as file:
                file.write(block.data)

        yield
        spread(range(count), save, MARGINS.threads_for(BLOCK))
        yield

    return contender


def compared(bench: Bench, load: Workload, rounds: int, *, references: bool = False) -> list[Row]:
    contenders = {
        "ours": ours(load, "none"),
        "save_prompt_cache": saves_safetensors(load),
        "bare": bare(load),
        "ours_durable": ours(load, "full"),
        "save_prompt_cache_fsync": saves_safetensors(load, sync=True),
    }
    if references:
        contenders |= {"rows_cut": rows_cut(load), "cp": copies(load)}
    seconds = bench.medians(contenders, rounds)
    against, durably = seconds["save_prompt_cache"], seconds["save_prompt_cache_fsync"]
    speeds = {f"{name}_mb_per_s": load.bytes / taken / 1e6 for name, taken in seconds.items()}
    what = f"cold save, {load.name}"
    rows = [
        at_least(f"{what}: × save_prompt_cache (aim: 1.6)", 1.3, against / seconds["ours"], **speeds),
        at_least(f"{what}, durable: × save_prompt_cache + fsync", 0.85, durably / seconds["ours_durable"]),
    ]
    rows.append(
        noted(f"{what}: bare copy, digest and write on all CPUs: × save_prompt_cache", against / seconds["bare"])
    )
    if references:
        theirs = seconds["rows_cut"] / seconds["ours_durable"]
        rows.append(noted(f"{what}, durable: × rows cut, one fsync a block", theirs))
        rows.append(noted(f"{what}: × cp", seconds["cp"] / seconds["ours"]))
    return rows


def measure(bench: Bench) -> list[Row]:
    compared(bench, PlainKV(1, 256, dim=8), 1, references=True)  # what only the first call costs, on all sides
    rows = list[Row]()
    for load, rounds in main_loads(bench.quick):
        rows += compared(bench, load, bench.rounds(rounds), references=not rows)
    return rows


if __name__ == "__main__":
    main("cold_save", __doc__, measure)
