"""The effects of an ablation, each with its interval or why it has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm_core.measure import page
from minillm_core.measure.figure import Interval, interval_chart
from minillm_core.measure.markup import Markup, joined, tag
from minillm_core.measure.ticks import Axis

__all__ = ["effects", "verdict"]

Json = Mapping[str, Any]


def effects(result: Json) -> Markup:
    """Loss at equal tokens and at equal seconds, speed and memory: as figures, and as a table."""
    plugins: Mapping[str, Json] = result["plugins"]
    loss = Axis("nats a token, with minus without (← better)")
    timed = {name: one.get("equal_seconds") for name, one in plugins.items()}
    speeds = {name: one.get("speed") for name, one in plugins.items()}
    figures = [
        page.small(
            "Loss at equal tokens",
            interval_chart([_row(n, one, one) for n, one in plugins.items()], loss),
        ),
        page.small(
            "Loss at equal seconds",
            interval_chart([_row(n, timed[n], one) for n, one in plugins.items()], loss),
        ),
        page.small(
            "Tokens a second",
            interval_chart(
                [_times(n, speeds[n], one, better_below=False) for n, one in plugins.items()],
                Axis("times as many (better →)"),
                reference=1.0,
            ),
        ),
    ]
    how = (
        "Dots are means over pairs, with the plugin minus without it; lines are 95 % intervals. "
        "Equal seconds are those of the other set's run: the first set was trained for the steps "
        "that it makes in them, or its loss is read on the line through two such lengths that lie "
        "close, in the logarithm of the steps. What the times of the pairs vary by is in that interval."
    )
    rows = [_effect_cells(name, one) for name, one in plugins.items()]
    return page.section(
        "Effects",
        tag("p", how, class_="soft"),
        tag("div", *figures, class_="small"),
        page.table(
            ["plugin", ">loss, equal tokens", ">loss, equal seconds", ">tokens/s", ">peak memory"],
            rows,
        ),
    )


def _row(name: str, effect: Json | None, one: Json) -> Interval:
    if effect is None or effect.get("effect") is None:
        made = effect is None and one["effect"] is not None
        return Interval(name, None, note="not run yet, or failed" if made else _missing(one))
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    notes = ["" if effect["distinguishable"] else _undecided(effect), _read_between(effect)]
    note = "; ".join(filter(None, notes))
    return Interval(name, mean, low, high, verdict(effect), _told(effect), note)


def _times(name: str, effect: Json | None, one: Json, *, better_below: bool) -> Interval:
    """With the plugin as many times as without it; 1 is none."""
    if effect is None:
        return Interval(name, None, note=_missing(one))
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    told = f"{mean:.3f} ×" if low is None else f"{mean:.3f} × [{low:.3f}, {high:.3f}]"
    if low is not None and not low <= 1 <= high:
        judged = "better" if (mean < 1) == better_below else "worse"
        return Interval(name, mean, low, high, judged, told)
    note = _undecided(effect) if "pairs_needed" in effect else "not distinguishable"
    return Interval(name, mean, low, high, "unknown", told, note)


def _read_between(effect: Json) -> str:
    """From which lengths the loss of the first set is read, where it was not trained for this one."""
    below, above = effect.get("between") or (0, 0)
    return f"on the line through {below:,} and {above:,} steps" if below != above else ""


def _told(effect: Json) -> str:
    mean = page.signed(effect["effect"])
    if effect["low"] is None:
        return mean
    return f"{mean} [{page.signed(effect['low'])}, {page.signed(effect['high'])}]"


def _undecided(effect: Json) -> str:
    if effect["low"] is None:
        return "one pair has no interval"
    needs = effect["pairs_needed"]
    more = f"{needs} pairs would tell" if needs else "more than 1,000 pairs would be needed"
    return f"not distinguishable; {more}"


def _missing(one: Json) -> str:
    failed = one.get("failed", 0)
    return f"{failed} pairs are missing: not run yet, or failed" if failed else "no pair finished"


def verdict(effect: Json) -> str:
    """Whether it is "better", "worse" or "unknown", by the interval of an effect on the loss."""
    if effect.get("effect") is None or not effect.get("distinguishable"):
        return "unknown"
    return "better" if effect["effect"] < 0 else "worse"


def _effect_cells(name: str, one: Json) -> list[object]:
    if one["effect"] is None:
        return [name, tag("small", _missing(one), class_="wrap"), "", "", ""]
    return [
        name,
        _cell(_row(name, one, one)),
        _cell(_row(name, one["equal_seconds"], one)),
        _cell(_times(name, one["speed"], one, better_below=False)),
        _memory(name, one),
    ]


def _memory(name: str, one: Json) -> object:
    peak = one["peak_bytes"]
    if "effect" in peak:
        return _cell(_times(name, peak, one, better_below=True))
    return (
        f"{peak['with'] / peak['without']:.3f} ×" if peak["with"] and peak["without"] else "unknown"
    )


def _cell(row: Interval) -> Markup:
    told = tag("span", row.told, class_=row.verdict)
    return joined(told, tag("small", row.note, class_="wrap") if row.note else None)
