"""The first token of an answer after a server was restarted: with a store, beside mlx-lm's own server.

    python tools/bench/restart/run.py --json

Both are new processes; the prompt was answered before by one that had the same store. Timed is a streaming request,
until its first text comes. Before it each server answers a short one, so that its model is loaded. Random weights.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, Self

# The repository stands last: an installed blockstore comes first.
sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

import blockstore
import kvcodecs
from tools.bench.kit import Bench, Contender, Row, at_least, main, noted, require
from tools.bench.small_model import write_model

_LIMIT_S: Final = 60.0
_PROMPT: Final = "The keeper of the light wrote down the hour, the wind, and every ship that passed. "


class Server:
    """A server in a process of its own, listening once it is entered; told to stop, and waited for, when it is left."""

    def __init__(self, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        sources = [os.path.dirname(os.path.dirname(str(package.__file__))) for package in (blockstore, kvcodecs)]
        paths = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments, "--port", str(self._port), "--log-level", "ERROR"],
            env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> Self:
        end = time.monotonic() + _LIMIT_S
        while not self._listens():
            require(self._process.poll() is None and time.monotonic() < end, "a server does not start")
            time.sleep(0.05)
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True

    def stream(self, prompt: str) -> Generator[str]:
        """The answer, token by token."""
        body = {"prompt": prompt, "stream": True, "max_tokens": 4, "temperature": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_LIMIT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                if text := found["choices"][0]["text"]:
                    yield text

    def ask(self, prompt: str) -> str:
        return "".join(self.stream(prompt))


def restarted(command: tuple[str, ...], model: str, prompt: str, answers: set[str], *, has_store: bool) -> Contender:
    def contender(folder: str) -> Generator[None]:
        own = (*command, "--model", model, *(["--root", os.path.join(folder, "store")] if has_store else []))
        if has_store:  # without one nothing would be left of what is read here
            with Server(*own) as server:
                server.ask(prompt)
        with Server(*own) as server:
            server.ask("Hello")
            yield
            parts = server.stream(prompt)
            first = next(parts)
            yield
            answers.add(first + "".join(parts))
            require(len(answers) == 1, "the answers differ")

    return contender


def measure(bench: Bench) -> list[Row]:
    layers, hidden, count = bench.size(4, 2), bench.size(256, 64), bench.size(1024, 256)
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    model = str(write_model(Path(bench.new_folder(), "model"), **shape))
    prompt = (_PROMPT * (count // len(_PROMPT) + 1))[:count]
    answers: set[str] = set()
    seconds = bench.medians(
        {
            "store": restarted(("blockstore", "serve"), model, prompt, answers, has_store=True),
            "mlx_lm": restarted(("mlx_lm", "server"), model, prompt, answers, has_store=False),
        },
        bench.rounds(3),
    )
    what = f"first token after a restart, {count} tokens of prompt"
    return [
        at_least(f"{what}: × mlx_lm.server", 20, seconds["mlx_lm"] / seconds["store"]),
        noted(f"{what}, with the store", seconds["store"] * 1000, "ms"),
        noted(f"{what}, mlx_lm.server", seconds["mlx_lm"] * 1000, "ms"),
    ]


if __name__ == "__main__":
    main("restart", __doc__, measure)
