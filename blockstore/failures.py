"""What goes wrong behind a server's requests, which go on: counted, and said once."""

import logging
import threading
from typing import Final

_LOG: Final = logging.getLogger("blockstore")


class Failures:
    """Counts what went wrong, from any thread, and logs the first of each kind: it may come back with every request."""

    def __init__(self) -> None:
        self.count = 0
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def say(self, what: str, error: BaseException | None = None) -> None:
        kind = f"{what} {type(error).__name__}"
        with self._lock:
            self.count += 1
            is_new = kind not in self._said
            self._said.add(kind)
        if is_new:
            # As text: a handler that keeps the error would keep all frames, and with them the caches.
            found = "" if error is None else f"{type(error).__name__}: {error}"
            _LOG.error("%s; requests go on. Further ones are not logged. %s", what, found)
