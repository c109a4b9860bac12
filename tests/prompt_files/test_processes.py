"""Several processes save, load, delete and collect under the same few names, in a store at its cap."""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from blockstore import EntryGone, FileMissing, Store, load_prompt_cache, pointers, save_prompt_cache
from blockstore.fs import FileSystem
from prompt_files.test_file_life import grown
from store_kit import all_facts, assert_clean, assert_exact

pytestmark = [pytest.mark.mlx_lm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PROCESSES, ROUNDS, NAMES, CAP_BYTES = 3, 120, 3, 3 << 20
WORKER = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "codecs")!r}, {str(ROOT / "tests")!r}]
from prompt_files.test_processes import work
work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


def caches_of(metadata: dict[str, str]) -> list[Any]:
    return grown(None, int(metadata["tokens"]), int(metadata["seed"]))


def work(root: str, folder: str, seed: int) -> None:
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    for _ in range(ROUNDS):
        path = Path(folder, f"{rng.randrange(NAMES)}.safetensors")
        step = rng.choices(["save", "load", "collect", "delete"], [45, 40, 10, 5])[0]
        if step == "save":
            metadata = {"seed": str(rng.randrange(4)), "tokens": str(100 * rng.randrange(1, 4))}
            save_prompt_cache(path, caches_of(metadata), metadata, store=root)
        elif step == "load":
            try:
                caches, metadata = load_prompt_cache(path, return_metadata=True)
            except (FileMissing, EntryGone):  # deleted; or replaced, and evicted, between two looks
                continue
            assert all_facts(caches) == all_facts(caches_of(metadata))
        elif step == "collect":
            with Store(root) as store:
                pointers.release(store.rooms)
                store.gc()
        else:
            path.unlink(missing_ok=True)
        done[step] += 1
    assert min(done["save"], done["load"]) > ROUNDS // 6, done


def test_every_file_that_stands_has_its_entry_and_no_other_entry_is_pinned(tmp_path: Path) -> None:
    root, folder = tmp_path / "store", tmp_path / "chats"
    folder.mkdir()
    Store(root, durability="none", max_bytes=CAP_BYTES).close()
    args = [sys.executable, "-c", WORKER, str(root), str(folder)]
    workers = [subprocess.Popen([*args, str(seed)], stderr=subprocess.PIPE) for seed in range(PROCESSES)]
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors.decode()
    with Store(root) as store:
        pointers.release(store.rooms)
        store.gc()
        named = {}
        for path in folder.iterdir():
            caches, metadata = load_prompt_cache(path, return_metadata=True, store=store)
            assert all_facts(caches) == all_facts(caches_of(metadata))
            found = pointers.standing(FileSystem(), str(path))
            assert found is not None
            named[path.name] = found.entry_id
        assert {entry.entry_id for entry in store.entries() if entry.pinned} == set(named.values())
        assert set(os.listdir(root / "files")) == set(named.values())
        assert_exact(store)
        assert_clean(store)
