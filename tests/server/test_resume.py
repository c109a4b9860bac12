"""An answer that a kill cut off goes on when the same is asked again."""

import signal
from pathlib import Path

import pytest

from blockstore import Store
from server.servers import Server, await_, user

pytestmark = [pytest.mark.mlx_lm, pytest.mark.slow]
ASKED = user("Tell me of the storm.")


def test_an_answer_goes_on_after_a_kill(model: Path, steady: Server, tmp_path: Path) -> None:
    # Token 1 would end it.
    wanted = {"max_tokens": 400, "seed": 7, "temperature": 0.7, "top_p": 0.9, "logit_bias": {"1": -100}}
    expected = steady.chat(ASKED, **wanted)
    assert expected.finish == "length"
    with Server(tmp_path / "store", model, "--checkpoint-every", "16") as server:
        parts = server.stream(ASKED, **wanted)
        given = next(parts)
        await_(lambda: server.metrics()["blockstore_checkpoints_total"] >= 1, lambda: server.log)
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        given += "".join(parts)
    assert len(given) < len(expected.text)
    assert expected.text.startswith(given)
    with Server(tmp_path / "store", model) as server:
        found = server.chat(ASKED, **wanted)
        numbers = server.metrics()
        assert server.stop() == 0, server.log
    assert (found.text, found.finish) == (expected.text, "length")
    assert numbers["blockstore_resumed_generations_total"] == 1
    assert numbers["blockstore_resumed_tokens_total"] > 16
    with Store(tmp_path / "store", create=False) as store:
        assert [entry.ns for entry in store.entries()] == [""]
