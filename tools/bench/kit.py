"""What the benchmarks share: rounds that are fair to all sides, and a table of what was wanted and what came out.

A contender is a generator function over a new directory: it prepares, yields, does what is timed, yields, and checks.
Contenders take turns, in the other direction every second round. They check in the first round alone: the memory that a
check gives back would make the next one faster. Before each timed part what is dirty is synced and the machine rests
for a moment; nothing is deleted before all is measured, since a file system may be slow for minutes after deletions. So
the page cache is warm: what was written is still in memory when it is read.
"""

import argparse
import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Final

from blockstore import Identity, Store
from blockstore.fs import FileSystem
from blockstore.layout import Durability
from blockstore.versions import versions_of

IDENTITY: Final = Identity("model", "config", "tokenizer", "")
MIB: Final = 1 << 20
PAGE_CACHE: Final = "warm"
_REST_S: Final = 0.5
# No benchmark is about eviction: a cap that none reaches.
_NO_CAP: Final = 1 << 50
_MARKS: Final = {True: "✓", False: "✗", None: ""}

Contender = Callable[[str], Generator[None]]


@dataclass(frozen=True)
class Row:
    """One line of the table. met: None where there is no target, only something worth knowing."""

    what: str
    target: str
    measured: str
    met: bool | None
    figures: dict[str, float] = field(default_factory=dict)


def at_least(what: str, wanted: float, found: float, unit: str = "×", /, **figures: float) -> Row:
    return Row(what, f"≥ {_text(wanted)} {unit}", f"{_text(found)} {unit}", found >= wanted, figures)


def at_most(what: str, wanted: float, found: float, unit: str = "×", /, **figures: float) -> Row:
    return Row(what, f"≤ {_text(wanted)} {unit}", f"{_text(found)} {unit}", found <= wanted, figures)


def noted(what: str, found: float, unit: str = "×", /, **figures: float) -> Row:
    return Row(what, "", f"{_text(found)} {unit}", None, figures)


class Bench:
    """One run of a benchmark: where its directories are, and whether it is the quick form."""

    def __init__(self, root: str, *, quick: bool) -> None:
        self.quick = quick
        self._root = root

    def size(self, full: int, small: int) -> int:
        return small if self.quick else full

    def rounds(self, full: int) -> int:
        return self.size(full, 1)

    def new_folder(self) -> str:
        return tempfile.mkdtemp(dir=self._root)

    def settle(self) -> None:
        """Let nothing that was done before run into what is timed next."""
        gc.collect()
        if not self.quick:
            os.sync()
            time.sleep(_REST_S)

    def times(self, contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
        """The seconds of each contender's timed part, one for each round."""
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds):
            for name in list(contenders)[:: -1 if number % 2 else 1]:
                found[name].append(self._timed(contenders[name], check=number == 0))
        return found

    def medians(self, contenders: Mapping[str, Contender], rounds: int) -> dict[str, float]:
        return {name: median(seconds) for name, seconds in self.times(contenders, rounds).items()}

    def _timed(self, contender: Contender, *, check: bool) -> float:
        steps = contender(self.new_folder())
        next(steps)
        self.settle()
        began = time.perf_counter()
        next(steps)
        seconds = time.perf_counter() - began
        if not check:
            steps.close()
            return seconds
        for _ in steps:
            raise RuntimeError("a contender yields more than twice")
        return seconds


def new_store(folder: str, durability: Durability = "none", **options: Any) -> Store:
    return Store(os.path.join(folder, "store"), durability=durability, max_bytes=_NO_CAP, **options)


def require(holds: bool, what: str) -> None:
    """A benchmark of something that does not work says nothing: it ends."""
    if not holds:
        raise SystemExit(f"wrong: {what}")


def main(name: str, about: str | None, measure: Callable[[Bench], list[Row]]) -> None:
    """Parse the command line, measure in a directory of its own, print."""
    arguments = _parser(about).parse_args()
    root = tempfile.mkdtemp(prefix=f"bench-{name}-", dir=arguments.root)
    try:
        rows = measure(Bench(root, quick=arguments.quick))
        if arguments.quick:
            rows = [replace(row, met=None) for row in rows]  # such small sizes say nothing
        report = {
            "benchmark": name,
            "quick": arguments.quick,
            "machine": machine(root),
            "rows": [asdict(row) for row in rows],
        }
    finally:
        if not arguments.keep:
            shutil.rmtree(root)
    if arguments.keep:
        empty(root)
    if arguments.json:
        json.dump(report, sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        print(table(rows))


def empty(root: str) -> None:
    """Give back the space of all files below `root` and delete none: the next benchmark is not to suffer from it."""
    for folder, _, names in os.walk(root):
        for name in names:
            os.truncate(os.path.join(folder, name), 0)


def machine(folder: str) -> dict[str, Any]:
    """What figures depend on."""
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "file_system": FileSystem().file_system_type(folder),
        "page_cache": PAGE_CACHE,
        "python": platform.python_version(),
        **versions_of(),
    }


def table(rows: list[Row]) -> str:
    cells = [("what", "target", "measured", "")]
    cells += [(row.what, row.target, row.measured, _MARKS[row.met]) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _text(number: float) -> str:
    if number == int(number) and abs(number) < 1e6:
        return str(int(number))
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _parser(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: to see that the script works")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--root", default=None, metavar="DIR", help="a directory on the file system to measure")
    parser.add_argument("--keep", action="store_true", help="empty files at the end, delete none (see all.py)")
    return parser
