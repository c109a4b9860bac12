"""What works without MLX, and what is said where MLX has no backend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcodecs

CODECS = Path(kvcodecs.__file__).resolve().parent.parent
FAILURES = {
    "no backend": "raise ImportError('libmlx.so: cannot open shared object file: No such file or directory')",
    "not installed": "raise ModuleNotFoundError(\"No module named 'mlx'\", name='mlx')",
}


def run(code: str, fake: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` where `import mlx.core` finds what stands in `fake`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(fake), str(CODECS)])}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def fake_mlx(folder: Path, core: str) -> Path:
    (folder / "mlx").mkdir()
    (folder / "mlx" / "__init__.py").write_text("")
    (folder / "mlx" / "core.py").write_text(core)
    return folder


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("code", ["import kvcodecs.algebra", "import kvcodecs.kv", "from kvcodecs import KVCache"])
def test_a_missing_backend_is_named_with_the_command_that_mends_it(code: str, failure: str, tmp_path: Path) -> None:
    done = run(code, fake_mlx(tmp_path, failure))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvcodecs.backend.MissingBackend: MLX has no backend here")
    assert 'pip install "mlx-blockstore[cpu]"' in last
    assert 'pip install "mlx-blockstore[cuda13]"' in last


def test_it_can_be_caught_by_name(tmp_path: Path) -> None:
    code = "import kvcodecs\ntry: kvcodecs.KVCache\nexcept kvcodecs.MissingBackend as error: print(error.__cause__)"
    done = run(code, fake_mlx(tmp_path, FAILURES["no backend"]))
    assert done.stdout == "libmlx.so: cannot open shared object file: No such file or directory\n"


def test_other_failures_of_the_import_stay_what_they_are(tmp_path: Path) -> None:
    done = run("import kvcodecs.algebra", fake_mlx(tmp_path, "raise ImportError('symbol not found: _flat_namespace')"))
    assert done.stderr.splitlines()[-1] == "ImportError: symbol not found: _flat_namespace"


def test_entries_and_geometry_need_no_mlx(tmp_path: Path) -> None:
    code = (
        "import sys, kvcodecs, kvcodecs.entry, kvcodecs.geometry;"
        "kvcodecs.HeaderEntry, kvcodecs.BadEntry, kvcodecs.MissingBackend, dir(kvcodecs);"
        "print([name for name in sys.modules if name.split('.')[0] == 'mlx'])"
    )
    assert run(code, fake_mlx(tmp_path, FAILURES["no backend"])).stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    assert {name for name in kvcodecs.__all__ if getattr(kvcodecs, name) is None} == set()
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchCache'"):
        kvcodecs.NoSuchCache  # noqa: B018  # looking it up is the test
