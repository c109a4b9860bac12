"""Real servers in processes of their own, on loopback, and what clients ask of them. Nothing waits without a limit."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = (ROOT, ROOT / "codecs", ROOT / "tests")
LIMIT_S: Final = 30.0
COMMAND: Final = ("-m", "blockstore", "serve")


@dataclass(frozen=True)
class Answer:
    """What a server said; cached: prompt tokens that it had not to compute."""

    text: str
    cached: int
    prompt: int
    finish: str


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def body_of(messages: list[dict[str, str]], max_tokens: int, **more: Any) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}).encode()


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "BLOCKSTORE_ROOT"}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "PYTHONUNBUFFERED": "1"}


class Server:
    """`blockstore serve`, ready when it is entered; it is killed in the end if it is still there."""

    def __init__(self, root: Path, model: Path, *options: str, prefix: Sequence[str] = ()) -> None:
        number = sum(1 for _ in root.parent.glob(f"{root.name}-*.log"))
        self.log_path = root.parent / f"{root.name}-{number}.log"
        line = [*prefix, sys.executable, *COMMAND, "--root", str(root), "--model", str(model), "--port", "0", *options]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=log, env=environment())
        self.port = 0

    def __enter__(self) -> Self:
        try:
            self.port = int(self.wait_for(r"serves at http://127\.0\.0\.1:(\d+)")[1])
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the log has it. Fails where the process ends before."""
        found = await_(lambda: re.search(pattern, self.log) or self.process.poll() is not None, lambda: self.log)
        found = re.search(pattern, self.log) if found is True else found
        assert found, f"the server ended with {self.process.returncode}:\n{self.log}"
        return found

    # ---- requests

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)

    def post(self, body: bytes) -> tuple[int, dict[str, str], Any]:
        connection = self.connect()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), json.loads(answer.read())

    def get(self, path: str) -> tuple[int, dict[str, str], str]:
        connection = self.connect()
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()

    def chat(self, *messages: dict[str, str], max_tokens: int = 12, **more: Any) -> Answer:
        status, _, found = self.post(body_of(list(messages), max_tokens, **more))
        assert status == 200, (found, self.log)
        usage, choice = found["usage"], found["choices"][0]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(choice["message"]["content"], cached, usage["prompt_tokens"], choice["finish_reason"])

    def stream(self, *messages: dict[str, str], max_tokens: int, **more: Any) -> Iterator[str]:
        """The parts of an answer as they come; the last one is "[DONE]" where the server said so."""
        connection = self.connect()
        body = body_of(list(messages), max_tokens, stream=True, **more)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        try:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    yield data
                elif data.startswith("{"):
                    yield json.loads(data)["choices"][0]["delta"].get("content", "")
        except (ConnectionError, http.client.HTTPException):
            return  # the server ended it; the caller sees that nothing says so

    def metrics(self) -> dict[str, float]:
        status, _, text = self.get("/metrics")
        assert status == 200
        return values_of(text)

    # ---- the end

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = LIMIT_S) -> int:
        """The exit status; negative for a signal."""
        return self.process.wait(timeout)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.send(number)
        return self.wait()


def values_of(exposition: str) -> dict[str, float]:
    lines = [line for line in exposition.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def await_(condition: Callable[[], Any], why: Callable[[], str] = lambda: "") -> Any:
    """Wait until it is true, and return what it was."""
    end = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end, f"nothing happened for {LIMIT_S:g} s\n{why()}"
        time.sleep(0.02)
    return found
