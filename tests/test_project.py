"""What a user installs: the wheel holds both packages, their types and the format document, and nothing else."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"blockstore", "kvcodecs", f"mlx_blockstore-{PROJECT['version']}.dist-info"}


def test_the_wheel_holds_every_source_file(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for folder, package in ((ROOT, "blockstore"), (ROOT / "codecs", "kvcodecs")):
        for path in (folder / package).rglob("*.py"):
            assert path.relative_to(folder).as_posix() in names


@pytest.mark.parametrize("name", ["blockstore/FORMAT.md", "blockstore/py.typed", "kvcodecs/py.typed"])
def test_the_wheel_holds_what_is_not_code(wheel: zipfile.ZipFile, name: str) -> None:
    assert name in wheel.namelist()


def test_the_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    info = f"mlx_blockstore-{PROJECT['version']}.dist-info"
    assert "blockstore = blockstore.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert b"The blockstore developers" in wheel.read(f"{info}/licenses/LICENSE")


def test_the_changelog_names_this_version() -> None:
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
