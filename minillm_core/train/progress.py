"""The console while a command works, on stderr: a bar on a terminal, a line now and then elsewhere.

    with display(say) as shown:
        with shown.phase("importing torch"):          # elapsed time
            ...
        shown.progress("tokenising", done, total)     # bytes: amount, share, time left
        shown.train(Course(...))                      # from here on an observer of a run's events

In a pipe, a task of less than two seconds prints nothing; a longer one does, and at least every ten
seconds there is a line.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from minillm_core.text import printable
from minillm_core.train import events
from minillm_core.train.events import Evaluated, Event, Sampled, Saved, Stepped

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PATIENCE = 2.0  # seconds of a task before it is printed if there is no terminal
QUIET = 9.0  # seconds between two lines there: ten on a busy machine
SKIPS = 60.0  # seconds between two lines about skipped batches, or about saves
MEAN = 32  # steps whose mean loss the bar shows
BAR = range(8, 25)  # columns of the bar
_TICK = 0.25  # seconds between two checks of the clock


def duration(seconds: float) -> str:
    """Format seconds: 0:07, 12:34, 3:05:00."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def losses(nats: float, bits: float | None) -> str:
    """Format a loss in nats per token, and in bits per byte if that is known."""
    return f"{nats:.3f}" + ("" if bits is None else f", {bits:.3f} bits/byte")


def by_source(found: Evaluated) -> str:
    """Format the losses of a mixture's sources, in brackets; empty for a single source."""
    each = (
        f"{Path(name).name} {losses(one['val_loss'], one['bits_per_byte'])}"
        for name, one in found.sources.items()
    )
    return f" ({'; '.join(each)})" if found.sources else ""


def held_out(found: Evaluated, vocab: int | None = None, *, count: bool = False) -> str:
    """Format the held-out loss after a step; at step 0 beside the loss of uniform guessing.

    Args:
        found: the evaluation.
        vocab: the model's vocabulary size; None: without uniform guessing.
        count: add the number of predictions.
    """
    text = f"step {found.step:,}: held-out loss {losses(found.val_loss, found.bits_per_byte)}"
    text += f" on {found.tokens:,} predictions" * count + by_source(found)
    if found.verdicts:
        text += "; " + ", ".join(f"{name} {number:.4g}" for name, number in found.verdicts.items())
    if found.step > 0 or not vocab:
        return text
    uniform = math.log(vocab)
    near = abs(found.val_loss - uniform) < 0.05 * uniform
    guess = f"ln {vocab:,} = {uniform:.2f}"
    return f"{text}: " + (
        f"knows nothing yet ({guess})" if near else f"a uniform guess has {guess}"
    )


def describe(event: Event) -> str | None:
    """Return the line to print for an event; None: it has none."""
    if isinstance(event, Evaluated):
        return held_out(event)
    if isinstance(event, Saved):
        return f"step {event.step:,}: saved {event.path} ({event.seconds:.1f} s)"
    if isinstance(event, events.Skipped):
        return (
            f"step {event.step:,}: batches without a supervised token are skipped "
            f"({event.skipped:,} so far)"
        )
    if isinstance(event, Sampled):
        return f"step {event.step:,}: {sampled(event.prompt, event.text, answers=event.answers)}"
    if isinstance(event, events.Unsaved):
        return f"warning: {event.reason}\n  the run continues without it (checkpoint.on_error=continue)"
    if isinstance(event, events.Guarded):
        return (
            f"warning: step {event.step:,} was not finite (loss {event.loss}, gradient norm "
            f"{event.grad_norm}): its update was left out ({event.recent} of the last hundred)"
        )
    if isinstance(event, events.Rewound):
        return (
            f"step {event.step:,}: the loss has a spike ({event.loss:.4f}): back to step "
            f"{event.to:,}; the batches of {event.skipped} steps are skipped"
        )
    return None


def sampled(prompt: str, text: str, *, answers: bool = False) -> str:
    """Format a sample, the continuation apart from the prompt, runs of empty lines as one."""
    lines: list[str] = []
    for line in text.rstrip().splitlines() or ["(nothing)"]:
        if line.strip() or (lines and lines[-1].strip()):
            lines.append(line)
    verb = "answers" if answers else "continues"
    head = f"the model {verb} {' '.join(prompt.split())!r}" if prompt else "the model begins"
    return "\n".join([f"{head}:", *(f"  | {line}" for line in lines)])


