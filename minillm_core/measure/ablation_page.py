"""An ablation as a page: what each plugin is worth, how the runs went, and what was run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from minillm_core.measure import page
from minillm_core.measure.figure import Interval, Line, Size, interval_chart, line_chart
from minillm_core.measure.markup import Markup, joined, tag
from minillm_core.measure.ticks import COUNT, TIME, Axis
from minillm_core.plan.render import amount, sized

__all__ = ["ablation_page"]

Json = Mapping[str, Any]

TOKENS, SECONDS = Axis("tokens", COUNT), Axis("time of training", TIME)
LOSS = Axis("held-out loss, nats a token")
LATER = 0.5  # share of a run from which on it is shown closer


def ablation_page(result: Json) -> str:
    """The page of an ablation.json, finished or not."""
    names = list(result["plugins"])
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return page.document(
        f"What {_and(shown)} {'is' if len(names) == 1 else 'are'} worth",
        tag("p", _headline(result), class_="lead"),
        _state(result),
        _effects(result),
        _figures(result),
        _sets(result),
        _failed(result),
        _what_was_run(result),
    )


def _headline(result: Json) -> str:
    """What the intervals at equal tokens say, in words."""
    by: dict[str, list[str]] = {"better": [], "worse": [], "unknown": [], "missing": []}
    for name, one in result["plugins"].items():
        by["missing" if one["effect"] is None else _verdict(one)].append(name)
    told = {
        "better": "the loss at equal tokens is lower with",
        "worse": "the loss at equal tokens is higher with",
        "unknown": "no effect on the loss at equal tokens is distinguishable for",
        "missing": "there is no pair of runs that tells of",
    }
    line = "; ".join(f"{told[verdict]} {_and(names)}" for verdict, names in by.items() if names)
    return f"{line[:1].upper()}{line[1:]}."


def _state(result: Json) -> Markup:
    what = (
        f"{_design(result)}: {len(result['seeds'])} pairs of runs with {result['steps']:,} steps "
        f"each on {result.get('device', 'a device of no name')}. Both runs of a pair have the same "
        "seed, the same text in the same order, and are held to the same text that was kept back."
    )
    made = tag("p", what, class_="soft")
    if result.get("finished"):
        return made
    runs = len(result["runs"])
    told = f"Not finished: what {runs} run{'s' if runs != 1 else ''} tell so far."
    return joined(made, tag("p", told, class_="warn"))


def _design(result: Json) -> str:
    told = {
        "one at a time": "Each plugin alone against none of them",
        "leave one out": "All plugins against all but one",
    }
    return told[result["design"]]


def _effects(result: Json) -> Markup:
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
                [_speed(n, speeds[n], one) for n, one in plugins.items()],
                Axis("times as many (better →)"),
                reference=1.0,
            ),
        ),
    ]
    how = "Dots are means over pairs, with the plugin minus without it; lines are 95 % intervals."
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
        return Interval(name, None, note=_missing(one))
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    note = "" if effect["distinguishable"] else _undecided(effect)
    return Interval(name, mean, low, high, _verdict(effect), _told(effect), note)


def _speed(name: str, effect: Json | None, one: Json) -> Interval:
    if effect is None:
        return Interval(name, None, note=_missing(one))
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    told = f"{mean:.3f} ×" if low is None else f"{mean:.3f} × [{low:.3f}, {high:.3f}]"
    known = low is not None and not low <= 1 <= high
    verdict = ("better" if mean > 1 else "worse") if known else "unknown"
    return Interval(name, mean, low, high, verdict, told, "" if known else "not distinguishable")


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


def _verdict(effect: Json) -> str:
    if effect.get("effect") is None or not effect.get("distinguishable"):
        return "unknown"
    return "better" if effect["effect"] < 0 else "worse"


def _effect_cells(name: str, one: Json) -> list[object]:
    if one["effect"] is None:
        return [name, tag("small", _missing(one), class_="wrap"), "", "", ""]
    speed, peak = _speed(name, one["speed"], one), one["peak_bytes"]
    memory = "unknown"
    if peak["with"] and peak["without"]:
        memory = f"{peak['with'] / peak['without']:.3f} ×"
    return [
        name,
        _cell(_row(name, one, one)),
        _cell(_row(name, one["equal_seconds"], one)),
        _cell(speed),
        memory,
    ]


def _cell(row: Interval) -> Markup:
    told = tag("span", row.told, class_=row.verdict)
    return joined(told, tag("small", row.note) if row.note else None)


def _figures(result: Json) -> Markup:
    colours = {name: number for number, name in enumerate(result["variants"])}
    equal = [run for run in _runs(result) if run["steps"] == result["steps"]]
    timed = [run for run in _runs(result) if run["steps"] == _timed(result, run["variant"])]

    def lines(runs: Sequence[Json], key: str, share: float = 0.0) -> list[Line]:
        return [
            Line(
                f"{run['variant']}, seed {run['seed']}",
                colours[run["variant"]],
                [
                    (point[key], point["val_loss"])
                    for point in run["curve"]
                    if point[key] >= share * run["curve"][-1][key]
                ],
            )
            for run in runs
        ]

    def drawn(runs: Sequence[Json], key: str, x: Axis, share: float = 0.0) -> Any:
        def draw(size: Size) -> Markup:
            return line_chart(lines(runs, key, share), x, LOSS, size, from_zero=not share)

        return draw

    figures = [
        page.chart("Loss against tokens", drawn(equal, "tokens", TOKENS)),
        page.chart("Loss against seconds", drawn(timed, "seconds", SECONDS)),
        page.chart("Loss against tokens, the second half", drawn(equal, "tokens", TOKENS, LATER)),
        page.chart(
            "Loss with minus loss without, same seed",
            lambda size: _differences(result, equal, colours, size),
        ),
    ]
    how = (
        "A thin line is one run. Seconds are those of training and of waiting for data; "
        "compilation and validation are not in them, and each set of plugins was run again for as "
        "many steps as it makes in the time of the first."
    )
    return page.section(
        "Runs",
        tag("p", how, class_="soft"),
        page.legend(colours.items()),
        tag("div", *figures, class_="charts"),
    )


def _differences(
    result: Json, runs: Sequence[Json], colours: Mapping[str, int], size: Size
) -> Markup:
    """Each plugin's pairs, faint, and their mean, at every validation that both runs had."""
    by = {(run["variant"], run["seed"]): run["curve"] for run in runs}
    faint, means = [], []
    for plugin, one in result["plugins"].items():
        changed = one["with"] if result["design"] == "one at a time" else one["without"]
        pairs = []
        for seed in result["seeds"]:
            having, without = by.get((one["with"], seed)), by.get((one["without"], seed))
            if having and without:
                at = {point["step"]: point["val_loss"] for point in without}
                pairs.append(
                    [
                        (p["tokens"], p["val_loss"] - at[p["step"]])
                        for p in having
                        if p["step"] in at
                    ]
                )
        number = colours[changed]
        faint += [Line(plugin, number, pair, faint=True) for pair in pairs if len(pairs) > 1]
        if pairs:
            mean = [(at[0][0], fmean(p[1] for p in at)) for at in zip(*pairs, strict=False)]
            means.append(Line(f"{plugin}, mean of {len(pairs)}", number, mean))
    return line_chart(
        [*faint, *means], TOKENS, Axis("nats a token; below 0 is better"), size, level=0.0
    )


