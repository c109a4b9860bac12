"""Being told to stop: the first signal is noted, a second one ends the process as if nobody had asked for it."""

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Final, Self

_STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Notes the first of SIGTERM, SIGINT and SIGHUP, from entering on; one that the process ignores stays ignored.

    After the first one they all have their default effect, also when the context is left. Main thread only.
    """

    def __init__(self) -> None:
        self._noted, self._woken = os.pipe()
        os.set_blocking(self._woken, False)

    def __enter__(self) -> Self:
        # The descriptor is written to on whatever thread the signal interrupts; a handler in Python would have to wait
        # for the main thread, which waits in the kernel.
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in self._caught():
            signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()
        signal.set_wakeup_fd(-1)
        os.close(self._noted)
        os.close(self._woken)

    def wait(self, timeout: float) -> str | None:
        """The name of the signal that came, or None after `timeout` seconds without one."""
        if not select.select([self._noted], [], [], timeout)[0]:
            return None
        stops = [number for number in os.read(self._noted, 64) if number in _STOPS]
        return signal.Signals(stops[0]).name if stops else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._let_go()

    def _let_go(self) -> None:
        for number in self._caught():
            signal.signal(number, signal.SIG_DFL)

    def _caught(self) -> list[signal.Signals]:
        return [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
