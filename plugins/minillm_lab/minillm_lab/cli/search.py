"""``minillm search``: a recipe for the user's own text, machine and length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from minillm_core.commands import (
    AsJson,
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
    from minillm_lab.paired_runs import Candidate, Current, Watch
    from minillm_lab.search import Request

EXAMPLES = """Examples:

minillm search --data my_texts/ --minutes 1 --budget 2h

minillm search --preset tiny --minutes 0.3 --budget 20m --plugins muon,qk_norm,zero_init

minillm search --data my_texts/ --tokens 2000000 --budget 1.5 --space space.toml

minillm search --data my_texts/ --target 3.5 --budget 3h --out runs/which

minillm search --data my_texts/ --minutes 1 --budget 2h --out runs/search-1 --resume

minillm search --preset gpt2-124m --data my_texts/ --minutes 2 --budget 3h --gpus 4

minillm train --preset runs/search-1/best.toml
"""

_WHAT = "What the recipe is for"
_HOW = "Search"

SHOWN = 12
"""Maximum number of candidates in the live table."""


def search(
    *,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="M",
            help="Search for the lowest loss after M minutes of training, without compilation and "
            "evaluation.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Search for the lowest loss after N tokens.", rich_help_panel=_WHAT
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="LOSS",
            help="Search for the shortest training time to this held-out loss.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="HOURS",
            help="Time limit of the whole search: hours, or 20m, 1h30m.",
            rich_help_panel=_HOW,
        ),
    ],
    plugins: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Plugins to try; -NAME leaves one out. Default: all installed ones that run on "
            "this machine. ./file.py:Class names a single file.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(
            metavar="TOML",
            help="Search space (docs/guide.md shows a file). Default: plugins, the values that "
            "they declare for their options, learning rate, batch, schedule, and shapes with no "
            "more parameters.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Output folder; default: runs/search-N.", parser=folder),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", metavar="", help="Continue the search in --out; finished runs are kept."
        ),
    ] = False,
    gpus: Gpus = None,
    processes: Processes = None,
    run: StudyOptions,
    as_json: AsJson = False,
) -> None:
    """Find a recipe for a text, a machine and a length: plugins, rates, batch, schedule, shape.

    Candidates are compared in short runs first, on the same seeds and data as the current recipe.
    A change is accepted if it is better by more than its 95 % interval, or cheaper and no worse.
    The result is a settings file for minillm train --preset.
    """
    from minillm_core.studies import RUNS
    from minillm_lab.search import Request, seconds_of

    with _shown() as (watch, tell):
        request = Request(
            run.request(),
            runs=RUNS,
            cache=cache_folder(),
            say=tell,
            budget=seconds_of(budget),
            minutes=minutes,
            tokens=tokens,
            target=target,
            plugins=plugins,
            space=space,
            out=out,
            resume=resume,
            devices=cards(gpus),
            processes=processes,
            watch=watch,
        )
        show_search(request, json=as_json)


def show_search(request: Request, *, json: bool) -> None:
    """Search; the recipe, or one JSON document, on stdout."""
    from minillm_lab.search import BEST
    from minillm_lab.search import search as run_search
    from minillm_lab.search_page import PAGE, headline

    result, folder = run_search(request)
    if json:
        emit(result | {"file": str(folder / BEST)})
        return
    request.say(headline(result))
    request.say(f"written: {folder / PAGE}, {folder / BEST}")
    request.say(f"next: {result['command']}")


@contextmanager
def _shown() -> Iterator[tuple[Watch, Callable[[str], None]]]:
    """Show a live table of the stage if stderr is a terminal, else a line per run."""
    console = Console(stderr=True)
    wait = CompilationWait()
    if not console.is_terminal:
        seen: list[object] = []

        def line(current: Current, progress: float) -> None:
            if wait.note(waits=current.compiling > 0):
                if wait.due():
                    say(_compiling(current, wait))
                return
            now = current.stage, current.number, current.label
            if progress and seen != [now]:
                seen[:] = [now]
                say(_words(current))

        yield line, say
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def tell(text: str) -> None:
            live.console.print(text, markup=False, highlight=False)

        def watch(current: Current, progress: float) -> None:
            waits = wait.note(waits=current.compiling > 0)
            below = _Waiting(current, wait) if waits else Text(f"{_words(current)}, {progress:.0%}")
            live.update(Group(standing(current), below))

        yield watch, tell


@dataclass(frozen=True)
class _Waiting:
    """A line about steps that are compiled, with the time when it is drawn."""

    current: Current
    wait: CompilationWait

    def __rich__(self) -> Text:
        return Text(_compiling(self.current, self.wait))


def _compiling(current: Current, wait: CompilationWait) -> str:
    """Format ``round 1, 6 s: compiling 4 recipes, 0:45``."""
    return f"{current.stage}: compiling {counted(current.compiling, 'recipe')}, {wait.elapsed}"


def _words(current: Current) -> str:
    """Format ``round 1, 6 s: +muon  run 3 of 12, 4:05 spent``."""
    return (
        f"{current.stage}: {plain(current.label)}  run {current.number} of "
        f"{current.runs}, {duration(current.spent)} spent"
    )


def standing(current: Current) -> Table:
    """Build the table of the current stage, the best gain first.

    Args:
        current: the run in progress, and the candidates of its stage.
    """
    table = Table(box=None, pad_edge=False, title=current.stage, title_justify="left")
    table.add_column("change", no_wrap=True, max_width=40)
    table.add_column("gain, nats", justify="right")
    table.add_column("trend", justify="right")
    done = sorted((one for one in current.table if one.rungs), key=lambda one: one.expected)
    for one in done[:SHOWN]:
        table.add_row(plain(one.move.name), _gain(one), _trend(one))
    left = len(current.table) - len(done[:SHOWN])
    if left > 0:
        table.add_row(f"and {counted(left, 'change')}", "", "", style="dim")
    return table


def _gain(one: Candidate) -> Text:
    from minillm_lab.paired_runs import in_words

    last = one.rungs[-1]
    words = f"{last['effect']:+.4f}" if last["low"] is None else in_words(last)
    return Text(words, style="green" if one.expected < 0 else "red")


def _trend(one: Candidate) -> str:
    if one.trend is None:
        return ""
    return "fades" if one.trend > 0 else "grows"
