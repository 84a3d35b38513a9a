"""The console during a run: a bar on a terminal, a line now and then elsewhere; on stderr."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from minillm_core.train.events import (
    Evaluated,
    Event,
    Guarded,
    Rewound,
    Saved,
    Skipped,
    Stepped,
    Unsaved,
)

__all__ = ["BarView", "LineView", "View", "describe", "duration", "view"]

QUIET = 10.0  # seconds between two lines where there is no terminal
PATIENCE = 3.0  # seconds of an evaluation of which nothing is said there


def duration(seconds: float) -> str:
    """Seconds as a person says them: 0:07, 12:34, 3:05:00."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe(event: Event) -> str | None:
    """One line for an event that deserves one."""
    if isinstance(event, Evaluated):
        rate = "" if event.bits_per_byte is None else f", {event.bits_per_byte:.4f} bits/byte"
        return f"step {event.step}: validation loss {event.val_loss:.4f}{rate}"
    if isinstance(event, Saved):
        return f"step {event.step}: checkpoint {event.path} ({event.seconds:.1f} s)"
    if isinstance(event, Skipped):
        return (
            f"step {event.step}: a batch without supervised tokens was passed over "
            f"({event.skipped} so far)"
        )
    if isinstance(event, Unsaved):
        return f"warning: {event.reason}\n  the run goes on, as checkpoint.on_error=continue says"
    if isinstance(event, Guarded):
        return (
            f"warning: step {event.step} was not finite (loss {event.loss}, gradients "
            f"{event.grad_norm}): its update was left out ({event.recent} of the last hundred)"
        )
    if isinstance(event, Rewound):
        return (
            f"the loss of step {event.step} is a spike ({event.loss:.4f}): back to step "
            f"{event.to}, and {event.skipped} steps' batches were passed over"
        )
    return None


def figures(event: Stepped) -> str:
    """A step's figures in a few words."""
    speed = f"{event.tokens_per_second.real:,.0f} tokens/s"
    mfu = "" if event.mfu is None else f"  MFU {event.mfu:.1%}"
    return f"loss {event.loss:.4f}  {speed}{mfu}"


class View(ABC):
    """What both views share: a context manager and observer.

    Args:
        fraction: share of the budget that is spent.
        steps: how many there will be, where that is known.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        fraction: Callable[[], float],
        steps: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._fraction, self._steps, self._clock = fraction, steps, clock
        self._first: tuple[float, float] | None = None  # time and fraction when step 1 was over

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, Stepped):
            self._step(event, self._fraction())
        elif text := describe(event):
            self.say(text)

    @abstractmethod
    def evaluating(self, done: int, of: int) -> None:
        """Show how far an evaluation is, in predictions; none are done where it begins."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Print a line without disturbing what is shown."""

    @abstractmethod
    def _step(self, event: Stepped, fraction: float) -> None: ...

    def _title(self, event: Stepped) -> str:
        return f"step {event.step}" + (f"/{self._steps}" if self._steps else "")

    def _left(self, fraction: float) -> str:
        now = self._clock()
        if self._first is None:
            self._first = (now, fraction)
        began, share = self._first
        if fraction <= share:
            return "-:--"
        return duration((now - began) / (fraction - share) * (1.0 - fraction))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class LineView(View):
    """The first step, then a line every ten seconds; for pipes and log files."""

    def __init__(
        self,
        fraction: Callable[[], float],
        steps: int | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(fraction, steps, clock)
        self._say, self._told = say, -QUIET
        self._next = 0.0  # when to mention the evaluation

    def evaluating(self, done: int, of: int) -> None:
        """Say so where it lasts, and again every ten seconds."""
        now = self._clock()
        if done == 0:
            self._next = now + PATIENCE
        elif now >= self._next:
            self._next = now + QUIET
            self._say(f"evaluating {of:,} predictions: {done / of:.0%} done")

    def say(self, text: str) -> None:
        """Print a line."""
        self._say(text)

    def _step(self, event: Stepped, fraction: float) -> None:
        left = self._left(fraction)
        now = self._clock()
        if event.step in (1, self._steps) or now - self._told >= QUIET:
            self._told = now
            self._say(f"{self._title(event)}  {figures(event)}  {left} left")


class BarView(View):
    """One bar that stays at the bottom while lines go by above it."""

    def __init__(
        self,
        fraction: Callable[[], float],
        steps: int | None,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(fraction, steps, clock)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}  {task.fields[left]} left", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("step 0", total=1.0, figures="", left="-:--")
        self._last: dict[str, Any] = {}  # what it showed of the last step

    def __call__(self, event: Event) -> None:
        """Show an event; after an evaluation the bar is the last step's again."""
        if isinstance(event, Evaluated):
            self._bar.update(self._task, **self._last)
        super().__call__(event)

    def evaluating(self, done: int, of: int) -> None:
        """Fill the bar anew."""
        self._bar.update(
            self._task,
            completed=done / of,
            description="evaluating",
            figures=f"{done:,} of {of:,} predictions",
            left="-:--",
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def _step(self, event: Stepped, fraction: float) -> None:
        self._last = {
            "completed": fraction,
            "description": self._title(event),
            "figures": figures(event),
            "left": self._left(fraction),
        }
        self._bar.update(self._task, **self._last)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()


def view(fraction: Callable[[], float], steps: int | None, say: Callable[[str], None]) -> View:
    """A bar where stderr is a terminal, lines through ``say`` elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        return BarView(fraction, steps, console)
    return LineView(fraction, steps, say)
