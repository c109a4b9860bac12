"""A process whose main thread is interrupted all the time: `python interrupt_roles.py ROOT SECONDS SEED`.

Says how often it was interrupted and which threads are left, waits for a line, and then uses the store once more.
"""

import _thread
import json
import random
import signal
import sys
import time
from collections.abc import Callable

from blockstore import Store
from store.fork_roles import by_hand
from token_caches import IDENTITY, small_store

TOKENS = list(range(40))
_LONGEST_S = {"save": 0.01, "gc": 0.004, "find": 0.0006, "remove": 0.002, "entries": 0.001}


class Interruption(BaseException):
    """What the handler raises, as Ctrl-C or a timeout does."""


def interrupt(number: int, frame: object) -> None:
    raise Interruption


def acts(store: Store) -> dict[str, Callable[[random.Random], object]]:
    snapshots = [by_hand([*TOKENS, number], "mine") for number in range(5)]

    def remove(luck: random.Random) -> None:
        mine = [entry for entry in store.entries() if entry.ns == "mine"]
        if mine:
            store.remove(luck.choice(mine).entry_id)

    return {
        "save": lambda luck: store.commit(luck.choice(snapshots)),
        "find": lambda luck: store.find([*TOKENS, 1], IDENTITY),
        "remove": remove,
        "entries": lambda luck: store.entries(),
        "gc": lambda luck: store.gc(),
    }


def suffer(store: Store, seconds: float, luck: random.Random) -> int:
    """How often an act was interrupted. The exception of each is kept until the next one."""
    choices, kept, count = acts(store), None, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name = luck.choice(list(choices))
        try:
            signal.setitimer(signal.ITIMER_REAL, luck.random() * _LONGEST_S[name] + 1e-6)
            choices[name](luck)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interruption as error:
            kept, count = error, count + 1
    del kept
    return count


def main(root: str, seconds: str, seed: str) -> None:
    signal.signal(signal.SIGALRM, interrupt)
    store = small_store(root)
    count = suffer(store, float(seconds), random.Random(int(seed)))
    deadline = time.monotonic() + 5
    while _thread._count() and time.monotonic() < deadline:
        time.sleep(0.01)
    print(json.dumps({"interrupted": count, "threads": _thread._count()}), flush=True)
    sys.stdin.readline()
    saved = store.commit(by_hand(TOKENS, "last"))
    store.gc()
    assert saved.entry_id in {entry.entry_id for entry in store.entries()}
    store.close()
    print("whole", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
