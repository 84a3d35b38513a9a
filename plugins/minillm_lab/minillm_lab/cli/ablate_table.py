"""The results of an ablation as tables: an interval never wraps, however narrow the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm_core.commands import counted, few, plain
from minillm_lab.card import interval, signed
from minillm_lab.worth import MOST_PAIRS, times, too_wide

LOSSES = ("loss, equal tokens", "loss, equal seconds")
COSTS = ("tokens/s", "peak")
UNDECIDED = "within noise"

Json = Mapping[str, Any]

Rows = Mapping[str, Mapping[str, Text]]
"""Plugin -> heading -> result, each on a separate line."""


def show_findings(result: Mapping[str, Any], console: Console) -> None:
    """Print each plugin's effect on the loss, on speed and on memory, with 95 % intervals.

    Prints one table if it fits; else one for the loss and one for the costs; if these do not fit
    either, the results are listed below each plugin's name.

    Args:
        result: as in ablation.json.
        console: where to.
    """
    console.print(
        Text(
            f"{result['design']}, {counted(len(result['seeds']), 'pair')} of "
            f"{counted(result['steps'], 'step')}, {plain(result['device'])}: with minus without, "
            "95 % intervals"
        )
    )
    timed = result.get("equal_seconds", True)
    rows = {plain(name): _figures(one, timed=timed) for name, one in result["plugins"].items()}
    for table in _tables(rows, console):
        # a terminal too narrow for one result wraps lines itself: nothing is truncated
        console.print()
        console.print(table, crop=False)
    console.print()
    for line in _below(result):
        console.print(line)


def _tables(rows: Rows, console: Console) -> Sequence[Table]:
    layouts = (
        [_beside(rows, (*LOSSES, *COSTS))],
        [_beside(rows, LOSSES), _beside(rows, COSTS)],
    )
    for tables in layouts:
        if all(_width(table, console) <= console.width for table in tables):
            return tables
    stacked = _stacked(rows)
    stacked.width = _width(stacked, console)
    return [stacked]


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def _beside(rows: Rows, headings: Sequence[str]) -> Table:
    """Build a table with a line for each plugin that has one of the results, or two if undecided."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("plugin", *headings):
        table.add_column(heading, no_wrap=True)
    for name, figures in rows.items():
        if figures.keys() & set(headings):
            table.add_row(name, *(figures.get(heading, "") for heading in headings))
    return table


def _stacked(rows: Rows) -> Table:
    """Build a table with a plugin's results below its name, which may be longer than their labels."""
    table = Table.grid()
    table.add_column(no_wrap=True)
    labels = {heading: f"  {heading.removeprefix('loss, ')}" for heading in (*LOSSES, *COSTS)}
    wide = 2 + max(map(len, labels.values()))
    for name, figures in rows.items():
        table.add_row(Text(name, style="bold"))
        for heading, figure in figures.items():
            first, *more = figure.split("\n")
            table.add_row(Text.assemble(labels[heading].ljust(wide), first))
            for line in more:
                table.add_row(Text.assemble(" " * wide, line))
    return table


def _below(result: Mapping[str, Any]) -> Iterator[Text]:
    """Explain the tables, and list the plugins that are not in them."""
    found = [one for one in result["plugins"].values() if one["effect"] is not None]
    if found:
        yield Text("loss: change in held-out loss, nats per token; negative is better")
        yield Text("tokens/s and peak memory: ratio, with over without")
    shown = [effect for one in found for effect in _effects(one) if effect is not None]
    if any(_open(effect) and not _same(effect) for effect in shown):
        yield Text(f"{UNDECIDED} (N): about N pairs would settle it")
    if any(one.get("pooled") for one in found):
        yield Text("loss: intervals by the noise of all sets with similar losses")
    for name, one in result["plugins"].items():
        if one.get("together"):
            names = plain(few(one["together"]))
            yield Text(f"{plain(name)} was left out together with what builds on it: {names}")
    for name, why in result["not_judged"].items():
        yield Text(f"{plain(name)} is not measured: {plain(why)}", style="yellow")


def _effects(found: Json) -> Sequence[Json | None]:
    """List loss at equal tokens and at equal seconds, speed, and memory if it has an interval."""
    peak = found["peak_bytes"]
    return found, found["equal_seconds"], found["speed"], peak if "effect" in peak else None


def _open(effect: Json) -> bool:
    return effect["low"] is not None and not effect["distinguishable"]


def _same(effect: Json) -> bool:
    """Return whether no pair differs at all, so that more pairs would not decide it."""
    return effect["low"] is not None and effect["low"] == effect["high"]


def _figures(found: Json, *, timed: bool) -> dict[str, Text]:
    """Format a plugin's results, by heading; ``timed``: the ablation has runs at equal seconds."""
    tokens, seconds = LOSSES
    if found["effect"] is None:
        return {tokens: Text(f"{counted(found['failed'], 'pair')} failed", style="red")}
    later = found["equal_seconds"]
    return {
        tokens: _loss(found),
        seconds: _loss(later) if later else Text("no pair finished" if timed else "not measured"),
        **dict(zip(COSTS, (_speed(found["speed"]), _peak(found["peak_bytes"])), strict=True)),
    }


def _loss(effect: Json) -> Text:
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    if low is None:
        return Text(f"{signed(mean)}\none pair: no interval")
    return _judged(interval(signed, mean, low, high), effect, better=mean < 0)


def _speed(speed: Json) -> Text:
    return _judged(_times(speed), speed, better=speed["effect"] > 1)


def _peak(peak: Json) -> Text:
    having, without = peak["with"], peak["without"]
    if having is None or without is None:
        return Text("unknown")
    held = f"{having / 2**30:.2f} GiB"
    if "effect" not in peak:
        return Text(f"{times(having / without)} x, {held}")
    return _judged(f"{_times(peak)}, {held}", peak, better=peak["effect"] < 1)


def _times(effect: Json) -> str:
    if too_wide(effect):
        return f"{times(effect['effect'])} x, too few pairs"
    return interval(times, effect["effect"], effect["low"], effect["high"], " x")


def _judged(figure: str, effect: Json, *, better: bool) -> Text:
    """Colour a decided result; below an undecided one add the number of pairs that would decide it."""
    text = Text(figure)
    if not _open(effect):
        if effect["distinguishable"]:
            text.stylize("green" if better else "red")
    elif _same(effect):
        text.append("\nthe same in every pair", "dim")
    else:
        pairs = effect["pairs_needed"]
        text.append(f"\n{UNDECIDED} ({f'{pairs:,}' if pairs else f'>{MOST_PAIRS:,}'})", "dim")
    return text