@dataclass
class Task:
    """A task that takes time, with its progress in bytes or in a named unit."""

    what: str
    began: float
    done: int = 0
    total: int = 0  # 0: not known, or nothing to count
    unit: str = ""  # what is counted; empty: bytes

    def amount(self) -> str:
        """Format how much of it is done."""
        if not self.done and not self.total:
            return ""
        if self.unit:
            return f"{self.done:,} of {self.total:,} {self.unit}"
        done, total = (f"{count / 2**20:,.1f}" for count in (self.done, self.total))
        return f"{done} of {total} MiB" if 0 < self.done < self.total else f"{done} MiB"

    def left(self, now: float) -> float | None:
        """Estimate the seconds left at the rate so far; None if no rate is known."""
        spent = now - self.began
        if not 0 < self.done < self.total or spent < 1.0:
            return None
        return spent / self.done * (self.total - self.done)

    def parts(self, now: float) -> list[str]:
        """Return amount and time, for a line or beside a bar."""
        amount, left = self.amount(), self.left(now)
        share = f" ({100 * self.done / self.total:.0f} %)" if 0 < self.done < self.total else ""
        time_ = duration(now - self.began) if left is None else f"{duration(left)} left"
        return [f"{amount}{share}", time_] if amount else [time_]

    def line(self, now: float) -> str:
        """Format a line: ``tokenising: 12.3 of 195.0 MiB (6 %), 2:10 left``, ``the first step, 0:12``."""
        parts = self.parts(now)
        return f"{self.what}{': ' if len(parts) > 1 else ', '}{', '.join(parts)}"


@dataclass
class Course:
    """The progress of a run's steps, for the console."""

    progress: Callable[[], float]  # share of the budget that is spent
    steps: int | None  # total number, if it is known
    epochs: Callable[[int], float] | None = None  # of the tokens so far; None: not shown
    bytes_per_token: float | None = None  # None: losses are not shown in bits per byte
    vocab: int | None = None  # vocabulary size of the model
    first: str = "the first step"  # label of the wait for the first step
    clock: Callable[[], float] = time.perf_counter
    last: Stepped | None = None
    fraction: float = 0.0
    _since: list[float] = field(default_factory=list)  # losses since the last line
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=MEAN))
    _began: tuple[float, float] | None = None  # time and fraction when step 1 was over

    def take(self, event: Stepped) -> None:
        """Add a step."""
        self.last, self.fraction = event, self.progress()
        if math.isfinite(event.loss):  # others have a line of their own
            self._since.append(event.loss)
            self._recent.append(event.loss)
        if self._began is None:
            self._began = (self.clock(), self.fraction)

    @property
    def title(self) -> str:
        """The step and the number of steps, if it is known: ``step 12/360``."""
        step = self.last.step if self.last else 0
        return f"step {step:,}" + (f"/{self.steps:,}" if self.steps else "")

    @property
    def is_last(self) -> bool:
        """Whether the last step that was added ends the run."""
        return self.last is not None and self.last.step == self.steps

    def left(self) -> str:
        """Estimate the time left, from the share of the budget spent since the first step."""
        if self._began is None or self.fraction <= self._began[1]:
            return ""
        began, share = self._began
        rate = (self.clock() - began) / (self.fraction - share)
        return f"{duration(rate * (1.0 - self.fraction))} left"

    def line(self) -> str:
        """Format a log line; its loss is the mean over the steps since the last line."""
        line = f"{self.title}: {', '.join(text for _, text in self._figures(self._since))}"
        self._since = []
        return line

    def parts(self) -> list[tuple[int, str]]:
        """Return the figures beside the bar, each with a priority: the highest is dropped first.

        The loss is the mean over the last 32 steps.
        """
        return self._figures(self._recent) if self.last else []

    def _figures(self, losses: Sequence[float] | deque[float]) -> list[tuple[int, str]]:
        step, mean = self.last, sum(losses) / len(losses) if losses else math.nan
        assert step is not None
        found = [(0, f"loss {mean:.3f}")]
        if self.bytes_per_token:
            found.append((2, f"{mean / math.log(2) / self.bytes_per_token:.3f} bits/byte"))
        if self.epochs:
            found.append((3, f"{self.epochs(step.tokens):.2f} epochs"))
        found.append((1, f"{step.tokens_per_second.real:,.0f} tokens/s"))
        if step.mfu is not None:
            found.append((4, f"MFU {100 * step.mfu:.0f} %"))
        if left := self.left():
            found.append((0, left))
        return found


