"""``minillm bench``: time one or two plugin sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from minillm_core import Refusal
from minillm_core.commands import AsJson, Plugins, StudyOptions, cache_folder, counted, emit, say

if TYPE_CHECKING:
    from minillm_core import Plan
    from minillm_core.studies import Prepared, RunRequest
    from minillm_lab.bench import Request

EXAMPLES = """Examples:

minillm bench

minillm bench --plugins muon --against none --preset gpt2-124m

minillm bench --plugins liger --against none train.rows=64 --steps 20 --repeats 7

minillm bench --plugins muon,windows --layers --trace trace.json

minillm bench --plugins qk_norm --json > bench.json
"""

_HOW = "Timing"

NONE = "none"
"""``--against none``: without the plugins that --plugins names; if it names none, without any."""


def bench(
    *,
    plugins: Plugins = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="C,D",
            help="A second plugin set, timed alternately with the first; none: the same run without "
            "the first set.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(metavar="N", help="Steps in each timed turn.", rich_help_panel=_HOW),
    ] = 10,
    repeats: Annotated[
        int,
        typer.Option(
            metavar="N", help="Turns per set; medians are reported.", rich_help_panel=_HOW
        ),
    ] = 5,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a trace for https://ui.perfetto.dev, one file per set.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            metavar="",
            help="Time each layer of an eager (uncompiled) step.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    run: StudyOptions,
    as_json: AsJson = False,
) -> None:
    """Measure speed, memory and where a step's time goes, for one plugin set or two.

    The speed is kept for the time estimate of minillm plan.
    """
    from minillm_lab.bench import Request

    request = Request(steps, repeats, layers, trace)
    request.check()
    show_bench(run.request(plugins=plugins), request, against=against, json=as_json)


def show_bench(asked: RunRequest, request: Request, *, against: str | None, json: bool) -> None:
    """Run a bench; tables, or one JSON document, on stdout."""
    from minillm_core import build_plan
    from minillm_lab.bench import bench as run_bench

    prepared = _prepared(asked, against)
    plans: dict[str, Plan] = {}
    for one in prepared:
        name = _name(one)
        plans[f"{name} again" if name in plans else name] = build_plan(one.loaded, one.plugins)
    detected = prepared[0].detected
    assert detected is not None  # otherwise already refused
    result = run_bench(request, plans, detected, cache=cache_folder(), say=say)
    if json:
        emit(result)
        return
    console = Console()
    for table in render(result):
        console.print(table)
    for note in dict.fromkeys(note for one in result["sets"].values() for note in one["notes"]):
        say(f"note: {note}")


def _name(prepared: Prepared) -> str:
    """Name a set: ``muon+windows``; for a preset with plugins the differences: ``speedrun+xsa-backout``."""
    from minillm_core.studies import plugins_of

    preset = prepared.loaded.config.preset
    has, named = {plugin.name for plugin in prepared.plugins}, plugins_of(preset).keys()
    if not (named and has):
        return "+".join(sorted(has)) or "plain"
    more = "".join(f"+{name}" for name in sorted(has - named))
    return preset + more + "".join(f"-{name}" for name in sorted(named - has))


def _prepared(asked: RunRequest, against: str | None) -> list[Prepared]:
    """Prepare the set, and the set to compare with, if any."""
    from minillm_core.studies import prepare

    if against is not None and not against.strip():
        raise Refusal(
            "--against names nothing", where="--against", fix="--against none, or plugins' names"
        )
    if against == NONE and not asked.plugins:
        whole = prepare(asked, to_run=True)
        own = [plugin.name for plugin in whole.plugins]
        bare = replace(asked, plugins=",".join(f"-{name}" for name in own) or None)
        return [whole, prepare(_only(bare, set(own)), to_run=True)]
    named = [asked.plugins]
    if against is not None:
        named.append(None if against == NONE else against)
    return [
        prepare(_only(replace(asked, plugins=one), others), to_run=True)
        for one, others in zip(named, _elsewhere(named), strict=True)
    ]


def _elsewhere(named: Sequence[str | None]) -> Iterator[set[str]]:
    """Yield for each set the plugins that only the other has: not named, or removed."""
    from minillm_core.studies import added, taken_away

    sets, without = [set(added(one)) for one in named], [taken_away(one) for one in named]
    for own, gone in zip(sets, without, strict=True):
        yield (set().union(*sets) - own) | (gone - set.intersection(*without))


def _only(asked: RunRequest, others: set[str]) -> RunRequest:
    """Drop the options of plugins that only the other set has."""
    kept = [one for one in asked.assignments if one.partition(".")[0] not in others]
    return replace(asked, assignments=tuple(kept))


def ratio_words(ratio: Mapping[str, Any]) -> str:
    """Format a ratio of speeds, and the range of its turns if there are several."""
    low, high = ratio["low"], ratio["high"]
    turns = "" if low is None else f" (turns: {low:.3f} to {high:.3f})"
    return f"{ratio['tokens_per_second']:.3f} x{turns}"


def render(result: Mapping[str, Any]) -> Iterator[Table]:
    """Print speed and memory, the parts of a step, and the layers under --layers."""
    sets, ratio = result["sets"], result["ratio"]
    whole = any(one["peak_of"] == "process" for one in sets.values())
    speed = _table(
        f"{result['preset']} on {result['device']}, {result['backend']}: medians of "
        f"{counted(result['repeats'], 'turn')} of {counted(result['steps'], 'step')}",
        (
            "plugins",
            "tokens/s",
            "ms a step",
            "MFU",
            "peak of the process" if whole else "peak",
            "first step",
        ),
    )
    for name, one in sets.items():
        speed.add_row(
            name,
            f"{one['tokens_per_second']:,.0f}",
            f"{one['step_seconds'] * 1e3:,.2f}",
            "unknown" if one["mfu"] is None else f"{one['mfu']:.1%}",
            _bytes(one["peak_bytes"]),
            f"{one['first_step_seconds']:.1f} s",
        )
    if ratio is not None:
        peak = ratio["peak_bytes"]
        speed.add_row(
            "first / second",
            ratio_words(ratio),
            f"{1 / ratio['tokens_per_second']:.3f} x",
            "",
            "" if peak is None else f"{peak:.3f} x",
        )
    yield speed
    parts = list(dict.fromkeys(part for one in sets.values() for part in one["shares"]))
    where = _table("share of a step's time", ("plugins", *parts))
    for name, one in sets.items():
        where.add_row(name, *(f"{one['shares'][part]:.1%}" for part in parts))
    yield where
    for name, one in sets.items():
        if one["layers"]:
            layers = _table(f"{name}: one eager step", ("layer", "forward, ms", "backward, ms"))
            for layer, spent in one["layers"].items():
                both = (spent["forward_seconds"], spent["backward_seconds"])
                layers.add_row(layer, *(f"{seconds * 1e3:.3f}" for seconds in both))
            yield layers


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    return table


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.2f} GiB"