def _sets(result: Json) -> Markup:
    head = ["set", ">parameters", ">loss, equal tokens", ">loss, equal seconds"]
    rows = [_set_cells(result, name, one) for name, one in result["variants"].items()]
    how = "Means over seeds, with the lowest and the highest; speed is the median, memory the peak."
    return page.section(
        "Sets of plugins",
        tag("p", how, class_="soft"),
        page.table([*head, ">tokens/s", ">peak memory", ">runs", "plugins"], rows),
    )


def _set_cells(result: Json, name: str, one: Json) -> Iterator[object]:
    runs = [run for run in _runs(result) if run["variant"] == name]
    equal = [run for run in runs if run["steps"] == result["steps"]]
    timed = [run for run in runs if run["steps"] == _timed(result, name)]
    speeds = [run["tokens_per_second"] for run in equal]
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    yield name
    yield f"{one['parameters']:,}"
    yield _losses(equal)
    yield joined(_losses(timed), tag("small", f"{_timed(result, name):,} steps") if timed else None)
    yield f"{median(speeds):,.0f}" if speeds else ""
    yield sized(max(peaks)) if peaks else "unknown"
    failed = sum(run["variant"] == name and "error" in run for run in result["runs"])
    yield joined(
        f"{len(runs)}", tag("small", f"{failed} failed", class_="worse") if failed else None
    )
    yield ", ".join(one["plugins"]) or "none"


def _losses(runs: Sequence[Json]) -> Markup | str:
    losses = [run["curve"][-1]["val_loss"] for run in runs]
    if not losses:
        return "none yet"
    spread = tag("small", f"{min(losses):.4f} to {max(losses):.4f}") if len(losses) > 1 else None
    return joined(f"{fmean(losses):.4f}", spread)


def _failed(result: Json) -> Markup | None:
    rows = [
        (f"{run['variant']}, seed {run['seed']}, {run['steps']:,} steps", run["error"])
        for run in result["runs"]
        if "error" in run
    ]
    rows += [(name, f"not judged: {why}") for name, why in result["not_judged"].items()]
    return (
        page.section("What is missing", page.table(["run or plugin", "why"], rows))
        if rows
        else None
    )


def _what_was_run(result: Json) -> Markup:
    train, model = result.get("train") or {}, result.get("model") or {}
    data, tokens = result.get("data"), [r["tokens"] for r in _runs(result)]
    told = data.get("description") if isinstance(data, Mapping) else data
    shape = {
        key: model.get(key) for key in ("layers", "dim", "heads", "kv_heads", "hidden", "vocab")
    }
    options = [
        tag("div", f"{name}: {_pairs(table) or 'no options'}")
        for name, table in sorted(
            {n: t for one in result["variants"].values() for n, t in one["options"].items()}.items()
        )
    ]
    return page.section(
        "What was run",
        page.facts(
            {
                "design": result["design"],
                "seeds": ", ".join(map(str, result["seeds"])),
                "length": f"{result['steps']:,} steps"
                + (f", {amount(max(tokens))} tokens at most" if tokens else ""),
                "preset": result.get("preset"),
                "model": _pairs(shape),
                "training": _pairs(train),
                "plugins": joined(*options) if options else "",
                "data": told,
                "held out": f"{result['eval_tokens']:,} tokens" if "eval_tokens" in result else "",
                "backend": _listed(
                    result.get("backend"), result.get("device"), result.get("dtype")
                ),
                "hardware": _pairs(result.get("hardware") or {}),
                "versions": _pairs(result.get("versions") or {}),
                "commit": result.get("commit"),
                "date": result.get("date"),
            }
        ),
    )


def _runs(result: Json) -> list[Json]:
    return [run for run in result["runs"] if "error" not in run]


def _timed(result: Json, variant: str) -> int:
    return result["variants"][variant]["steps_at_equal_seconds"]


def _pairs(table: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {_value(key, value)}" for key, value in table.items() if value is not None
    )


def _value(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return sized(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _listed(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
