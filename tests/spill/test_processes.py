"""A queue in a process that forks, or that ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spill.kit import PATIENCE_S

HERE = Path(__file__).parent


def run(part: str, folder: Path) -> str:
    """What a process says; one of its own, since forking one that has used mlx leaves mlx unusable."""
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / "process_roles.py"), part, str(folder)]
    done = subprocess.run(
        command,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_forked_child_has_a_queue_of_its_own_and_leaves_its_parents_alone(tmp_path: Path) -> None:
    assert run("child", tmp_path) == "whole\n"


@pytest.mark.slow
def test_forks_in_the_middle_of_other_threads_calls_hang_nobody(tmp_path: Path) -> None:
    assert run("storm", tmp_path) == "whole\n"


def test_a_child_that_work_forks_does_nothing_of_its_parents(tmp_path: Path) -> None:
    assert run("work", tmp_path) == "whole\n"


def test_a_process_may_end_while_items_are_pending(tmp_path: Path) -> None:
    assert run("leave", tmp_path) == "whole\n"
