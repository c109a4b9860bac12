"""Other processes, which import what this one imports."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_SOURCES: Final = (_ROOT, _ROOT / "codecs", _ROOT / "tests")


def start_module(name: str, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    """Start `python -m NAME ARGUMENTS…`; options as for Popen."""
    command = [sys.executable, "-m", name, *map(str, arguments)]
    return subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": _python_path()}, **options)


def run_module(name: str, folder: Path, *, timeout_s: float) -> None:
    """Run `python -m NAME FOLDER` to its end. Raises where that is not a success."""
    command = [sys.executable, "-m", name, str(folder)]
    subprocess.run(command, check=True, timeout=timeout_s, env={**os.environ, "PYTHONPATH": _python_path()})


def _python_path() -> str:
    return os.pathsep.join([*map(str, _SOURCES), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
