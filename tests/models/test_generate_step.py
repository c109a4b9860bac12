"""mlx-lm's own generation loop over restored caches: the same tokens and log-probabilities as from memory."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from blockstore import Identity, Store
from models.conversation import questions, system_prompt
from models.families import FAMILIES, Family

pytestmark = pytest.mark.mlx_lm
NEW_TOKENS = 12
CHUNK_TOKENS = 64


def generate(family: Family, model: Any, prompt: list[int], caches: list[Any]) -> tuple[list[int], mx.array]:
    """New tokens and their log-probabilities. Afterwards `caches` encode the prompt and all of the new tokens."""
    steps = generate_step(
        mx.array(prompt), model, prompt_cache=caches, max_tokens=NEW_TOKENS, prefill_step_size=CHUNK_TOKENS,
        kv_bits=family.kv_bits, quantized_kv_start=0,
    )  # fmt: skip
    tokens, probabilities = zip(*steps, strict=True)
    return list(tokens), mx.stack(probabilities)


@pytest.mark.parametrize("name", ["llama", "llama, quantized KV", "gemma3_text, windows full", "qwen3_next"])
def test_generation_goes_on(tmp_path: Path, name: str) -> None:
    family, identity = FAMILIES[name], Identity(name, None, None)
    model = family.build()
    prompt = [token for chunk in system_prompt(family) for token in chunk]
    question, _ = questions(family)
    caches = family.make_caches(model)
    answer, _ = generate(family, model, prompt, caches)
    with Store(tmp_path, durability="none") as store:
        store.save([*prompt, *answer], caches, identity)
        loaded = store.restore([*prompt, *answer, *question], identity, model)
    assert loaded is not None
    assert loaded.tokens == [*prompt, *answer]
    tokens, probabilities = generate(family, model, question, caches)
    again, equal = generate(family, model, question, loaded.caches)
    assert tokens == again
    assert mx.array_equal(probabilities.view(mx.uint8), equal.view(mx.uint8))
