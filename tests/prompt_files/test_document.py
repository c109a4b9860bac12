"""docs/prompt-cache-files.md: its example runs, and a second turn writes what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

from blockstore import Store

pytestmark = pytest.mark.mlx_lm
TEXT = (Path(__file__).parents[2] / "docs" / "prompt-cache-files.md").read_text(encoding="utf-8")
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, float32


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLOCKSTORE_ROOT", str(tmp_path / "store"))
    (example,) = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(example, "prompt-cache-files.md", "exec"), names)
    assert names["metadata"] == {"model": "org/model"}
    assert (tmp_path / "chat.safetensors").stat().st_size < 1000
    with Store(tmp_path / "store") as store:
        assert [entry.token_count for entry in store.entries()] == [310, 300]
        assert [entry.pinned for entry in store.entries()] == [True, False]
    blocks = sum(path.stat().st_size for path in (tmp_path / "store" / "blocks").iterdir())
    assert blocks < (310 + 64) * TOKEN_BYTES
