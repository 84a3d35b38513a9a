"""``minillm ablate``: an ablation with a progress bar, and its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from minillm_core import MinillmError, Refusal
from minillm_core.commands import (
    AsJson,
    Steps,
    StudyOptions,
    cache_folder,
    counted,
    duration,
    emit,
    folder,
    plain,
    say,
)
from minillm_lab.cli.compiling import CompilationWait
from minillm_lab.cli.devices import Gpus, Processes, cards

if TYPE_CHECKING:
    from minillm_core.studies import RunRequest
    from minillm_lab.ablation import RunProgress, RunSpec, Watch

EXAMPLES = """Examples:

minillm ablate --plugins muon,paired_heads --seeds 5 --steps 200

minillm ablate --plugins polar_express,normuon --with muon --minutes 0.5

minillm ablate --plugins muon,qk_norm,relu2 --leave-one-out --out runs/which

minillm ablate --plugins muon,qk_norm,relu2 --leave-one-out --out runs/which --json > effects.json

minillm ablate --preset speedrun --leave-one-out --gpus 4 --processes 5 --no-equal-seconds

minillm ablate --preset speedrun --plugins xsa
"""

_WHAT = "Comparison"

WIDE = 80
"""Terminal width that fits the bar too; in a narrower one the run's name wraps, not the remaining time."""

SHOWN = 5
"""Maximum number of plugin sets named: an explanation has at most twelve lines."""

KNOWN = 0.1
"""Fraction of the first run after which its speed is stable enough for an estimate."""


