"""What a server had read is there after a restart, however it ended."""

import signal
from pathlib import Path

import pytest

from blockstore import Store
from server.servers import Answer, Server, assistant, await_, user

pytestmark = [pytest.mark.mlx_lm, pytest.mark.slow]
RULES = {"role": "system", "content": "You are a lighthouse keeper. Answer in one sentence. " * 8}
FIRST, SECOND = user("Which ships passed today?"), user("And which of them had a cook on board?")


def test_a_conversation_goes_on_after_a_stop(model: Path, steady: Server, tmp_path: Path) -> None:
    with Server(tmp_path / "store", model) as server:
        said = server.chat(RULES, FIRST)
        assert said.cached == 0
        assert server.stop() == 0, server.log
    assert said.text == steady.chat(RULES, FIRST).text
    with Server(tmp_path / "store", model) as server:
        found = server.chat(RULES, FIRST, assistant(said.text), SECOND)
        # All that is old, but perhaps for the last token that was said, which the model need not have read.
        assert said.prompt + len(said.text) - 1 <= found.cached <= said.prompt + len(said.text)
        assert found.text == steady.chat(RULES, FIRST, assistant(said.text), SECOND).text
        assert f"restored {found.cached} tokens" in server.log
        assert server.metrics()['blockstore_prompt_cache_hits_total{source="store"}'] == 1


def test_a_killed_server_loses_what_was_not_committed_and_no_more(model: Path, steady: Server, tmp_path: Path) -> None:
    with Server(tmp_path / "store", model) as server:
        said = server.chat(RULES, FIRST)
        await_(lambda: server.metrics()["blockstore_store_entries"] >= 1, lambda: server.log)
        for _ in server.stream(RULES, user("Count the waves."), max_tokens=100):
            break  # and while it goes on answering:
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    with Server(tmp_path / "store", model) as server:
        # The same prompt, from the store and from memory: something is always left to compute.
        again = [server.chat(RULES, FIRST) for _ in range(2)]
        assert again == [Answer(said.text, said.prompt - 1, said.prompt, said.finish)] * 2
        found = server.chat(RULES, FIRST, assistant(said.text), SECOND)
        assert found.text == steady.chat(RULES, FIRST, assistant(said.text), SECOND).text
        assert server.stop() == 0, server.log
    with Store(tmp_path / "store", create=False) as store:
        store.gc(full=True)
        assert store.stats().unfinished_saves == 0
