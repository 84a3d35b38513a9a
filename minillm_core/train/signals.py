"""Ctrl-C and its like: the first one asks the run to end, the second ends it at once.

Where there is nothing to finish, before the loop and after it, the first one is enough.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from types import FrameType

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Ctrl-C, a scheduler's notice, a terminal that was closed."""


MASHED = 1.0
"""Seconds after one that ended the run in which others are the same hand on the key."""


@dataclass(eq=False)
class StopRequest:
    """A request to end the run: whether there is one, and by which signal."""

    _: KW_ONLY
    patient: bool = True  # the first signal asks; else it ends
    clock: Callable[[], float] = time.monotonic
    signal: signal.Signals | None = None
    hurried: bool = False  # a second one came: nothing is waited for any more
    _ended: float | None = None

    @property
    def requested(self) -> bool:
        """A signal has arrived."""
        return self.signal is not None

    def receive(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal.

        Raises:
            KeyboardInterrupt: it is the second signal, or there is nothing to finish.
        """
        now, first = self.clock(), self.signal is None
        if first:
            self.signal = signal.Signals(number)
            if self.patient:
                return
        if self._ended is not None and now - self._ended < MASHED:
            return  # another one would only disturb the end that is on its way
        self._ended, self.hurried = now, not first
        raise KeyboardInterrupt


@contextmanager
def stop_on_signals(
    *, patient: bool = True, request: StopRequest | None = None
) -> Iterator[StopRequest]:
    """Listen for signals inside the block; as it was before, after it.

    Args:
        patient: the first signal asks; else it ends, until the request is made patient.
        request: takes the signals; None: a new one.

    Outside the main thread Python delivers no signals, and nothing is installed. A signal that the
    process was started with the order to ignore (``nohup``) stays ignored.
    """
    request = StopRequest(patient=patient) if request is None else request
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {}
    for number in SIGNALS:
        handler = signal.getsignal(number)
        # None: a handler that C code installed, which could not be put back
        if handler is not None and handler != signal.SIG_IGN:
            before[number] = handler
            signal.signal(number, request.receive)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
