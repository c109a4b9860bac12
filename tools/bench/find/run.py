"""Finding the longest stored prefix of a prompt, beside a linear scan over the tokens of all entries in numpy.

    python tools/bench/find/run.py --json

10,000 entries of 8,000 to 32,000 tokens. All begin with the same 64, so that all stand under one boundary (and under
the one before it); half of them share 2,000. They are entered into the index as a rebuild enters them: no headers and
no blocks, which finding never looks at. The prompts are numpy arrays, each 500 tokens longer than an entry, a quarter
each: all of it shared; half of it; the 2,000 alone; the 64 alone.
"""

import os
import secrets
import sys
import time
from statistics import median
from typing import Any, Final

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import numpy as np

from blockstore import Store
from blockstore.entries import equal_key
from blockstore.index_rows import EntryRow
from blockstore.records import scope_of
from blockstore.store import DEFAULT_PROVIDER_ID
from tools.bench.kit import IDENTITY, Bench, Row, at_least, at_most, main, new_store, require

Tokens = np.ndarray[Any, np.dtype[np.uint32]]
VOCABULARY: Final = 150_000
COMMON: Final = 64
NEW: Final = 500  # tokens of a prompt behind an entry
BATCH: Final = 500
SCOPE: Final = scope_of(
    IDENTITY.model_id, IDENTITY.config_fingerprint, IDENTITY.tokenizer_hash, IDENTITY.ns, DEFAULT_PROVIDER_ID
)


def entries(count: int, shortest: int, longest: int, shared: int) -> list[Tokens]:
    """Token lists that share 64 tokens, every second one `shared`."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, VOCABULARY, shared, dtype=np.uint32)
    found = []
    for number in range(count):
        tokens = rng.integers(0, VOCABULARY, int(rng.integers(shortest, longest)), dtype=np.uint32)
        same = shared if number % 2 else COMMON
        tokens[:same] = beginning[:same]
        found.append(tokens)
    return found


def entry_row(packed: bytes) -> EntryRow:
    return EntryRow(
        scope=SCOPE,
        equal=equal_key(SCOPE, packed),
        token_count=len(packed) // 4,
        logical_bytes=0,
        header_bytes=0,
        created_at_ms=0,
        shortens=True,
        minimum_reusable=0,
        kinds="kv×1",
        model_id=IDENTITY.model_id,
        ns=IDENTITY.ns,
    )


def enter(store: Store, lists: list[Tokens]) -> None:
    for start in range(0, len(lists), BATCH):
        with store.rooms.index.write() as books:
            for tokens in lists[start : start + BATCH]:
                packed = tokens.tobytes()
                books.adopt(secrets.token_hex(16), entry_row(packed), packed, {})


def prompts(lists: list[Tokens], shared: int, rounds: int) -> dict[str, list[Tokens]]:
    rng = np.random.default_rng(2)

    def leaving(tokens: Tokens, kept: int) -> Tokens:
        """A prompt that is longer than an entry and has its first tokens; the others are in no entry."""
        others = rng.integers(VOCABULARY, 2 * VOCABULARY, len(tokens) - kept + NEW, dtype=np.uint32)
        return np.concatenate([tokens[:kept], others])

    chosen = [lists[int(rng.integers(0, len(lists) // 2)) * 2 + 1] for _ in range(rounds)]
    return {
        "continued": [leaving(tokens, len(tokens)) for tokens in chosen],
        "halfway": [leaving(tokens, len(tokens) // 2) for tokens in chosen],
        "beginning": [leaving(tokens, shared) for tokens in chosen],
        "common": [leaving(tokens, COMMON) for tokens in chosen],
    }


def scan(lists: list[Tokens], prompt: Tokens) -> int:
    """The most tokens of the prompt, all but its last, that an entry shares."""
    best = 0
    for tokens in lists:
        most = min(len(tokens), len(prompt) - 1)
        differs = tokens[:most] != prompt[:most]
        first = int(differs.argmax()) if most else 0
        best = max(best, first if most and differs[first] else most)
    return best


def timed(store: Store, lists: list[Tokens], prompt: Tokens, finds: int) -> tuple[float, float]:
    """Seconds of a find, the median of some, and of a scan; both must find as much."""
    seconds = []
    for _ in range(finds):
        began = time.perf_counter()
        match = store.find(prompt, IDENTITY)
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    expected = scan(lists, prompt)
    scanned = time.perf_counter() - began
    require((match.length if match else 0) == expected, f"find gave {match}, the scan {expected}")
    return median(seconds), scanned


def measure(bench: Bench) -> list[Row]:
    shared = bench.size(2000, 200)
    count = bench.size(10_000, 200)
    lists = entries(count, bench.size(8000, 400), bench.size(32_000, 1600), shared)
    asked = prompts(lists, shared, bench.rounds(5))
    with new_store(bench.new_folder()) as store:
        enter(store, lists)
        bench.settle()
        found = {
            kind: [timed(store, lists, prompt, bench.size(11, 3)) for prompt in some] for kind, some in asked.items()
        }
    every = [pair for pairs in found.values() for pair in pairs]
    find_ms, scan_ms = (1000 * median(column) for column in zip(*every, strict=True))
    kinds = {f"{kind}_ms": 1000 * median(find for find, _ in pairs) for kind, pairs in found.items()}
    what = f"find among {count:,} entries"
    return [
        at_least(f"{what}: × a linear scan in numpy", 100, scan_ms / find_ms, scan_ms=scan_ms, find_ms=find_ms),
        at_most(f"{what}: median", 1, find_ms, "ms", **kinds),
    ]


if __name__ == "__main__":
    main("find", __doc__, measure)
