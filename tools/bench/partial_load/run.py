"""A load of the first eighth of an entry, beside a load of all of it; both verified and evaluated.

python tools/bench/partial_load/run.py --json
"""

import os
import sys
from collections.abc import Generator

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import mlx.core as mx

from tools.bench.kit import Bench, Contender, Row, at_most, main, new_store, require
from tools.bench.workloads import PlainKV, Workload, held, same, saved_in


def loads(load: Workload, count: int) -> Contender:
    def contender(folder: str) -> Generator[None]:
        with new_store(folder) as store:
            saved, model = saved_in(store, load), load.prototypes()
            yield
            loaded = store.load(saved.entry_id, model, length=count)
            mx.eval([held(cache) for cache in loaded.caches])
            yield
            require(loaded.token_count == count, "another length was loaded")
            require(same(loaded.caches, load.caches(), count), "the store gave other bytes")

    return contender


def compared(bench: Bench, load: Workload) -> list[Row]:
    contenders = {"full": loads(load, load.count), "eighth": loads(load, load.count // 8)}
    seconds = bench.medians(contenders, bench.rounds(5))
    what = f"load of 1/8 of an entry, {load.name}: × the full load"
    return [at_most(what, 0.2, seconds["eighth"] / seconds["full"], **seconds)]


def measure(bench: Bench) -> list[Row]:
    compared(bench, PlainKV(1, 512, dim=8))  # what only the first call costs
    return compared(bench, PlainKV(bench.size(16, 2), bench.size(4096, 512), dim=bench.size(128, 16)))


if __name__ == "__main__":
    main("partial_load", __doc__, measure)
