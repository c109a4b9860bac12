"""The documents tell the truth: every Python block of the README runs, and every link leads somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMED = ["README.md", "CHANGELOG.md", "blockstore/FORMAT.md"]
DOCUMENTS = [*(ROOT / name for name in NAMED), *sorted(ROOT.glob("docs/**/*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    broken = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert broken == []


def small_model(folder: Path) -> Any:
    """A llama with random weights, and the files that identify it."""
    import json

    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama

    config = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 64,
    }  # fmt: skip
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return model


@pytest.mark.mlx_lm
def test_readme_runs_and_the_second_run_reuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_path = tmp_path / "model"
    model_path.mkdir()
    names: dict[str, Any] = {
        "model": small_model(model_path), "model_path": model_path, "prompt": [5, 9, 2, 44, 17] * 20
    }  # fmt: skip
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["loaded"] is None
    exec(compile(blocks[1], "README.md", "exec"), names)
    assert names["loaded"].token_count == len(names["prompt"]) - 1
