"""A process that saves its own caches whenever it is told to.

    python child.py SEED LAYERS TOKENS DIM

Reads a store's root, opens it and says "ready"; reads a line, saves, and prints when that began and ended, and how many
bytes it was; then the next, until its input ends. Each save is of other tokens, so that it is an entry of its own.
"""

import json
import os
import sys
import time

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

from blockstore import Store
from blockstore.history import forget
from tools.bench.kit import IDENTITY
from tools.bench.workloads import PlainKV


def save_when_told(root: str, load: PlainKV) -> None:
    with Store(root, create=False) as store:
        caches = load.caches()
        print("ready", flush=True)
        sys.stdin.readline()
        begin = time.monotonic()
        saved = store.save(load.tokens, caches, IDENTITY)
        end = time.monotonic()
        print(json.dumps({"begin": begin, "end": end, "bytes": saved.written_bytes}), flush=True)
        forget(caches)


if __name__ == "__main__":
    seed, layers, count, dim = map(int, sys.argv[1:])
    load = PlainKV(layers, count, dim=dim, seed=seed)
    for line in iter(sys.stdin.readline, ""):
        save_when_told(line.rstrip("\n"), load)