class Display(AbstractContextManager):
    """The console while a command works; a context manager, and an observer of a run.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.began = clock()
        self.broken_off: str | None = None  # the task that an error or a signal interrupted
        self._task: Task | None = None
        self._course: Course | None = None
        self._predictions = 0  # of the last evaluation: their number is shown where it changes
        self._mentioned: dict[type[Event], float] = {}  # when a frequent event was shown last

    @abstractmethod
    def say(self, text: str) -> None:
        """Print a line without disturbing the bar."""

    def progress(self, what: str, done: int, total: int, unit: str = "") -> None:
        """Show progress, in a named unit or in bytes; ``total`` 0: not known."""
        task = self._task
        if task is None or task.what != what or done < task.done:
            task = self._task = Task(what, self.clock(), unit=unit)
        task.done, task.total = done, total
        self.tick()

    def evaluating(self, done: int, of: int) -> None:
        """Show the progress of an evaluation, in predictions; 0 are done where it begins."""
        if done == 0:
            self._task = None
        self.progress("evaluating", done, of, "predictions")

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Show a task while the block runs, with its elapsed time."""
        before, self._task = self._task, Task(what, self.clock())
        try:
            yield
        except BaseException:
            if self.broken_off is None:
                self.broken_off = self._task.what if self._task else what
            raise
        finally:
            self._task = before
            self.tick()

    def train(self, course: Course) -> None:
        """Show a run from here on, while its first step is waited for."""
        self._course = course
        self._task = Task(course.first, self.clock())
        self.tick()

    def __call__(self, event: Event) -> None:
        """Show an event of the run."""
        course = self._course
        if isinstance(event, Stepped):
            if course is not None:
                course.take(event)
                self._task = None
                self._step(course, event)
        elif isinstance(event, Evaluated):
            waits = course is not None and course.last is None
            self._task = Task(course.first, self.clock()) if course and waits else None
            self.tick()
            other, self._predictions = event.tokens != self._predictions, event.tokens
            self.say(held_out(event, course.vocab if course else None, count=other))
        elif (text := describe(event)) and not self._comes_often(event):
            self.say(text)

    def _comes_often(self, event: Event) -> bool:
        """Return whether a save or a skipped batch was shown less than a minute ago."""
        kind, now = type(event), self.clock()
        if kind not in (Saved, events.Skipped):
            return False
        if now - self._mentioned.get(kind, -math.inf) < SKIPS:
            return True
        self._mentioned[kind] = now
        return False

    def _step(self, course: Course, step: Stepped) -> None:
        """Show a step, which was added to the course."""

    def tick(self) -> None:
        """Update the display: the time, the task or its progress changed."""


class LineDisplay(Display):
    """A console of lines, for pipes and logs: tasks after two seconds, step 1, then a line every ``QUIET``.

    A thread checks the clock, since nothing calls the console during a framework's import or the
    compilation of a step.
    """

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(clock)
        self._print, self._stepped = say, -QUIET
        self._said = self.began  # when the last line was printed
        self._shown: Task | None = None  # the task that ``_due`` belongs to
        self._due = 0.0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Print a line."""
        self._said = self.clock()
        self._print(text)

    def tick(self) -> None:
        """Print the task if it has lasted long enough."""
        if not self._lock.acquire(blocking=False):
            return  # the other thread is printing
        try:
            task, now = self._task, self.clock()
            if task is not self._shown:
                self._shown, self._due = task, task.began + PATIENCE if task else math.inf
            # a task that follows others, none of them long, waits less than PATIENCE
            if task is not None and now >= min(self._due, self._said + QUIET):
                self._due = now + QUIET
                self.say(task.line(now))
        finally:
            self._lock.release()

    def _step(self, course: Course, step: Stepped) -> None:
        now = self.clock()
        if step.step == 1 or course.is_last or now - self._stepped >= QUIET:
            self._stepped = now
            self.say(course.line())

    def __enter__(self) -> Self:
        self._end.clear()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # it may block on a pipe without a reader

    def _watch(self) -> None:
        while not self._end.wait(_TICK):
            self.tick()


class BarDisplay(Display):
    """A console of one line at the bottom of a terminal, which is removed at the end."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        from rich.live import Live

        super().__init__(clock)
        self._console = console
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=4, transient=True
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(
            printable(text), markup=False, highlight=False, soft_wrap=text.startswith("  ")
        )

    def render(self) -> RenderableType:
        """Render the line, never wider than the terminal."""
        task, course, now = self._task, self._course, self.clock()
        if task is not None:
            share = task.done / task.total if task.total else None
            return self._row(task.what, share, [(0, part) for part in task.parts(now)])
        if course is None or course.last is None:
            return ""
        return self._row(course.title, course.fraction, course.parts())

    def _row(self, title: str, share: float | None, parts: Sequence[tuple[int, str]]) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width = self._console.width - 1
        kept = [(order, part) for order, part in parts if part]
        while True:
            text = ", ".join(part for _, part in kept)
            room = width - len(title) - len(text) - 2
            last = max((order for order, _ in kept), default=0)
            if room >= BAR.start or last == 0:
                break
            kept = [(order, part) for order, part in kept if order < last]
        grid = Table.grid(padding=(0, 1, 0, 0))
        if share is None or room < BAR.start:
            grid.add_row(Text(f"{title} {text}", no_wrap=True, overflow="ellipsis"))
        else:
            bar = ProgressBar(total=1.0, completed=min(1.0, share), width=min(room, BAR.stop - 1))
            grid.add_row(Text(title, no_wrap=True), bar, Text(text, no_wrap=True))
        return grid

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()


def display(say: Callable[[str], None]) -> Display:
    """Return a bar if stderr is a terminal, else lines through ``say``."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return BarDisplay(console)
    return LineDisplay(say)
