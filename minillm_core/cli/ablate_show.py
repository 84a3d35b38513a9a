"""Runs an ablation with a bar, and shows its table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from minillm_core.cli.cache import cache_folder, data_folder
from minillm_core.cli.console import emit, say
from minillm_core.cli.prepare import Asked, prepare
from minillm_core.config.selection import select
from minillm_core.measure.ablate import Request, ablate
from minillm_core.measure.ablation import PAGE, RESULT, Watch
from minillm_core.measure.card import FOLDER
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
    beside = set(select({}, company, flag="--with")[0])
    named = tuple(select({}, judged)[0]) if judged else tuple(prepared.loaded.specs)
    request = Request(
        tuple(name for name in named if name not in beside), seeds, minutes, leave_one_out
    )
    with _watched() as (watch, tell):
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
def _watched() -> Iterator[tuple[Watch, Any]]:
    """A bar for the run that goes on, where stderr is a terminal; a line a run elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        begun: set[str] = set()

        def watch_lines(run: str, progress: float) -> None:
            if run not in begun:
                begun.add(run)
                say(run)

        yield watch_lines, say
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f} %"),
        console=console,
        refresh_per_second=4,
    )
    with bar:
        task = bar.add_task("", total=1.0)
        yield (
            lambda run, progress: bar.update(task, description=run, completed=progress),
            lambda text: bar.console.print(text, markup=False, highlight=False),
        )


def render(result: Mapping[str, Any]) -> Table:
    """One line a plugin: its effect on the loss, on speed and on memory, with intervals."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{result['design']}, {len(result['seeds'])} pairs of {result['steps']:,} steps, "
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
