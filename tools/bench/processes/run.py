"""Four processes that save different caches into one store at once, beside one alone.

    python tools/bench/processes/run.py --json

The caches are made and the store is open before the start; the time runs from the first beginning to the last end.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from statistics import median
from typing import Self

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

from blockstore.layout import Durability
from tools.bench.kit import Bench, Row, at_least, main, new_store, require

MANY = 4


class Saver:
    """A process that saves when it is told to. Ended with the context."""

    def __init__(self, seed: int, sizes: tuple[int, ...]) -> None:
        child = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
        command = [sys.executable, child, str(seed), *map(str, sizes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        with self._process as process:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        require(bool(line), "a saving process died")
        return line


def rate(bench: Bench, savers: list[Saver], durability: Durability) -> float:
    """Bytes a second that these reach together in a new store."""
    folder = bench.new_folder()
    with new_store(folder, durability) as store:
        for saver in savers:
            saver.tell(store.root)
        require(all(saver.answer() == "ready\n" for saver in savers), "a saving process is not ready")
        bench.settle()
        for saver in savers:
            saver.tell("go")
        done = [json.loads(saver.answer()) for saver in savers]
        require(len(store.entries()) == len(savers), "an entry is missing")
    return float(
        sum(one["bytes"] for one in done) / (max(one["end"] for one in done) - min(one["begin"] for one in done))
    )


def compared(bench: Bench, savers: list[Saver], durability: Durability) -> Row:
    alone, together = [], []
    for _ in range(bench.rounds(5)):
        alone.append(rate(bench, savers[:1], durability))
        together.append(rate(bench, savers, durability))
    what = f'{MANY} processes saving at once, durability "{durability}": × one alone'
    speeds = {"alone_mb_per_s": median(alone) / 1e6, "together_mb_per_s": median(together) / 1e6}
    return at_least(what, 0.9, median(together) / median(alone), **speeds)


def measure(bench: Bench) -> list[Row]:
    sizes = (bench.size(8, 1), bench.size(4096, 256), bench.size(128, 16))
    with ExitStack() as stack:
        savers = [stack.enter_context(Saver(seed, sizes)) for seed in range(MANY)]
        rate(bench, savers, "none")  # what only the first call costs
        return [compared(bench, savers, "none"), compared(bench, savers, "full")]


if __name__ == "__main__":
    main("processes", __doc__, measure)
