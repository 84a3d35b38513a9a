"""Signals such as Ctrl-C: the first one asks the run to end, the second ends it at once.

Before and after the loop, if there is nothing to finish, the first one ends it at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from types import FrameType

from minillm_core.plugins.attribution import SIGNALS

MASHED = 1.0
"""Seconds after the signal that ended the run in which further ones count as the same key press."""


@dataclass(eq=False)
class StopRequest:
    """A request to end the run, and the signal that made it."""

    _: KW_ONLY
    patient: bool = True  # the first signal is a request; else it ends the run
    clock: Callable[[], float] = time.monotonic
    signal: signal.Signals | None = None
    hurried: bool = False  # a second one arrived: stop waiting for anything
    _ended: float | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
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
            return  # another one would only disturb the shutdown
        self._ended, self.hurried = now, not first
        raise KeyboardInterrupt


@contextmanager
def stop_on_signals(
    *, patient: bool = True, request: StopRequest | None = None
) -> Iterator[StopRequest]:
    """Handle signals inside the block, and restore the handlers after it.

    Args:
        patient: the first signal is a request; else it ends the run, until ``patient`` is set.
        request: receives the signals; None: a new one.

    Outside the main thread Python delivers no signals, and no handler is installed. A signal that the
    process ignores from its start on (``nohup``) stays ignored.
    """
    request = StopRequest(patient=patient) if request is None else request
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {}
    for number in SIGNALS:
        handler = signal.getsignal(number)
        # None: a handler from C code, which could not be restored
        if handler is not None and handler != signal.SIG_IGN:
            before[number] = handler
            signal.signal(number, request.receive)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
