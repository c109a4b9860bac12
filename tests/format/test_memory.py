"""Hostile headers in a process that may not grow by more than 512 MiB."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "memory_limit.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="address space is limited and measured on Linux only")
def test_hostile_headers_fit_into_512_mib() -> None:
    root = SCRIPT.parents[2]
    path = os.pathsep.join(map(str, [root, root / "codecs", root / "tests"]))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
