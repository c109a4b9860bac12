"""Every benchmark that has a target, one after the other, and one table of them at the end.

    python tools/bench/all.py --json

Needs 25 GB of disk. Files are emptied after each benchmark, which gives back their space, and deleted when the last one
is done: a file system may be slow for minutes after deletions.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any, Final

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..")))

from tools.bench.kit import Row, table

NAMES: Final = (
    "command",
    "find",
    "cold_save",
    "growth",
    "restore",
    "partial_load",
    "long_entry",
    "memory",
    "first_step",
    "agents_day",
    "processes",
    "restart",
    "collect",  # last: it deletes
)


def report(name: str, root: str, *, quick: bool) -> dict[str, Any]:
    """What a benchmark prints as JSON. Raises CalledProcessError where it does not work."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), name, "run.py")
    command = [sys.executable, script, "--json", "--keep", "--root", root, *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def reports(root: str | None, *, quick: bool) -> list[dict[str, Any]]:
    folder = tempfile.mkdtemp(prefix="bench-", dir=root)
    try:
        found = []
        for name in NAMES:
            print(f"== {name}", file=sys.stderr)
            found.append(report(name, folder, quick=quick))
        return found
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: to see that the scripts work")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--root", default=None, metavar="DIR", help="a directory on the file system to measure")
    arguments = parser.parse_args()
    found = reports(arguments.root, quick=arguments.quick)
    if arguments.json:
        json.dump(found, sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        print(table([Row(**row) for one in found for row in one["rows"]]))
        print(", ".join(f"{name} {value}" for name, value in found[0]["machine"].items()))


if __name__ == "__main__":
    main()
