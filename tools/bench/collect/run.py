"""A collection of 1,000 dead blocks among 200,000 live ones, beside one among 2,000: the cost follows the dead.

    python tools/bench/collect/run.py --json

The rows are entered into the index as a rebuild enters them; the dead ones have files, of one page each.
"""

import os
import secrets
import sys
from collections.abc import Generator
from typing import Final

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

from blockstore import Store
from blockstore.entries import equal_key
from blockstore.index_rows import EntryRow
from blockstore.layout import Durability
from blockstore.prefixes import pack_tokens
from tools.bench.kit import Bench, Contender, Row, at_most, main, new_store, require

PAGE: Final = 4096
AN_ENTRY: Final = 1000  # blocks of one entry
SCOPE: Final = "00" * 16


def enter(store: Store, number: int, names: list[bytes]) -> str:
    """An entry that names these blocks; its id."""
    packed = pack_tokens([number])
    row = EntryRow(SCOPE, equal_key(SCOPE, packed), 1, PAGE * len(names), 0, 0, True, 0, "kv×1")
    entry_id = secrets.token_hex(16)
    with store.rooms.index.write() as books:
        books.adopt(entry_id, row, packed, dict.fromkeys(names, PAGE))
    return entry_id


def digests(count: int) -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


def die(store: Store, count: int) -> None:
    """Blocks that nothing refers to any more: an entry that named them was removed."""
    names = digests(count)
    for name in names:
        store.rooms.fs.write_new(store.rooms.blocks.path(name), [bytes(PAGE)])
    entry_id = enter(store, 0, names)
    store.rooms.index.doom(entry_id)
    store.rooms.index.forget_doomed([entry_id])


def collects(dead: int, live: int, durability: Durability) -> Contender:
    def contender(folder: str) -> Generator[None]:
        with new_store(folder, durability) as store:
            for number, start in enumerate(range(0, live, AN_ENTRY), 1):
                enter(store, number, digests(min(AN_ENTRY, live - start)))
            die(store, dead)
            yield
            plan = store.gc()
            yield
            require(plan.count("block") == len(plan.items) == dead, f"{len(plan.items)} things were collected")
            require(store.rooms.index.counts()["blocks"] == live, "live blocks went")
            require(not any(store.rooms.blocks.names()), "a file is left")

    return contender


def compared(bench: Bench, durability: Durability) -> Row:
    dead, few, many = bench.size(1000, 20), bench.size(2000, 40), bench.size(200_000, 2000)
    contenders = {"few": collects(dead, few, durability), "many": collects(dead, many, durability)}
    seconds = bench.medians(contenders, bench.rounds(5))
    what = f'gc of {dead:,} dead blocks among {many:,} live ones, durability "{durability}": × among {few:,}'
    return at_most(what, 1.5, seconds["many"] / seconds["few"], **seconds)


def measure(bench: Bench) -> list[Row]:
    bench.medians({"warm": collects(10, 10, "none")}, 1)  # what only the first call costs
    return [compared(bench, "none"), compared(bench, "full")]


if __name__ == "__main__":
    main("collect", __doc__, measure)
