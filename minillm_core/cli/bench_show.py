"""Times one or two sets of plugins, and shows the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from minillm_core.cli.cache import cache_folder
from minillm_core.cli.console import emit, say
from minillm_core.cli.prepare import Asked, Prepared, prepare
from minillm_core.config.presets import plugins_of
from minillm_core.config.selection import added, taken_away
from minillm_core.errors import Refusal
from minillm_core.measure.bench import Request, bench
from minillm_core.measure.contest import Contender
from minillm_core.text import counted

__all__ = ["render", "show_bench"]

NONE = "none"
"""``--against none``: without the plugins that --plugins names; where it names none, without any."""


def show_bench(asked: Asked, request: Request, *, against: str | None, json: bool) -> None:
    """Run it; tables, or one JSON document, on stdout."""
    prepared = _prepared(asked, against)
    contenders: list[Contender] = []
    for one in prepared:
        name = _name(one)
        if name in [other.name for other in contenders]:
            name += " again"
        contenders.append(Contender(name, one.loaded, one.plugins))
    detected = prepared[0].detected
    assert detected is not None  # or it would have been refused
    result = bench(request, contenders, detected, cache=cache_folder(), say=say)
    if json:
        emit(result)
        return
    console = Console()
    for table in render(result):
        console.print(table)
    for note in dict.fromkeys(note for one in result["sets"].values() for note in one["notes"]):
        say(f"note: {note}")


def _name(prepared: Prepared) -> str:
    """``muon+windows``; of a preset that names plugins what differs: ``speedrun+xsa-smear``."""
    preset = prepared.loaded.config.preset
    has, named = {plugin.name for plugin in prepared.plugins}, plugins_of(preset).keys()
    if not (named and has):
        return "+".join(sorted(has)) or "plain"
    more = "".join(f"+{name}" for name in sorted(has - named))
    return preset + more + "".join(f"-{name}" for name in sorted(named - has))


def _prepared(asked: Asked, against: str | None) -> list[Prepared]:
    """The set, and the one that it is held against where there is one."""
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
    """For each set the plugins that another has and it has not: not named, or taken away."""
    sets, without = [set(added(one)) for one in named], [taken_away(one) for one in named]
    for own, gone in zip(sets, without, strict=True):
        yield (set().union(*sets) - own) | (gone - set.intersection(*without))


def _only(asked: Asked, others: set[str]) -> Asked:
    """Without the options of plugins that the other set alone has."""
    kept = [one for one in asked.assignments if one.partition(".")[0] not in others]
    return replace(asked, assignments=tuple(kept))


def render(result: Mapping[str, Any]) -> Iterator[Table]:
    """Speed and memory; where the time goes; the layers, where they were asked for."""
    sets, ratio = result["sets"], result["ratio"]
    speed = _table(
        f"{result['preset']} on {result['device']}, {result['backend']}: medians of "
        f"{counted(result['repeats'], 'turn')} of {counted(result['steps'], 'step')}",
        ("plugins", "tokens/s", "ms a step", "MFU", "peak", "first step"),
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
            f"{ratio['tokens_per_second']:.3f} x [{ratio['low']:.3f}, {ratio['high']:.3f}]",
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
