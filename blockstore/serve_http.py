"""The HTTP side of `blockstore serve`: mlx_lm.server's requests, a count of those under way, and /metrics."""

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self, cast

from mlx_lm.server import APIHandler, get_system_fingerprint

from .serve_metrics import CONTENT_TYPE

_log: Final = logging.getLogger(__name__)
# What a refused request may still send: closing a connection with unread bytes would take our answer away.
_UNREAD_LIMIT_BYTES: Final = 1 << 20
_UNREAD_LIMIT_S: Final = 1.0
_RETRY_AFTER_S: Final = 5


class Requests:
    """The generations that are asked for and not yet answered. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def one_more(self) -> Iterator[bool]:
        """Count a request for as long as the block runs; False, and not counted, once closed."""
        with self._changed:
            taken = not self._closed
            self._count += taken
        try:
            yield taken
        finally:
            with self._changed:
                self._count -= taken
                self._changed.notify_all()

    def close(self) -> None:
        """Take none any more."""
        with self._changed:
            self._closed = True

    def wait(self, timeout: float) -> int:
        """Wait until none is under way; how many are after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count, max(timeout, 0))
            return self._count


class Handler(APIHandler):  # type: ignore[misc]  # mlx_lm has no types
    """One connection to a Listener."""

    def do_POST(self) -> None:  # noqa: N802  # the base class calls it so
        with self._listener.requests.one_more() as taken:
            if taken:
                super().do_POST()
            else:
                self._refuse()

    def do_GET(self) -> None:  # noqa: N802  # as above
        if self._wants_metrics():
            self._send(200, CONTENT_TYPE, self._listener.metrics())
        else:
            super().do_GET()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if not self._wants_metrics():  # every few seconds, for ever
            super().log_request(code, size)

    @property
    def _listener(self) -> "Listener":
        return cast(Listener, self.server)

    def _wants_metrics(self) -> bool:
        return bool(self.command == "GET" and self.path.partition("?")[0] == "/metrics")

    def _refuse(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.connection.settimeout(_UNREAD_LIMIT_S)
            self.rfile.read(min(int(self.headers.get("Content-Length") or 0), _UNREAD_LIMIT_BYTES))
        body = json.dumps({"error": "the server is stopping"})
        self._send(503, "application/json", body, **{"Retry-After": str(_RETRY_AFTER_S)})

    def _send(self, status: int, content_type: str, body: str, **headers: str) -> None:
        data = body.encode()
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class Listener(ThreadingHTTPServer):
    """A listening socket, and once started a thread for each connection. Raises OSError where it cannot listen.

    metrics: called for the text of /metrics, on any thread.
    """

    daemon_threads = True  # a client that reads nothing must not keep the process

    def __init__(self, host: str, port: int, requests: Requests, metrics: Callable[[], str]) -> None:
        self.requests = requests
        self.metrics = metrics
        self._fingerprint = get_system_fingerprint()
        self._generator: Any = None
        self._thread = threading.Thread(target=self.serve_forever, name="blockstore-http", daemon=True)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        try:
            super().__init__((str(address[0]), int(address[1])), Handler)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error

    def start(self, generator: Any) -> None:
        """Answer what comes, from now on, with what `generator` (a ResponseGenerator) makes."""
        self._generator = generator
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Refuse what comes, and close the socket. Requests under way go on. Waits half a second at most."""
        self.requests.close()
        if self.is_running:
            self.shutdown()
        self.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def finish_request(self, request: Any, client_address: Any) -> None:
        Handler(self._generator, request, client_address, self, system_fingerprint=self._fingerprint)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if self.requests.closed or isinstance(error, ConnectionError):
            _log.info("the connection to %s ended before its answer: %s", client_address, error)
        else:
            super().handle_error(request, client_address)


def seconds_until(end: float) -> float:
    """From now to a time of time.monotonic(); 0 if that has passed."""
    return max(end - time.monotonic(), 0)
