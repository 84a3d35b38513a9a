"""Reports of long-running code while it runs: a plugin's call, or a step that waits.

A thread checks once a second: a watched call costs a few microseconds, and a call that ends in time is
not reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

FIRST = 10.0
"""Seconds before the first report; the interval doubles with each report."""

_LOOK_SECONDS = 1.0

_current: ContextVar[Watch | None] = ContextVar("watch", default=None)


@dataclass(eq=False)
class _Activity:
    what: Callable[[], str | None]  # None: nothing to report
    began: float
    due: float  # seconds after which to report it next
    waits: bool
    reported: bool = False


class Watch:
    """A watch of long-running code in all threads: the activities and their start times.

    Args:
        say: prints a line.
        first: seconds before the first report.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        first: float = FIRST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._first, self._clock = say, first, clock
        self._running: dict[_Activity, None] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @contextmanager
    def running(
        self, what: str | Callable[[], str | None], *, waits: bool = False, after: float = 0.0
    ) -> Iterator[None]:
        """Watch the code inside the context.

        Args:
            what: ``plugin 'x', on_batch``; or a function that returns it for a report, or
                None if there is nothing to report.
            waits: the code waits for another thread; if a plugin runs there, that plugin is reported.
            after: seconds before the first report, if more than :data:`FIRST`.
        """
        words = what if callable(what) else lambda: what
        one = _Activity(words, self._clock(), max(self._first, after), waits)
        self._running[one] = None
        if self._thread is None:
            name = "minillm-watch"
            thread = threading.Thread(target=self._look_on, name=name, daemon=True)
            thread.start()  # Ctrl-C may end it here: only a started thread can be joined
            self._thread = thread
        try:
            yield
        finally:
            del self._running[one]

    def look(self) -> None:
        """Report activities that have run for long enough, repeatedly while they run."""
        now = self._clock()
        at_work = list(self._running)
        late = [one for one in at_work if now - one.began >= one.due]
        blocked = [one for one in at_work if one.waits]
        for one in late:
            seconds = now - one.began
            if one.waits and any(self._is_waited_for(other, now) for other in at_work):
                continue  # reported by the other activity's line
            one.due = 2 * one.due
            if (what := one.what()) is None:
                continue
            line = f"{what}: {'for' if one.waits else 'running for'} {seconds:.0f} s"
            if not one.waits:
                line += "".join(f"; {other.what()}" for other in blocked)
            self._say(line + ("" if one.reported else " (Ctrl-C twice ends the run)"))
            one.reported = True

    def _is_waited_for(self, one: _Activity, now: float) -> bool:
        """Return whether the activity has run long enough to be reported instead of the waiting thread."""
        return not one.waits and now - one.began >= self._first / 2 and one.what() is not None

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _look_on(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self.look()


@contextmanager
def watching(say: Callable[[str], None], *, first: float = FIRST) -> Iterator[None]:
    """Watch code marked with :func:`running` inside, and in threads that copy this context."""
    watch, before = Watch(say, first=first), _current.get()
    _current.set(watch)
    try:
        yield
    finally:
        _current.set(before)  # no token: a run may be begun in one context and closed in another
        watch.close()


def running(
    what: str | Callable[[], str | None], *, waits: bool = False, after: float = 0.0
) -> AbstractContextManager[None]:
    """Watch the code inside with the current watch, as :meth:`Watch.running`; do nothing without a watch."""
    watch = _current.get()
    return nullcontext() if watch is None else watch.running(what, waits=waits, after=after)
