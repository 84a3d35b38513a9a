"""The findings of an ablation as tables: an interval is never broken, however narrow the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm_core.measure.paired import MOST_PAIRS
from minillm_core.text import counted, plain

__all__ = ["show_findings"]

LOSSES = ("loss, equal tokens", "loss, equal seconds")
COSTS = ("tokens/s", "peak")
UNDECIDED = "not distinguishable"

Rows = Mapping[str, Mapping[str, Text]]
"""Plugin -> heading -> figure, each of them on a line of its own."""


def show_findings(result: Mapping[str, Any], console: Console) -> None:
    """Print each plugin's effect on the loss, on speed and on memory, with 95 % intervals.

    One table where it fits; else one for the loss and one for the costs; where these do not fit
    either, the figures stand below each plugin's name.

    Args:
        result: as in ablation.json.
        console: where to.
    """
    console.print(
        Text(
            f"{result['design']}, {counted(len(result['seeds']), 'pair')} of "
            f"{result['steps']:,} steps, {plain(result['device'])}: with minus without, "
            "95 % intervals"
        )
    )
    rows = {plain(name): _figures(found) for name, found in result["plugins"].items()}
    for table in _tables(rows, console):
        # what is too narrow even for one figure breaks lines itself: nothing is cut off
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
    """A line a plugin, or two where it is not decided; those without any of these are left out."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("plugin", *headings):
        table.add_column(heading, no_wrap=True)
    for name, figures in rows.items():
        if figures.keys() & set(headings):
            table.add_row(name, *(figures.get(heading, "") for heading in headings))
    return table


def _stacked(rows: Rows) -> Table:
    """The figures of a plugin below its name."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    for name, figures in rows.items():
        table.add_row(Text(name, style="bold"))
        for heading, figure in figures.items():
            table.add_row(f"  {heading.removeprefix('loss, ')}", figure)
    return table


def _below(result: Mapping[str, Any]) -> Iterator[Text]:
    """What the tables mean, and which plugins are not in them."""
    yield Text("loss in nats a token of held-out text: below 0 is better")
    found = list(result["plugins"].values())
    losses = [*found, *(one["equal_seconds"] for one in found if one.get("equal_seconds"))]
    if any(_open(loss) for loss in losses):
        yield Text(f"{UNDECIDED} (8): 8 pairs would tell, were they like these")
    for name, why in result["not_judged"].items():
        yield Text(f"{plain(name)} is not judged: {plain(why)}", style="yellow")


def _open(loss: Mapping[str, Any]) -> bool:
    return loss["low"] is not None and not loss["distinguishable"]


def _figures(found: Mapping[str, Any]) -> dict[str, Text]:
    tokens, seconds = LOSSES
    if found["effect"] is None:
        return {tokens: Text(f"{found['failed']} of its pairs failed", style="red")}
    later = found["equal_seconds"]
    return {
        tokens: _loss(found),
        seconds: _loss(later) if later else Text("no pair finished"),
        **dict(zip(COSTS, (_speed(found["speed"]), _peak(found["peak_bytes"])), strict=True)),
    }


def _loss(effect: Mapping[str, Any]) -> Text:
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    if low is None:
        return Text(f"{mean:+.4f}\none pair: no interval")
    told = Text(f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]")
    if _open(effect):
        pairs = effect["pairs_needed"]
        told.append(f"\n{UNDECIDED} ({f'{pairs:,}' if pairs else f'>{MOST_PAIRS:,}'})", "dim")
    else:
        told.stylize("green" if mean < 0 else "red")
    return told


def _speed(speed: Mapping[str, float | None]) -> Text:
    told = f"{speed['effect']:.3f} x"
    if speed["low"] is not None and speed["high"] is not None:
        told += f" [{speed['low']:.3f}, {speed['high']:.3f}]"
    return Text(told)


def _peak(peak: Mapping[str, int | None]) -> Text:
    having, without = peak["with"], peak["without"]
    if having is None or without is None:
        return Text("unknown")
    return Text(f"{having / without:.3f} x ({having / 2**30:.2f} GiB)")
