"""A store that fails under a server's hands costs prefills, and no request; the log says so, once."""

import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockstore import Store
from blockstore.serve import Settings, _Server
from blockstore.serve_signals import StopSignals
from rootless import bound_by_permissions
from server.servers import Server, await_, user

pytestmark = pytest.mark.slow
PROMPTS = [user(f"{name}, what does the light say tonight? " * 4) for name in ("Anna", "Boris", "Clara", "Dora")]


def all_is_written(server: Server) -> None:
    """mlx-lm answers before it lets go of the state."""
    await_(lambda: server.metrics()['blockstore_saves_total{outcome="stored"}'] >= 1)
    await_(lambda: server.metrics()["blockstore_pending_entries"] == 0)


def answers_go_on(server: Server, steady: Server) -> None:
    """Each twice: the second time what the first has left is wanted."""
    for prompt in PROMPTS[1:] * 2:
        assert server.chat(prompt).text == steady.chat(prompt).text
    await_(lambda: server.metrics()["blockstore_store_failures_total"] >= 1, lambda: server.log)


def stops_and_says_what_was_lost(server: Server) -> None:
    status = server.stop()
    assert status == ("not everything was stored: " in server.log), server.log
    assert "Traceback" not in server.log


def errors(log: str) -> list[str]:
    """What was logged as an error, without its time."""
    return re.findall(r" - ERROR - (.*)", log)


def test_a_store_that_is_deleted(model: Path, steady: Server, tmp_path: Path) -> None:
    with Server(tmp_path / "store", model, "--prompt-cache-size", "1") as server:
        server.chat(PROMPTS[0])
        all_is_written(server)
        shutil.rmtree(tmp_path / "store")
        answers_go_on(server, steady)
        found = server.metrics()
        assert found["blockstore_store_up"] == 0
        stops_and_says_what_was_lost(server)
    assert 1 <= len(errors(server.log)) < found["blockstore_store_failures_total"], "each kind is logged once"


def test_a_store_that_is_full(model: Path, steady: Server, tmp_path: Path) -> None:
    with Server(tmp_path / "store", model) as server:
        server.chat(PROMPTS[0])
        all_is_written(server)
        with Store(tmp_path / "store", create=False) as store:
            store.set_limits(max_bytes=4096)
        answers_go_on(server, steady)
        stops_and_says_what_was_lost(server)
    assert "not everything was stored: " in server.log
    assert server.log.count("a prompt cache was not written") == 1


def test_a_store_that_may_not_be_written_any_more(model: Path, steady: Server, tmp_path: Path) -> None:
    with Server(tmp_path / "store", model, prefix=bound_by_permissions()) as server:
        first = server.chat(PROMPTS[0])
        all_is_written(server)
        (tmp_path / "store" / "blocks").chmod(0o500)
        try:
            answers_go_on(server, steady)
        finally:
            (tmp_path / "store" / "blocks").chmod(0o700)
        assert server.chat(PROMPTS[0]).text == first.text
        # What could not be written then may be by now.
        stops_and_says_what_was_lost(server)
    assert server.log.count("a prompt cache was not written") == 1


def test_a_generation_thread_that_died(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that can answer nothing leaves it to others to start it again."""
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    with Store(tmp_path / "store") as store, StopSignals() as signals:
        settings = Settings(1, None, 1 << 20, supersede=True, checkpoint_every=0)
        server: Any = _Server(store, settings)
        listening, generator = SimpleNamespace(is_running=True), SimpleNamespace(_generation_thread=dead)
        server._wait(signals, listening, generator, lambda: "")
    assert server.status == 1
    assert "nothing is generated any more: stopping" in caplog.text


def test_an_empty_prompt_is_refused(model: Path, tmp_path: Path) -> None:
    """mlx-lm's generation thread would die of it."""
    with Server(tmp_path / "store", model) as server:
        for _ in range(2):
            connection = server.connect()
            body = json.dumps({"prompt": "", "max_tokens": 2})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                assert (answer.status, b"the prompt is empty" in answer.read()) == (404, True)
            connection.close()
        server.chat(user("one"))
        assert server.stop() == 0
