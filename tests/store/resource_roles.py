"""What runs under a limit, or is measured: `python resource_roles.py PART ROOT`. The last line is JSON."""

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import kvcodecs
from blockstore import Store, check
from store.process_roles import is_right
from store_kit import assert_exact
from token_caches import IDENTITY, plain, small_store

OPEN_FILES = 64
MANY_TOKENS, MANY_BLOCKS = 6_000, 1_500
LAYERS, TOKENS, HEADS, DIM = 16, 8_192, 4, 128  # 256 MiB of float16
SPARE_ADDRESSES = 3 << 30


def files(root: str) -> dict[str, object]:
    """An entry of many more blocks than files may be open, through everything that can be done with it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    tokens = list(range(MANY_TOKENS))
    with small_store(root) as store:
        saved = store.save(tokens, plain(tokens), IDENTITY)
        assert is_right(store.load(saved.entry_id).caches, tokens)
        shorter = store.restore([*tokens[:4000], 7], IDENTITY)
        assert shorter is not None
        assert is_right(shorter.caches, tokens[:4000])
        store.gc(full=True)
        clean = looked_at(store).is_clean
    layout = store._layout
    repaired = check.repair(layout, deep=True, progress=lambda done, total: None)
    with small_store(root) as store:
        assert is_right(store.load(saved.entry_id).caches, tokens)
        store.remove(saved.entry_id)
        collected = store.gc().count("block")
        assert_exact(store)
    return {
        "blocks": saved.blocks_written, "clean": clean, "damage": len(repaired.problems), "collected": collected,
    }  # fmt: skip


def looked_at(store: Store) -> check.Report:
    return check.check(store._layout, store._rooms, deep=True, progress=lambda done, total: None)


def address_space(root: str) -> dict[str, object]:
    """A store opens and works in few addresses; how many it took."""
    before = status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (before + SPARE_ADDRESSES, resource.RLIM_INFINITY))
    tokens = list(range(50))
    with small_store(root) as store:
        store.save(tokens, plain(tokens), IDENTITY)
        taken = status("VmSize") - before
        loaded = store.restore([*tokens, 1], IDENTITY)
        assert loaded is not None
        assert is_right(loaded.caches, tokens)
        store.gc(full=True)
    return {"taken": taken}


# ---- memory


def save_memory(root: str) -> dict[str, object]:
    """What a save takes beyond the arrays, which are there before."""
    caches = random_caches()
    with Store(root, durability="none") as store:
        beyond = Peak()
        saved = store.save(range(TOKENS), caches, IDENTITY)
        return {"beyond": beyond.bytes(), "logical": saved.logical_bytes, "written": saved.written_bytes}


def load_memory(root: str) -> dict[str, object]:
    """What a load takes beyond the arrays that it makes."""
    with Store(root) as store:
        [entry] = store.entries()
        beyond = Peak()
        loaded = store.load(entry.entry_id)
        grown = beyond.bytes()
        arrays = sum(cache.keys.nbytes + cache.values.nbytes for cache in loaded.caches)
        return {"beyond": grown - arrays, "logical": entry.logical_bytes, "arrays": arrays}


def random_caches() -> list[Any]:
    """So that no two blocks are equal. Their arrays have no room to spare."""
    caches = []
    for layer in range(LAYERS):
        cache = kvcodecs.KVCache()
        keys, values = (random_array(2 * layer + side) for side in range(2))
        mx.eval(cache.update_and_fetch(keys, values))
        caches.append(cache)
    mx.clear_cache()
    return caches


def random_array(seed: int) -> Any:
    numbers = np.random.default_rng(seed).integers(1 << 16, size=(1, HEADS, TOKENS, DIM), dtype=np.uint16)
    return mx.array(numbers).view(mx.float16)


class Peak:
    """The largest growth of resident memory since it was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        self._before = status("VmRSS")

    def bytes(self) -> int:
        return status("VmHWM") - self._before


def status(name: str) -> int:
    """Bytes that the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024


PARTS: dict[str, Callable[[str], dict[str, object]]] = {
    "files": files, "address space": address_space, "save memory": save_memory, "load memory": load_memory,
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](sys.argv[2])))
