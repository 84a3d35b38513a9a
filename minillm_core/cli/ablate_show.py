"""Runs an ablation with a bar, and shows its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from minillm_core.cli.ablate_failed import refuse_nothing
from minillm_core.cli.ablate_left import Left
from minillm_core.cli.ablate_table import show_findings
from minillm_core.cli.cache import cache_folder, data_folder
from minillm_core.cli.console import emit, say
from minillm_core.cli.prepare import Asked, prepare
from minillm_core.config.selection import added
from minillm_core.measure.ablate import Request, Study, ablate
from minillm_core.measure.ablation import PAGE, RESULT, Watch
from minillm_core.measure.card import FOLDER
from minillm_core.measure.course import Going
from minillm_core.train.progress import duration
from minillm_core.train.record import RUNS

__all__ = ["show_ablation"]

WIDE = 80
"""Columns that hold the bar too; in fewer a run's name is broken rather than the time that is left."""


def show_ablation(
    asked: Asked,
    *,
    judged: str | None,
    company: str | None,
    seeds: int,
    minutes: float | None,
    leave_one_out: bool,
    out: Path | None,
    json: bool,
) -> None:
    """Run it; a table, or one JSON document, on stdout.

    Raises:
        MinillmError: no pair of runs finished; what there is was shown and kept.
    """
    prepared = prepare(asked, to_run=True)
    assert prepared.detected is not None  # or it would have been refused
    beside = added(company, flag="--with")
    named = tuple(added(judged)) or tuple(prepared.loaded.specs)
    request = Request(
        tuple(name for name in named if name not in beside), seeds, minutes, leave_one_out
    )
    with _watched(Left()) as (watch, tell):
        study = Study(
            request,
            prepared.loaded,
            prepared.plugins,
            prepared.detected,
            out=out,
            runs=RUNS,
            cache=cache_folder(),
            say=tell,
            watch=watch,
        )
        result, folder = ablate(study, cards=data_folder() / FOLDER)
    if json:
        emit(result)
    else:
        show_findings(result, Console())
        say(f"all of it: {folder / PAGE}, {folder / RESULT}")
    refuse_nothing(result, folder)


@contextmanager
def _watched(left: Left) -> Iterator[tuple[Watch, Callable[[str], None]]]:
    """A bar for the run that goes on, where stderr is a terminal; a line a run elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(left, say), say
        return
    wide = console.width >= WIDE
    bar = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=wide)),
        *((BarColumn(bar_width=24),) if wide else ()),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[left]}", markup=False),
        console=console,
        refresh_per_second=4,
    )

    def tell(text: str) -> None:
        bar.console.print(text, markup=False, highlight=False)

    with bar:
        task = bar.add_task("", total=1.0, left="")
        estimate = _Estimate(left, tell)

        def watch(going: Going, progress: float) -> None:
            left.told(going, progress)
            estimate()
            label, time_left = going.run.label, _ahead(going, left)
            bar.update(task, description=label, completed=progress, left=time_left)

        yield watch, tell


class _Lines:
    """A line a run, with the time that is left where it can be known."""

    def __init__(self, left: Left, say: Callable[[str], None]) -> None:
        self._left, self._say, self._estimate = left, say, _Estimate(left, say)

    def __call__(self, going: Going, progress: float) -> None:
        if self._left.told(going, progress):
            self._say(f"{going.run.label}  {_ahead(going, self._left)}")
        self._estimate()


class _Estimate:
    """Says once how long all will take, as soon as the first run's speed is known."""

    def __init__(self, left: Left, say: Callable[[str], None]) -> None:
        self._left, self._say, self._told = left, say, False

    def __call__(self) -> None:
        seconds = self._left.seconds
        if not self._told and self._left.known and seconds is not None:
            self._told = True
            self._say(
                f"about {duration(seconds)} for the runs at equal tokens; those at equal seconds "
                "come after them"
            )


def _ahead(going: Going, left: Left) -> str:
    """``run 3 of 12, 4:05 left``."""
    seconds = left.seconds
    until = "" if seconds is None else f", {duration(seconds)} left"
    return f"run {going.number} of {going.runs}{until}"
