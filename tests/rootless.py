"""Processes that permission bits bind, whoever runs the tests."""

import os
import shutil
import subprocess

import pytest

ROOTLESS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")  # root, but for passing by permission bits


def bound_by_permissions() -> list[str]:
    """What a command must begin with so that permission bits bind it; skips where nothing does."""
    if os.geteuid() != 0:
        return []
    if shutil.which(ROOTLESS[0]) is None or subprocess.run([*ROOTLESS, "true"], check=False).returncode:
        pytest.skip("permission bits do not bind root, and setpriv is not there to change that")
    return list(ROOTLESS)
