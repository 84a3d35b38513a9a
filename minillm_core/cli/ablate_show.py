"""Runs an ablation with a bar, and shows its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from minillm_core.cli.ablate_left import Left
from minillm_core.cli.cache import cache_folder, data_folder
from minillm_core.cli.console import emit, say
from minillm_core.cli.prepare import Asked, prepare
from minillm_core.config.selection import added
from minillm_core.measure.ablate import Request, ablate
from minillm_core.measure.ablation import PAGE, RESULT, Watch
from minillm_core.measure.card import FOLDER
from minillm_core.measure.course import Going
from minillm_core.text import counted
from minillm_core.train.progress import duration
from minillm_core.train.record import RUNS

__all__ = ["render", "show_ablation"]


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
    """Run it; a table, or one JSON document, on stdout."""
    prepared = prepare(asked, to_run=True)
    assert prepared.detected is not None  # or it would have been refused
    beside = added(company, flag="--with")
    named = tuple(added(judged)) or tuple(prepared.loaded.specs)
    request = Request(
        tuple(name for name in named if name not in beside), seeds, minutes, leave_one_out
    )
    with _watched(Left()) as (watch, tell):
        result, folder = ablate(
            request,
            prepared.loaded,
            prepared.plugins,
            prepared.detected,
            out=out,
            runs=RUNS,
            cache=cache_folder(),
            cards=data_folder() / FOLDER,
            say=tell,
            watch=watch,
        )
    if json:
        emit(result)
        return
    Console().print(render(result))
    say(f"all of it: {folder / PAGE}, {folder / RESULT}")


@contextmanager
def _watched(left: Left) -> Iterator[tuple[Watch, Callable[[str], None]]]:
    """A bar for the run that goes on, where stderr is a terminal; a line a run elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(left, say), say
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
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


def render(result: Mapping[str, Any]) -> Table:
    """One line a plugin: its effect on the loss, on speed and on memory, with intervals."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{result['design']}, {counted(len(result['seeds']), 'pair')} of {result['steps']:,} steps, "
        f"{result['device']}: with minus without, 95 % intervals",
        title_justify="left",
        caption="loss in nats a token of held-out text: below 0 is better",
        caption_justify="left",
    )
    for column in ("plugin", "loss, equal tokens", "loss, equal seconds", "tokens/s", "peak"):
        table.add_column(column, no_wrap=column == "plugin")
    for name, found in result["plugins"].items():
        if found["effect"] is None:
            table.add_row(name, Text(f"{found['failed']} of its pairs failed", style="red"))
            continue
        table.add_row(
            name,
            _loss(found),
            _loss(found["equal_seconds"]) if found["equal_seconds"] else "no pair finished",
            _speed(found["speed"]),
            _peak(found["peak_bytes"]),
        )
    for name, why in result["not_judged"].items():
        table.add_row(name, Text(f"not judged: {why}", style="yellow"))
    return table


def _loss(effect: Mapping[str, Any]) -> Text:
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    if low is None:
        return Text(f"{mean:+.4f} (one pair: no interval)")
    told = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    if effect["distinguishable"]:
        return Text(told, style="green" if mean < 0 else "red")
    needs = effect["pairs_needed"]
    more = f"{needs} pairs would tell" if needs else "over 1,000 pairs would be needed"
    return Text(f"{told} not distinguishable; {more}")


def _speed(speed: Mapping[str, float | None]) -> str:
    if speed["low"] is None or speed["high"] is None:
        return f"{speed['effect']:.3f} x"
    return f"{speed['effect']:.3f} x [{speed['low']:.3f}, {speed['high']:.3f}]"


def _peak(peak: Mapping[str, int | None]) -> str:
    having, without = peak["with"], peak["without"]
    if having is None or without is None:
        return "unknown"
    return f"{having / without:.3f} x ({having / 2**30:.2f} GiB)"
