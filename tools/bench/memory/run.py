"""The memory that a save and a load take beyond the arrays, by the process's peak.

    python tools/bench/memory/run.py --json

A process of its own each, by the high-water mark of its resident memory (Linux alone has one that can be set back).
A load's arrays count at their capacity, with room for the next tokens. Beside them mlx-lm's calls.
"""

import json
import os
import subprocess
import sys

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

from tools.bench.kit import MIB, Bench, Row, at_most, main, noted

ACTS = ("save", "save_known", "load", "load_unverified", "save_prompt_cache", "load_prompt_cache")


def beyond(bench: Bench, act: str, folder: str) -> int:
    """Bytes that `act` takes in a new process."""
    child = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
    sizes = (bench.size(16, 2), bench.size(4096, 256), bench.size(128, 16))
    command = [sys.executable, child, act, folder, *map(str, sizes)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout))


def measure(bench: Bench) -> list[Row]:
    if not os.path.exists("/proc/self/clear_refs"):
        return []
    found = dict.fromkeys(ACTS, 0.0)
    for _ in range(bench.rounds(3)):
        folder = bench.new_folder()
        for act in ACTS:
            found[act] = max(found[act], beyond(bench, act, folder) / MIB)
    ours = [act for act in ACTS if "prompt_cache" not in act]
    rows = [at_most(f"memory beyond the arrays, {act.replace('_', ', ')}", 64, found[act], "MiB") for act in ours]
    return rows + [noted(f"memory beyond the arrays, {act}", found[act], "MiB") for act in ACTS if act not in ours]


if __name__ == "__main__":
    main("memory", __doc__, measure)
