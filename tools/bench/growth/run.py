"""A save after growing by 256 tokens: with its history unknown, remembered by the caches, or named as `parent`.

    python tools/bench/growth/run.py --json

At last what the successive snapshots of a model with sliding windows have in common: every second layer is an mlx-lm
RotatingKVCache of 1024 tokens, and a turn is a prefill of 300 tokens and 50 decoded ones.
"""

import os
import sys
from collections.abc import Generator
from typing import Any, Literal

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from blockstore.history import forget
from blockstore.saving import Saved
from tools.bench.kit import IDENTITY, Bench, Contender, Row, at_least, at_most, main, new_store, noted, require
from tools.bench.workloads import PlainKV, held, same, saved_in, saves_safetensors

GROWN = 256
SPAN = 64
History = Literal["unknown", "remembered", "parent"]


def grown_save(load: PlainKV, history: History, into: list[Saved]) -> Contender:
    def contender(folder: str) -> Generator[None]:
        with new_store(folder) as store:
            caches = load.caches()
            before = saved_in(store, load, caches)
            load.append(caches, load.rows(GROWN))
            tokens = np.concatenate([load.tokens, load.more_tokens(GROWN)])
            if history != "remembered":
                forget(caches)
            yield
            if history == "parent":
                saved = store.save(tokens, caches, IDENTITY, parent=before)
            else:
                saved = store.save(tokens, caches, IDENTITY)
            yield
            into.append(saved)
            loaded = store.load(saved.entry_id, load.prototypes())
            require(same(loaded.caches, caches, len(tokens)), "the store gave other bytes")

    return contender


def main_size(bench: Bench, load: PlainKV) -> list[Row]:
    unknown = list[Saved]()
    contenders = {name: grown_save(load, name, []) for name in ("remembered", "parent")}
    contenders |= {"unknown": grown_save(load, "unknown", unknown)}
    contenders |= {"save_prompt_cache": saves_safetensors(load, grow=GROWN)}
    seconds = bench.medians(contenders, bench.rounds(5))
    peer, what = seconds["save_prompt_cache"], f"save after growing by {GROWN} at {load.count}"
    written = max(saved.written_bytes for saved in unknown) / load.token_bytes
    return [
        at_least(f"{what}, history unknown: × save_prompt_cache", 1.7, peer / seconds["unknown"], **seconds),
        at_most(f"{what}: bytes written", GROWN + SPAN, written, "tokens' bytes"),
        at_least(f"{what}, remembered: × save_prompt_cache", 8, peer / seconds["remembered"]),
        at_least(f"{what}, parent named: × save_prompt_cache", 8, peer / seconds["parent"]),
    ]


def long_size(bench: Bench, short: PlainKV, long: PlainKV) -> list[Row]:
    contenders = {
        "short": grown_save(short, "remembered", []),
        "long": grown_save(long, "remembered", []),
        "save_prompt_cache": saves_safetensors(long, grow=GROWN),
    }
    seconds = bench.medians(contenders, bench.rounds(3))
    what = f"save after growing by {GROWN} at {long.count}, remembered"
    return [
        at_least(f"{what}: × save_prompt_cache", 25, seconds["save_prompt_cache"] / seconds["long"], **seconds),
        at_most(f"{what}: × its own time at {short.count}", 2.5, seconds["long"] / seconds["short"]),
    ]


# ---- what the snapshots of a sliding window share


def turn(load: PlainKV, caches: list[Any], prefill: int, decoded: int) -> None:
    for count in (prefill, *(1 for _ in range(decoded))):
        rows = load.rows(count)
        for cache, new in zip(caches, rows, strict=True):
            cache.update_and_fetch(*new)
        mx.eval([held(cache) for cache in caches])


def shared(bench: Bench, window: int, prefills: list[int], caches: list[Any], what: str) -> Row:
    """How much of a snapshot one turn later is in the store already."""
    load = PlainKV(len(caches), 1, dim=bench.size(128, 16))
    count = sum(prefills)
    for chunk in prefills:
        turn(load, caches, chunk, 0)
    tokens = load.more_tokens(count + 350)
    with new_store(bench.new_folder()) as store:
        store.save(tokens[:count], caches, IDENTITY)
        turn(load, caches, 300, 50)
        saved = store.save(tokens, caches, IDENTITY)
    most = (window - 350) / window
    share = saved.reused_bytes / saved.logical_bytes
    return noted(f"{what}: share that the next turn's snapshot has in common", share, "", ring_at_most=most)


def windows(bench: Bench) -> list[Row]:
    window = bench.size(1024, 512)
    prefills = [512] * bench.size(8, 2)
    layers = bench.size(16, 2)
    rings = [RotatingKVCache(max_size=window) for _ in range(layers)]
    mixed = [RotatingKVCache(max_size=window) if layer % 2 else KVCache() for layer in range(layers)]
    return [
        shared(bench, window, prefills, rings, f"windows of {window} alone"),
        shared(bench, window, prefills, mixed, f"windows of {window} beside whole layers"),
    ]


def measure(bench: Bench) -> list[Row]:
    layers, dim = bench.size(16, 2), bench.size(128, 16)
    long_size(bench, PlainKV(1, 256, dim=8), PlainKV(1, 512, dim=8))  # what only the first call costs
    rows = main_size(bench, PlainKV(layers, bench.size(4096, 512), dim=dim))
    short = PlainKV(layers, bench.size(1024, 256), dim=dim)
    rows += long_size(bench, short, PlainKV(layers, bench.size(16384, 1024), dim=dim))
    return rows + windows(bench)


if __name__ == "__main__":
    main("growth", __doc__, measure)
