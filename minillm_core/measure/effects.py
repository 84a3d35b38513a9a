"""The effects of an ablation, each with its interval or why it has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minillm_core.measure import page
from minillm_core.measure.figure import Interval, interval_chart
from minillm_core.measure.markup import Markup, joined, tag
from minillm_core.measure.ticks import Axis
from minillm_core.measure.told import interval, signed, times
from minillm_core.text import counted

__all__ = ["effects", "verdict"]

Json = Mapping[str, Any]


def effects(result: Json) -> Markup:
    """Loss at equal tokens and at equal seconds, speed and memory: as figures, and as a table."""
    plugins: Mapping[str, Json] = result["plugins"]
    loss = Axis("nats a token, with minus without (← better)")
    timed = {name: one.get("equal_seconds") for name, one in plugins.items()}
    speeds = {name: one.get("speed") for name, one in plugins.items()}
    why = {name: _missing(result, one) for name, one in plugins.items()}
    figures = [
        page.small(
            "Loss at equal tokens",
            interval_chart([_row(n, one, why[n]) for n, one in plugins.items()], loss),
        ),
        page.small(
            "Loss at equal seconds",
            interval_chart([_row(n, timed[n], why[n]) for n in plugins], loss),
        ),
        page.small(
            "Tokens a second",
            interval_chart(
                [_times(n, speeds[n], why[n], better_below=False) for n in plugins],
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
    rows = [_effect_cells(name, one, why[name]) for name, one in plugins.items()]
    return page.section(
        "Effects",
        tag("p", how, class_="soft"),
        tag("div", *figures, class_="small"),
        page.table(
            ["plugin", ">loss, equal tokens", ">loss, equal seconds", ">tokens/s", ">peak memory"],
            rows,
        ),
    )


def _row(name: str, effect: Json | None, why: str) -> Interval:
    if effect is None or effect.get("effect") is None:
        return Interval(name, None, note=why)
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    notes = ["" if effect["distinguishable"] else _undecided(effect), _read_between(effect)]
    note = "; ".join(filter(None, notes))
    return Interval(name, mean, low, high, verdict(effect), _told(effect), note)


def _times(name: str, effect: Json | None, why: str, *, better_below: bool) -> Interval:
    """With the plugin as many times as without it; 1 is none."""
    if effect is None:
        return Interval(name, None, note=why)
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    told = interval(times, mean, low, high, " ×")
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
    """The mean and its interval; a minus is as wide as the plus."""
    told = interval(signed, effect["effect"], effect["low"], effect["high"])
    return told.replace("-", "−")


def _undecided(effect: Json) -> str:
    if effect["low"] is None:
        return "one pair has no interval"
    if effect["low"] == effect["high"]:
        return "the same in every pair"
    needs = effect["pairs_needed"]
    more = f"{needs} pairs would tell" if needs else "more than 1,000 pairs would be needed"
    return f"not distinguishable; {more}"


def _missing(result: Json, one: Json) -> str:
    """Why a figure of a plugin is not there: where all is over, what is missing has failed."""
    failures = [run for run in result["runs"] if "error" in run]
    if one["effect"] is not None:  # at equal tokens it is known
        reference = next(iter(result["variants"]))
        if reference not in (one["with"], one["without"]):
            return f"not measured: runs of other lengths are {reference}'s alone"
        if result.get("finished"):
            return "the runs for that time failed"
        return "not run yet, or failed" if failures else "not run yet"
    gone = one.get("failed", 0)
    names = {one["with"], one["without"]}
    failed = len({run["seed"] for run in failures if run["variant"] in names})
    told = {"failed": gone if result.get("finished") else failed}
    told["not run yet"] = max(0, gone - told["failed"])
    return ", ".join(f"{counted(n, 'pair')} {what}" for what, n in told.items() if n)


def verdict(effect: Json) -> str:
    """Whether it is "better", "worse" or "unknown", by the interval of an effect on the loss."""
    if effect.get("effect") is None or not effect.get("distinguishable"):
        return "unknown"
    return "better" if effect["effect"] < 0 else "worse"


def _effect_cells(name: str, one: Json, why: str) -> list[object]:
    if one["effect"] is None:
        return [name, tag("small", why, class_="wrap"), "", "", ""]
    return [
        name,
        _cell(_row(name, one, why)),
        _cell(_row(name, one["equal_seconds"], why)),
        _cell(_times(name, one["speed"], why, better_below=False)),
        _memory(name, one),
    ]


def _memory(name: str, one: Json) -> object:
    peak = one["peak_bytes"]
    if "effect" in peak:
        return _cell(_times(name, peak, "", better_below=True))
    having, without = peak["with"], peak["without"]
    return f"{times(having / without)} ×" if having and without else "unknown"


def _cell(row: Interval) -> Markup:
    told = tag("span", row.told, class_=row.verdict)
    return joined(told, tag("small", row.note, class_="wrap") if row.note else None)
