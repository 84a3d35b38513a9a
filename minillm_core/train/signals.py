"""Ctrl-C and its like: the first one asks the run to end, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "stop_on_signals"]

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Ctrl-C, a scheduler's notice, a terminal that was closed."""


class StopRequest:
    """Whether somebody asked the run to end, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.hurried = False  # a second one came: nothing is waited for any more

    @property
    def requested(self) -> bool:
        """A signal has arrived."""
        return self.signal is not None

    def receive(self, number: int, _frame: FrameType | None = None) -> None:
        """The handler.

        Raises:
            KeyboardInterrupt: it is the second signal.
        """
        if self.signal is not None:
            self.hurried = True
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Listen for signals inside the block; as it was before, after it.

    Outside the main thread Python delivers no signals, and nothing is installed. A signal that the
    process was started with the order to ignore (``nohup``) stays ignored.
    """
    request = StopRequest()
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
