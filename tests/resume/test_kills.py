"""A server process is killed in the middle of an answer, with SIGKILL, and the next one goes on."""

import json
import random
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from models.processes import start_module
from resume.kit import checkpoints_in, uninterrupted
from resume.process import ARGS

pytestmark = [pytest.mark.mlx_lm, pytest.mark.slow]
TIMEOUT_S = 60


def run(*arguments: object, kill_at: int | None = None) -> dict[str, Any]:
    """Run a process to its end, or kill it when it says that it has so many tokens; what it said last."""
    with start_module("resume.process", *arguments, stdout=subprocess.PIPE) as process:
        late = threading.Timer(TIMEOUT_S, process.kill)
        late.start()
        try:
            for line in process.stdout or []:
                said: dict[str, Any] = json.loads(line)
                if said.get("count") == kill_at:
                    process.kill()
                    break
        finally:
            late.cancel()
    return said


def test_a_killed_server_goes_on(tmp_path: Path) -> None:
    expected, root = uninterrupted(tmp_path / "none", ARGS), tmp_path / "store"
    first, second = sorted(random.sample(range(60, 190), 2))
    assert run(root, first, "stored", kill_at=first) == {"count": first}
    assert run(root, second, kill_at=second) == {"count": second}
    last = run(root)
    assert (last["tokens"], last["text"]) == (expected.tokens, expected.text)
    assert 7 < last["resumed"] <= second
    assert checkpoints_in(root) == []
