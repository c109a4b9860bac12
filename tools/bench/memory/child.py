"""One act in a process of its own: prints the bytes by which its peak passes the memory before, arrays not counted.

    python child.py ACT FOLDER LAYERS TOKENS DIM

"save" makes the store in FOLDER, "save_known" grows its own caches and saves again, the loads read what is there.
"""

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import numpy as np
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from blockstore import Store, loading, preparing, saving
from tools.bench.kit import IDENTITY, new_store, require
from tools.bench.workloads import PlainKV, held, peer_path, same, saved_in

USED = (loading, preparing, saving)  # imported before the memory is looked at: code is not what is measured
GROWN = 256


def status(name: str) -> int:
    """A field of this process's status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def beyond(act: Callable[[], Any]) -> tuple[int, Any]:
    gc.collect()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = status("VmRSS")
    result = act()
    return status("VmHWM") - before, result


def saves(store: Store, load: PlainKV, *, known: bool) -> int:
    caches, tokens = load.caches(), load.tokens
    if known:
        saved_in(store, load, caches)
        load.append(caches, load.rows(GROWN))
        tokens = np.concatenate([tokens, load.more_tokens(GROWN)])
    taken, saved = beyond(lambda: store.save(tokens, caches, IDENTITY))
    require(saved.written_bytes >= (GROWN if known else load.count) * load.token_bytes, "too little was written")
    return taken


def loads(load: PlainKV, act: Callable[[], list[Any]]) -> int:
    taken, caches = beyond(act)
    require(same(caches, load.caches(), load.count), "other bytes were loaded")
    return taken - sum(array.nbytes for cache in caches for array in held(cache))


def act_on(act: str, folder: str, load: PlainKV) -> int:
    path = peer_path(folder)
    if act == "save_prompt_cache":
        caches = load.caches()
        return beyond(lambda: save_prompt_cache(path, caches))[0]
    if act == "load_prompt_cache":
        return loads(load, lambda: evaluated(load_prompt_cache(path)))
    place = os.path.join(folder, "known") if act == "save_known" else folder
    os.makedirs(place, exist_ok=True)
    with new_store(place) as store:
        if act in ("save", "save_known"):
            return saves(store, load, known=act == "save_known")
        entry, model, verify = store.entries()[0].entry_id, load.prototypes(), act == "load"
        return loads(load, lambda: evaluated(store.load(entry, model, verify=verify).caches))


def evaluated(caches: list[Any]) -> list[Any]:
    for cache in caches:
        for array in held(cache):
            array[..., :1, :].sum().item()  # it is there, and no copy of it is made
    return caches


if __name__ == "__main__":
    layers, count, dim = map(int, sys.argv[3:])
    print(act_on(sys.argv[1], sys.argv[2], PlainKV(layers, count, dim=dim)))
