"""`blockstore gc` on an empty store, the whole process, beside an empty typer command that imports lmdb and msgspec.

    python tools/bench/command/run.py --json

All run as `python -m` with compiled bytecode, in turns. The empty command has the same options as ours, which keep
typer from importing rich; one with typer's own defaults runs beside it.
"""

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from typing import Final

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import blockstore
import kvcodecs.entry
from tools.bench.kit import Bench, Contender, Row, at_most, main, new_store, noted

EMPTY: Final = """
import lmdb
import msgspec
import typer

app = typer.Typer(OPTIONS)


@app.command()
def gc() -> None:
    pass


if __name__ == "__main__":
    app()
"""


LEAN: Final = "add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False"


def environment(*folders: str) -> dict[str, str]:
    """This process's, with bytecode and with these folders to import from."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**found, "PYTHONPATH": os.pathsep.join(folders)}


def runs(arguments: Sequence[str], folders: Sequence[str]) -> Contender:
    def contender(_: str) -> Generator[None]:
        command, variables = [sys.executable, "-m", *arguments], environment(*folders)
        yield
        subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)
        yield

    return contender


def sources(*files: str | None) -> list[str]:
    """The folders from which packages were imported, by their first files."""
    return [os.path.dirname(os.path.dirname(file)) for file in files if file is not None]


def measure(bench: Bench) -> list[Row]:
    folder = bench.new_folder()
    with new_store(folder) as store:
        root = store.root
    for name, options in (("lean_command", LEAN), ("plain_command", "")):
        with open(os.path.join(folder, f"{name}.py"), "w", encoding="utf-8") as file:
            file.write(EMPTY.replace("OPTIONS", options))
    own = sources(blockstore.__file__, kvcodecs.entry.__file__)
    contenders = {
        "blockstore_gc": runs(["blockstore", "--root", root, "gc"], own),
        "lean": runs(["lean_command"], [folder]),
        "plain": runs(["plain_command"], [folder]),
    }
    bench.medians(contenders, 1)  # compiles
    bench.settle()
    seconds = Bench(folder, quick=True).medians(contenders, bench.size(41, 3))  # nothing is written: no need to sync
    what, ours = "blockstore gc on an empty store, the whole process", seconds["blockstore_gc"]
    return [
        at_most(f"{what}: × an empty typer command", 1.3, ours / seconds["lean"], **seconds),
        noted(f"{what}: × one with typer's defaults", ours / seconds["plain"]),
    ]


if __name__ == "__main__":
    main("command", __doc__, measure)
