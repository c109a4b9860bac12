"""What one flat directory of many files costs, beside one that is fanned out by the first two hex digits.

    python tools/bench/flat_directory/run.py --files 1000000 --json

Directories of 1 %, 10 % and 100 % of --files are filled, flat and fanned out, with empty files named by random digests.
A sample is created in between while the last tenth is filled, then looked up, opened and read; at the very end, a
sample is unlinked in each: a file system may be slow for minutes after deletions, so nothing is deleted before all
else is measured, and the layouts take turns at being the first of a grade. The figures are medians of single calls in
microseconds. All names were just used, so they show the directory's own work, not the disk's.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from blockstore.fs import FileSystem

Measured = dict[str, float | int | str]
GRADES: Final = (0.01, 0.1, 1.0)
LAYOUTS: Final = ("flat", "fanned")
CONTENT: Final = bytes(4096)
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Directory:
    """A directory of files named by digests, flat or fanned out."""

    def __init__(self, root: str, *, fanned: bool) -> None:
        self._root = root
        self._fanned = fanned
        os.mkdir(root)
        self._folders = [os.path.join(root, f"{number:02x}") for number in range(256)] if fanned else [root]
        for folder in self._folders:
            if fanned:
                os.mkdir(folder)

    def path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}" if self._fanned else f"{self._root}/{name}"

    def count(self) -> int:
        return sum(len(os.listdir(folder)) for folder in self._folders)


def new_names(count: int) -> list[str]:
    return [secrets.token_hex(32) for _ in range(count)]


def timed_us(act: Callable[[str], object], path: str) -> float:
    began = time.perf_counter_ns()
    act(path)
    return (time.perf_counter_ns() - began) / 1000


def each_us(act: Callable[[str], object], paths: Sequence[str]) -> float:
    """The median time of one call, in microseconds."""
    return round(median(timed_us(act, path) for path in paths), 2)


def create_empty(path: str) -> None:
    os.close(os.open(path, _CREATE, 0o600))


def create(path: str) -> None:
    fd = os.open(path, _CREATE, 0o600)
    os.write(fd, CONTENT)
    os.close(fd)


def read(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.read(fd, len(CONTENT))
    os.close(fd)


def fill(directory: Directory, count: int) -> None:
    for _ in range(count):
        create_empty(directory.path(secrets.token_hex(32)))


def fill_and_time(directory: Directory, sample: Sequence[str], count: int) -> float:
    """Fill up to `count` files; the median of creating the sample, which is spread over the last tenth of them."""
    between = count // 10 // len(sample)
    fill(directory, count - len(sample) * (between + 1))
    times = []
    for name in sample:
        fill(directory, between)
        times.append(timed_us(create, directory.path(name)))
    return round(median(times), 2)


def measure(directory: Directory, sample: Sequence[str], count: int) -> Measured:
    """Fill up to `count` files, the sample among them, and time everything but unlinking."""
    began = time.perf_counter()
    measured: Measured = {"files": count, "create_us": fill_and_time(directory, sample, count)}
    measured["fill_s"] = round(time.perf_counter() - began, 2)
    os.sync()
    paths = [directory.path(name) for name in sample]
    random.shuffle(paths)
    measured["stat_us"] = each_us(os.stat, paths)
    measured["read_us"] = each_us(read, paths)
    measured["absent_us"] = each_us(os.path.lexists, [directory.path(name) for name in new_names(len(sample))])
    began = time.perf_counter()
    if directory.count() != count:
        raise SystemExit("the directory does not hold what was created in it")
    measured["list_s"] = round(time.perf_counter() - began, 3)
    return measured


def run(root: str, files: int, sample: int) -> list[Measured]:
    """One row for each layout and fill grade."""
    rounds = []
    for number, grade in enumerate(GRADES):
        for layout in reversed(LAYOUTS) if number % 2 else LAYOUTS:
            directory = Directory(os.path.join(root, f"{layout}-{grade}"), fanned=layout == "fanned")
            names = new_names(min(sample, int(files * grade)))
            os.sync()
            rounds.append(({"layout": layout, **measure(directory, names, int(files * grade))}, directory, names))
    for row, directory, names in rounds:
        os.sync()
        row["unlink_us"] = each_us(os.unlink, [directory.path(name) for name in names])
    return [row for row, _, _ in rounds]


def table(rows: Sequence[Measured]) -> str:
    columns = list(rows[0])
    lines = [columns, *([f"{row[name]:,}" if name != "layout" else str(row[name]) for name in columns] for row in rows)]
    return "\n".join("".join(cell.rjust(12) for cell in line) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000, help="in the fullest directories (default: %(default)s)")
    parser.add_argument("--sample", type=int, default=1_000, help="calls of each sort (default: %(default)s)")
    parser.add_argument("--root", default=None, help="a directory on the file system to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.files * GRADES[0] < 1 or arguments.sample < 1:
        parser.error(f"--files must be at least {round(1 / GRADES[0])}, --sample at least 1")
    root = tempfile.mkdtemp(prefix="flat-directory-", dir=arguments.root)
    try:
        rows = run(root, arguments.files, arguments.sample)
        system = FileSystem().file_system_type(root)
    finally:
        shutil.rmtree(root)
    if arguments.json:
        json.dump({"file_system": system, "platform": sys.platform, "rounds": rows}, sys.stdout, indent=2)
        print()
    else:
        print(f"file system {system}\n{table(rows)}")


if __name__ == "__main__":
    main()
