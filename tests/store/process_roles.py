"""What the processes of test_processes do: `python process_roles.py ROLE ROOT SEED`, until ROOT.stop exists.

A writer prints a line for what it is about to remove, and one for each entry once save() has returned. A wrong byte
ends the reader with an error.
"""

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blockstore import EntryGone, Store
from token_caches import identity, plain, small_store

SHARED = "shared"


def tokens_from(rng: random.Random) -> list[int]:
    """Few different beginnings, so that everybody meets the same blocks."""
    return [rng.randrange(3)] * rng.randint(1, 30) + [rng.randrange(3) for _ in range(rng.randint(0, 12))]


def is_right(caches: list[Any], tokens: list[int]) -> bool:
    """Bit for bit what the tokens say."""
    return live(caches, len(tokens)) == live(plain(tokens, len(caches)), len(tokens))


def live(caches: list[Any], count: int) -> list[bytes]:
    return [np.array(side[:, :, :count]).tobytes() for cache in caches for side in (cache.keys, cache.values)]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def write(store: Store, rng: random.Random, own: str) -> None:
    mine: dict[tuple[int, ...], str] = {}
    for _ in running(store):
        ns, tokens = rng.choice([SHARED, SHARED, own]), tokens_from(rng)
        entry_id = store.save(tokens, plain(tokens, 2), identity(ns)).entry_id
        say(saved=tokens, ns=ns)
        if ns == own:
            mine[tuple(tokens)] = entry_id
        if len(mine) > 3:
            tokens_gone, entry_id = mine.popitem()
            say(removing=tokens_gone, ns=own)
            store.remove(entry_id)


def read(store: Store, rng: random.Random, own: str) -> None:
    found = 0
    for _ in running(store):
        loaded = store.restore([*tokens_from(rng), 7], identity(SHARED))
        if loaded is not None:
            assert is_right(loaded.caches, loaded.tokens), loaded.tokens
            found += 1
    say(found=found)


def collect(store: Store, rng: random.Random, own: str) -> None:
    for number in running(store):
        store.gc(full=number % 10 == 9)
        if number % 7 == 3:
            with contextlib.suppress(EntryGone):  # replaced in between
                forget_one(store, rng)
        time.sleep(0.01)


def forget_one(store: Store, rng: random.Random) -> None:
    """A removal by somebody who did not save it."""
    shared = [entry.entry_id for entry in store.entries() if entry.ns == SHARED]
    if shared:
        entry_id = rng.choice(shared)
        say(removing=store.load(entry_id).tokens, ns=SHARED)
        store.remove(entry_id)


def running(store: Store) -> Iterator[int]:
    number = 0
    while not os.path.exists(store.root + ".stop"):
        yield number
        number += 1


ROLES: dict[str, Callable[[Store, random.Random, str], None]] = {"write": write, "read": read, "collect": collect}

if __name__ == "__main__":
    role, root, seed = sys.argv[1:]
    with small_store(root) as opened:
        ROLES[role](opened, random.Random(int(seed)), f"{role}-{seed}")