def ablate(
    *,
    plugins: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Plugins to measure. Those of the preset or the settings file are active beside them, "
            "and are measured if none is named. -NAME removes one; ./file.py:Class names a single file.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    company: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="A,B",
            help="Plugins that are active in every run but not measured.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Number of seeds, each a pair of runs; a technique card requires 5.",
            rich_help_panel=_WHAT,
        ),
    ] = 3,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="M",
            help="Length of each run: the number of steps that the baseline takes in M minutes. Default: "
            "train.steps or train.minutes.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    leave_one_out: Annotated[
        bool,
        typer.Option(
            "--leave-one-out/--one-at-a-time",
            metavar="",
            help="Compare all plugins with all but one; or each alone with none (default).",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    equal_seconds: Annotated[
        bool,
        typer.Option(
            "--equal-seconds/--no-equal-seconds",
            metavar="",
            help="Compare losses at equal seconds too (default), for which the baseline is trained again, "
            "for as long as slower and faster sets took; or at equal tokens only.",
            rich_help_panel=_WHAT,
        ),
    ] = True,
    steps: Steps = None,
    gpus: Gpus = None,
    processes: Processes = None,
    run: StudyOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=folder,
            help="Output folder; an interrupted study continues there. Default: runs/ablation-N.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what each plugin is worth: paired seeds, the same data, 95 % intervals.

    Without --plugins, every plugin of the preset or the file is measured.
    """
    named = ",".join(part for part in (company, plugins) if part) or None
    show_ablation(
        run.request(plugins=named, steps=steps),
        judged=plugins,
        company=company,
        seeds=seeds,
        minutes=minutes,
        leave_one_out=leave_one_out,
        equal_seconds=equal_seconds,
        devices=cards(gpus),
        processes=processes,
        out=out,
        json=as_json,
    )


def show_ablation(
    asked: RunRequest,
    *,
    judged: str | None,
    company: str | None,
    seeds: int,
    minutes: float | None,
    leave_one_out: bool,
    equal_seconds: bool = True,
    devices: tuple[str, ...] = (),
    processes: int | None = None,
    out: Path | None,
    json: bool,
) -> None:
    """Run an ablation; a table, or one JSON document, on stdout.

    Raises:
        Refusal: a plugin is both measured and in every run.
        MinillmError: no pair of runs finished; partial results were shown and saved.
    """
    from minillm_core.studies import RUNS, added, prepare
    from minillm_lab.ablate import Request
    from minillm_lab.ablate import ablate as run_ablation
    from minillm_lab.ablation import PAGE, RESULT
    from minillm_lab.card import card_folder
    from minillm_lab.cli.ablate_table import show_findings

    beside, named = added(company, flag="--with"), tuple(added(judged))
    if twice := [name for name in named if name in beside]:
        raise Refusal(
            f"plugin '{twice[0]}' is named by --plugins and by --with",
            where=f"--plugins {judged} --with {company}",
            fix="--plugins measures it; --with has it in every run, and does not measure it",
        )
    prepared = prepare(asked, to_run=True)
    named = named or tuple(prepared.loaded.specs)
    with _watched(RemainingTime(), more=equal_seconds) as (watch, tell):
        request = Request(
            tuple(name for name in named if name not in beside),
            prepared,
            runs=RUNS,
            cache=cache_folder(),
            say=tell,
            out=out,
            seeds=seeds,
            minutes=minutes,
            leave_one_out=leave_one_out,
            equal_seconds=equal_seconds,
            devices=devices,
            processes=processes,
            watch=watch,
        )
        result, folder = run_ablation(request, cards=card_folder())
    if json:
        emit(result)
    else:
        show_findings(result, Console())
        say(f"written: {folder / PAGE}, {folder / RESULT}")
    refuse_nothing(result, folder)


@contextmanager
def _watched(left: RemainingTime, *, more: bool) -> Iterator[tuple[Watch, Callable[[str], None]]]:
    """Show a progress bar for the current run if stderr is a terminal, else a line per run.

    Args:
        left: estimates the remaining time.
        more: whether runs at equal seconds follow those at equal tokens.
    """
    console = Console(stderr=True)
    wait = CompilationWait()
    if not console.is_terminal:
        estimate_line = _Estimate(left, say, more=more)

        def line(current: RunProgress, progress: float) -> None:
            if wait.note(waits=current.compiling > 0):
                if wait.due():
                    say(f"{_compiling(current)}, {wait.elapsed}")
                return
            if left.note(current, progress):
                say(f"{current.run.label}  {_ahead(current, left)}")
            estimate_line()

        yield line, say
        return
    wide = console.width >= WIDE
    bar = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=wide)),
        *((BarColumn(bar_width=24),) if wide else ()),
        TextColumn("{task.percentage:>3.0f} %"),
        _TimeColumn(table_column=Column(no_wrap=True)),
        console=console,
        refresh_per_second=4,
    )

    def tell(text: str) -> None:
        bar.console.print(text, markup=False, highlight=False)

    with bar:
        task = bar.add_task("", total=1.0, time=lambda: "")
        estimate = _Estimate(left, tell, more=more)

        def watch(current: RunProgress, progress: float) -> None:
            if wait.note(waits=current.compiling > 0):
                title = _compiling(current)
                bar.update(task, description=title, completed=0.0, time=lambda: wait.elapsed)
                return
            left.note(current, progress)
            estimate()
            label, time_left = current.run.label, _ahead(current, left)
            bar.update(task, description=label, completed=progress, time=lambda: time_left)

        yield watch, tell


class _TimeColumn(ProgressColumn):
    """A column of the time that the task's field ``time`` returns when it is drawn."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["time"]())


class _Estimate:
    """An estimate of the whole time, printed once, as soon as the first run's speed is known."""

    def __init__(self, left: RemainingTime, say: Callable[[str], None], *, more: bool) -> None:
        self._left, self._say, self._more, self._printed = left, say, more, False

    def __call__(self) -> None:
        seconds = self._left.seconds
        if not self._printed and self._left.known and seconds is not None:
            self._printed = True
            follow = "; the runs at equal seconds follow" if self._more else ""
            self._say(f"about {duration(seconds)} for the runs at equal tokens{follow}")


def _compiling(current: RunProgress) -> str:
    """Format ``compiling 4 of 9 sets of plugins``."""
    return f"compiling {current.compiling} of {counted(current.sets, 'set')} of plugins"


def _ahead(current: RunProgress, left: RemainingTime) -> str:
    """Format ``run 3 of 12, 4:05 left``."""
    seconds = left.seconds
    until = "" if seconds is None else f", {duration(seconds)} left"
    return f"run {current.number} of {current.runs}{until}"


def refuse_nothing(result: Mapping[str, Any], out: Path) -> None:
    """Check that at least one plugin has a finished pair of runs.

    Args:
        result: as in ablation.json, finished.
        out: its folder.

    Raises:
        MinillmError: no plugin has one; names the sets whose runs failed, and the reasons.
    """
    from minillm_lab.members import RUNS

    if any(one["effect"] is not None for one in result["plugins"].values()):
        return
    lines = list(_failures(result))
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and {len(lines) - SHOWN} more plugin sets"]
    raise MinillmError(
        "the ablation found nothing: no pair of runs finished\n  " + "\n  ".join(lines),
        where=str(out / RUNS),
        fix="a lower learning rate, or less memory per step; use another --out, since failed runs "
        "are kept and not repeated",
    )


def _failures(result: Mapping[str, Any]) -> Iterator[str]:
    """Describe each plugin set whose runs failed: how many, and the error of the first."""
    errors: dict[str, list[str]] = {}
    for run in result["runs"]:
        if "error" in run:
            errors.setdefault(run["variant"], []).append(run["error"])
    for name, found in errors.items():
        yield f"{plain(name)}, {counted(len(found), 'run')} failed: {plain(found[0], 160)}"


class RemainingTime:
    """The times of an ablation's runs, and an estimate of the remaining time.

    A run's steps are timed apart from the time between two runs: validation, and for a new variant
    its compilation, which with few seeds takes as long as a run. Runs of several processes, some of which
    compile while others train, are timed together from their first step.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._current: RunProgress | None = None
        self._first = self._last = (clock(), 0.0)  # time and progress of the current run
        self._paces: list[float] = []  # seconds per step
        # (seconds until a run's first noted step, steps made by then)
        self._within: list[tuple[float, float]] = []  # between two runs of a variant
        self._between: list[tuple[float, float]] = []  # before the first of a variant
        # (time, runs left) of several processes, before their first step and now
        self._together: tuple[tuple[float, float], tuple[float, float]] | None = None

    def note(self, current: RunProgress, share: float) -> bool:
        """Record a finished step; return True for the first recorded step of its run.

        Args:
            current: the run, and the runs ahead.
            share: progress of the run, 0..1.
        """
        now, before = self._clock(), self._current
        if (left := current.left) is not None:
            here = now, left
            began, latest = self._together or (here, here)
            # until a step is made they compile, and more runs may follow when all are finished
            self._together = (began if left < began[1] and left <= latest[1] else here), here
        begins = before is None or current.run != before.run
        if begins:
            if (pace := self._timed()) is not None:
                self._paces.append(pace)
            same = before is not None and before.run.variant == current.run.variant
            gaps = self._within if same else self._between
            gaps.append((now - self._last[0], share * current.run.steps))
            self._first = now, share
        self._current, self._last = current, (now, share)
        return begins

    @property
    def known(self) -> bool:
        """Return whether the first run has progressed enough for an estimate."""
        if self._together is not None:
            (_, most), (_, left) = self._together
            return most - left >= 1
        return bool(self._paces) or self._last[1] >= KNOWN

    @property
    def seconds(self) -> float | None:
        """Estimate the seconds until all known runs are finished; None: fewer than two steps are timed."""
        if self._together is not None:
            (began, most), (now, left) = self._together
            return (now - began) / (most - left) * left if left < most else None
        pace = median(self._paces) if self._paces else self._timed()
        if self._current is None or pace is None:
            return None
        run = self._current.run
        left = pace * run.steps * (1 - self._last[1])
        for ahead in self._current.ahead:
            left += pace * ahead.steps + self._gap(run, ahead, pace)
            run = ahead
        return left

    def _timed(self) -> float | None:
        """Compute the seconds per step of the current run."""
        (first, done), (last, share) = self._first, self._last
        if self._current is None or share <= done:
            return None
        return (last - first) / (share - done) / self._current.run.steps

    def _gap(self, run: RunSpec, ahead: RunSpec, pace: float) -> float:
        known = self._within if run.variant == ahead.variant else self._between
        return max(0.0, median(took - pace * steps for took, steps in known)) if known else 0.0
