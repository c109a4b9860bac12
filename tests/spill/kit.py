"""What the tests of the write-behind queue share: items that can be seen to die, and work that waits to be told."""

import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

PATIENCE_S = 30.0


class Pinned:
    """An item. What it stands for is released when nobody refers to it any more."""

    def __init__(self, name: str) -> None:
        self.name = name


class Desk:
    """Work that is done when the test says so: `started` has the items' names, in the order in which work began."""

    def __init__(self) -> None:
        self.started: SimpleQueue[str] = SimpleQueue()
        self.most_at_once = 0
        self._verdicts: SimpleQueue[BaseException | None] = SimpleQueue()
        self._at_once = 0
        self._lock = threading.Lock()

    def work(self, item: Pinned) -> str:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        self.started.put(item.name)
        try:
            error = self._verdicts.get(timeout=PATIENCE_S)
        finally:
            with self._lock:
                self._at_once -= 1
        if error is not None:
            raise error
        return item.name.upper()

    def finish(self, error: BaseException | None = None) -> None:
        """Let the item in flight, or the next one, be done; or let its work fail."""
        self._verdicts.put(error)

    def await_start(self) -> str:
        return self.started.get(timeout=PATIENCE_S)

    def is_idle(self) -> bool:
        try:
            self.started.get(timeout=0.01)
        except Empty:
            return True
        return False


def becomes(condition: Callable[[], bool]) -> bool:
    """Whether it comes true, sooner or later."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def is_dead(reference: "weakref.ref[object]") -> bool:
    return reference() is None
