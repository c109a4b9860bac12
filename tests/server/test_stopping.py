"""A server that is told to stop finishes what it has begun, writes what is pending, and is gone within its grace."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockstore import Store
from blockstore.serve_signals import StopSignals
from server.servers import Server, body_of, user

pytestmark = [pytest.mark.mlx_lm, pytest.mark.slow]
ENDLESS = 1_000_000
QUESTION = user("What do you see from up there? " * 6)


def entries(root: Path) -> int:
    with Store(root, create=False) as store:
        return len(store.entries())


def test_an_interruption_stops_it_too(model: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "store", model) as server:
        server.chat(QUESTION)
        assert server.stop(signal.SIGINT) == 0, server.log
        assert "SIGINT: stopping" in server.log
        assert "dropped 0, failed 0; reused" in server.log
    assert entries(tmp_path / "store") == 1


def test_an_answer_under_way_is_finished_and_new_requests_are_refused(
    model: Path, steady: Server, tmp_path: Path
) -> None:
    with Server(tmp_path / "store", model) as server, socket.create_connection(("127.0.0.1", server.port)) as early:
        parts = server.stream(QUESTION, max_tokens=300)
        text = next(parts)
        server.send(signal.SIGTERM)
        server.wait_for("SIGTERM: stopping; 1 request under way")
        body = body_of([QUESTION], 1)
        early.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        refused = b"".join(iter(lambda: early.recv(1 << 16), b"")).decode()
        *rest, done = parts
        assert server.wait() == 0, server.log
    assert done == "[DONE]"
    assert text + "".join(rest) == steady.chat(QUESTION, max_tokens=300).text
    head, _, answer = refused.partition("\r\n\r\n")
    assert head.split("\r\n")[0].split()[1] == "503"
    assert "Retry-After: 5" in head
    assert json.loads(answer) == {"error": "the server is stopping"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    assert entries(tmp_path / "store") == 1


# With a seed a request is served by itself, and mlx-lm's thread stops for nothing before its end.
@pytest.mark.parametrize("more", [{}, {"seed": 7}], ids=["in a batch", "alone"])
def test_an_answer_without_end_is_cut_off_when_the_grace_is_over(
    model: Path, tmp_path: Path, more: dict[str, int]
) -> None:
    with Server(tmp_path / "store", model, "--grace", "1") as server:
        server.chat(user("How deep is the sea?"))
        parts = server.stream(QUESTION, max_tokens=ENDLESS, **more)
        next(parts)
        began = time.monotonic()
        assert server.stop() == 0, server.log
        assert 0.5 < time.monotonic() - began < 10
        assert "1 request cut off" in server.log
        assert "[DONE]" not in list(parts)
        assert "Traceback" not in server.log
    assert entries(tmp_path / "store") >= 1


def test_clients_that_say_nothing_keep_no_server(model: Path, tmp_path: Path) -> None:
    """One has connected only; one has promised a body."""
    with Server(tmp_path / "store", model, "--grace", "1") as server:
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address), socket.create_connection(address) as half:
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
            while server.metrics()["blockstore_requests_in_flight"] < 1:
                time.sleep(0.02)
            assert server.stop() == 0, server.log


def test_a_second_signal_ends_it_at_once(model: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "store", model, "--grace", "600") as server:
        parts = server.stream(QUESTION, max_tokens=ENDLESS)
        next(parts)
        server.send(signal.SIGTERM)
        server.wait_for("SIGTERM: stopping")
        assert server.stop(signal.SIGINT) == -signal.SIGINT
    Store(tmp_path / "store", create=False).close()


@pytest.fixture
def handlers() -> Iterator[list[signal.Signals]]:
    """Signals whose handlers are put back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield list(kept)
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_each_signal_is_noted_once(handlers: list[signal.Signals]) -> None:
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
        with StopSignals() as signals:
            assert signals.wait(0) is None
            os.kill(os.getpid(), number)
            assert signals.wait(5) == number.name
            assert [signal.getsignal(other) for other in handlers] == [signal.SIG_DFL] * 3, "a second one ends it"
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_that_is_ignored_stays_so(handlers: list[signal.Signals]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.wait(0.05) is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
