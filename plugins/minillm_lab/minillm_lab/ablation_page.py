"""The HTML page of an ablation: each plugin's effects, the loss curves, and the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from minillm_core.commands import counted, few, listed, plain
from minillm_core.studies import amount, sized
from minillm_lab import page
from minillm_lab.card import interval, signed
from minillm_lab.figure import (
    SECONDS,
    TOKENS,
    Axis,
    Interval,
    Line,
    Size,
    interval_chart,
    line_chart,
)
from minillm_lab.markup import Markup, joined, tag
from minillm_lab.worth import MOST_PAIRS, times, too_wide

Json = Mapping[str, Any]

LOSS = Axis("held-out loss, nats a token")
LATER = 0.5  # fraction of a run after which a zoomed plot begins


def ablation_page(result: Json) -> str:
    """Render the page of an ablation.json, finished or not."""
    names = list(result["plugins"])
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return page.document(
        f"What {listed(shown)} {'is' if len(names) == 1 else 'are'} worth",
        tag("p", _headline(result), class_="lead"),
        _state(result),
        _effects_section(result),
        _curves(result),
        _sets(result),
        _failed(result),
        _what_was_run(result),
    )


def _headline(result: Json) -> str:
    """Summarise the confidence intervals at equal tokens in a sentence."""
    words = {
        "better": "the loss at equal tokens is lower with",
        "worse": "the loss at equal tokens is higher with",
        "unknown": "the effect on the loss at equal tokens is within noise for",
        "single": "one pair of runs does not tell the effect on the loss at equal tokens of",
        "missing": "no pair of runs has finished for",
    }
    by: dict[str, list[str]] = {kind: [] for kind in words}
    for name, one in result["plugins"].items():
        known = "single" if one["low"] is None else verdict(one)
        by["missing" if one["effect"] is None else known].append(name)
    if result.get("finished"):
        words["missing"] = "all pairs of runs failed for"
    parts = (f"{words[verdict]} {listed(names)}" for verdict, names in by.items() if names)
    return page.sentence(*parts, joint="; ")


def _state(result: Json) -> Markup:
    what = (
        f"{_design(result)}: {counted(len(result['seeds']), 'pair')} of runs with "
        f"{counted(result['steps'], 'step')} each on {result.get('device', 'a device of no name')}. "
        "Both runs of a pair have the same seed, see the same text in the same order, and are "
        "evaluated on the same held-out text."
    )
    made = tag("p", what, class_="soft")
    if result.get("finished"):
        return made
    words = f"Not finished: based on {counted(len(result['runs']), 'run')} so far."
    if (error := result.get("ended")) is not None:
        words += f" It was ended by an error: {plain(error)}."
    return joined(made, tag("p", words, class_="warn"))


def _design(result: Json) -> str:
    words = {
        "one at a time": "Each plugin alone against none of them",
        "leave one out": "All plugins against all but one",
        "side by side": "Each plugin with its companions against the companions alone",
    }
    return words[result["design"]]


def _sets(result: Json) -> Markup:
    head = ["set", ">parameters", ">loss, equal tokens", ">loss, other lengths"]
    rows = [_set_cells(result, name, one) for name, one in result["variants"].items()]
    how = "Means over seeds, with the lowest and the highest; speed is the median, memory the peak."
    return page.section(
        "Sets of plugins",
        tag("p", how, class_="soft"),
        page.table([*head, ">tokens/s", ">peak memory", ">runs", "plugins"], rows),
    )


def _set_cells(result: Json, name: str, one: Json) -> Iterator[object]:
    equal = [run for run in at_equal_tokens(result) if run["variant"] == name]
    runs = [run for run in finished(result) if run["variant"] == name]
    speeds = [run["tokens_per_second"] for run in equal]
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    yield name
    yield f"{one['parameters']:,}"
    yield _losses(equal) or ("none" if result.get("finished") else "none yet")
    yield _other_lengths(runs, result["steps"])
    yield f"{median(speeds):,.0f}" if speeds else ""
    yield sized(max(peaks)) if peaks else "unknown"
    failed = sum(run["variant"] == name and "error" in run for run in result["runs"])
    yield joined(
        f"{len(runs)}", tag("small", f"{failed} failed", class_="worse") if failed else None
    )
    yield ", ".join(one["plugins"]) or "none"


def _other_lengths(runs: Sequence[Json], steps: int) -> Markup | str:
    """Show a plugin set's loss at further lengths, trained for the time that another set took."""
    lengths = sorted({length_of(run) for run in runs} - {steps})
    words = [
        joined(
            _losses([run for run in runs if length_of(run) == length]),
            tag("small", counted(length, "step")),
        )
        for length in lengths
    ]
    return joined(*words) if words else ""


def _losses(runs: Sequence[Json]) -> Markup | str:
    losses = [run["curve"][-1]["val_loss"] for run in runs]
    if not losses:
        return ""
    spread = tag("small", f"{min(losses):.4f} to {max(losses):.4f}") if len(losses) > 1 else None
    return joined(f"{fmean(losses):.4f}", spread)


def _failed(result: Json) -> Markup | None:
    rows = [
        (f"{run['variant']}, seed {run['seed']}, {counted(run['steps'], 'step')}", run["error"])
        for run in result["runs"]
        if "error" in run
    ]
    rows += [(name, f"not measured: {why}") for name, why in result["not_judged"].items()]
    return (
        page.section("What is missing", page.table(["run or plugin", "why"], rows))
        if rows
        else None
    )


def _what_was_run(result: Json) -> Markup:
    train, model = result.get("train") or {}, result.get("model") or {}
    data, tokens = result.get("data"), [r["tokens"] for r in finished(result)]
    words = data.get("description") if isinstance(data, Mapping) else data
    shape = {
        key: model.get(key) for key in ("layers", "dim", "heads", "kv_heads", "hidden", "vocab")
    }
    options = [
        tag("div", f"{name}: {page.pairs(table) or 'no options'}")
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
                "length": counted(result["steps"], "step")
                + (f", {amount(max(tokens))} tokens at most" if tokens else ""),
                "preset": result.get("preset"),
                "begins with": result.get("begins_with"),
                "model": page.pairs(shape),
                "training": page.pairs(train),
                "plugins": joined(*options) if options else "",
                "data": words,
                "held out": f"{result['eval_tokens']:,} tokens" if "eval_tokens" in result else "",
                "backend": ", ".join(
                    result[key] for key in ("backend", "device", "dtype") if result.get(key)
                ),
                "hardware": page.pairs(result.get("hardware") or {}),
                "versions": page.pairs(result.get("versions") or {}),
                "commit": result.get("commit"),
                "date": result.get("date"),
            }
        ),
    )


# Effects


def _effects_section(result: Json) -> Markup:
    """Show loss at equal tokens and at equal seconds, speed and memory: as figures and as a table."""
    plugins: Mapping[str, Json] = result["plugins"]
    loss = Axis("nats a token, with minus without (← better)")
    timed = {name: one.get("equal_seconds") for name, one in plugins.items()}
    speeds = {name: one.get("speed") for name, one in plugins.items()}
    why = {name: _missing(result, one) for name, one in plugins.items()}
    figures = [
        page.small(
            "Loss at equal tokens",
            interval_chart([_interval_row(n, one, why[n]) for n, one in plugins.items()], loss),
        ),
        page.small(
            "Loss at equal seconds",
            interval_chart([_interval_row(n, timed[n], why[n]) for n in plugins], loss),
        ),
        page.small(
            "Tokens a second",
            interval_chart(
                [_times_row(n, speeds[n], why[n], better_below=False) for n in plugins],
                Axis("times as many (better →)"),
                reference=1.0,
            ),
        ),
    ]
    how = "Dots are means over pairs, with the plugin minus without it; lines are 95 % intervals."
    if result.get("equal_seconds", True):
        how += (
            " Equal seconds: the baseline is also trained for as long as the plugin's run took "
            "(interpolated in log steps where needed). Timing noise is included in the interval."
        )
    if any(one.get("pooled") for one in plugins.values()):
        how += (
            " Intervals of the loss at equal tokens pool the noise of all sets with similar losses."
        )
    for name, one in plugins.items():
        if one.get("together"):
            how += f" {name} is left out together with what builds on it: {few(one['together'])}."
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


def _interval_row(name: str, effect: Json | None, why: str) -> Interval:
    if effect is None or effect.get("effect") is None:
        return Interval(name, None, note=why)
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    notes = ["" if effect["distinguishable"] else _undecided(effect), _read_between(effect)]
    note = "; ".join(filter(None, notes))
    return Interval(name, mean, low, high, verdict(effect), _in_words(effect), note)


def _times_row(name: str, effect: Json | None, why: str, *, better_below: bool) -> Interval:
    """Build the row of a ratio, with over without the plugin; 1 means no effect."""
    if effect is None:
        return Interval(name, None, note=why)
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    words = interval(times, mean, low, high, " ×")
    if low is not None and not low <= 1 <= high:
        judged = "better" if (mean < 1) == better_below else "worse"
        return Interval(name, mean, low, high, judged, words)
    note = _undecided(effect) if "pairs_needed" in effect else "within noise"
    if too_wide(effect):
        return Interval(
            name, mean, verdict="unknown", words=f"{times(mean)} ×, too few pairs", note=note
        )
    return Interval(name, mean, low, high, "unknown", words, note)


def _read_between(effect: Json) -> str:
    """Name the lengths between which the baseline's loss is interpolated; empty where it is measured."""
    below, above = effect.get("between") or (0, 0)
    return f"interpolated between {below:,} and {above:,} steps" if below != above else ""


def _in_words(effect: Json) -> str:
    """Format the mean and its interval, with a typographic minus as wide as the plus."""
    words = interval(signed, effect["effect"], effect["low"], effect["high"])
    return words.replace("-", "−")


def _undecided(effect: Json) -> str:
    if effect["low"] is None:
        return "one pair has no interval"
    if effect["low"] == effect["high"]:
        return "the same in every pair"
    needs = effect["pairs_needed"]
    more = f"about {needs} pairs" if needs else f"more than {MOST_PAIRS:,} pairs"
    return f"within noise; {more} would settle it"


def _missing(result: Json, one: Json) -> str:
    """Explain why a plugin has no result: runs are pending, or failed once the ablation is finished."""
    failures = [run for run in result["runs"] if "error" in run]
    if one["effect"] is not None:  # known at equal tokens
        reference = next(iter(result["variants"]))
        if reference not in (one["with"], one["without"]):
            return f"not measured: runs of other lengths are {reference}'s alone"
        if not result.get("equal_seconds", True):
            return "not measured: --no-equal-seconds"
        if result.get("finished"):
            return "the runs for that time failed"
        return "not run yet, or failed" if failures else "not run yet"
    gone = one.get("failed", 0)
    names = {one["with"], one["without"]}
    failed = len({run["seed"] for run in failures if run["variant"] in names})
    words = {"failed": gone if result.get("finished") else failed}
    words["not run yet"] = max(0, gone - words["failed"])
    return ", ".join(f"{counted(n, 'pair')} {what}" for what, n in words.items() if n)


def verdict(effect: Json) -> str:
    """Classify an effect on the loss by its interval: "better", "worse" or "unknown"."""
    if effect.get("effect") is None or not effect.get("distinguishable"):
        return "unknown"
    return "better" if effect["effect"] < 0 else "worse"


def _effect_cells(name: str, one: Json, why: str) -> list[object]:
    if one["effect"] is None:
        return [name, tag("small", why, class_="wrap"), "", "", ""]
    return [
        name,
        _cell(_interval_row(name, one, why)),
        _cell(_interval_row(name, one["equal_seconds"], why)),
        _cell(_times_row(name, one["speed"], why, better_below=False)),
        _memory(name, one),
    ]


def _memory(name: str, one: Json) -> object:
    peak = one["peak_bytes"]
    if "effect" in peak:
        return _cell(_times_row(name, peak, "", better_below=True))
    having, without = peak["with"], peak["without"]
    return f"{times(having / without)} ×" if having and without else "unknown"


def _cell(row: Interval) -> Markup:
    words = tag("span", row.words, class_=row.verdict)
    return joined(words, tag("small", row.note, class_="wrap") if row.note else None)


# Curves


def finished(result: Json) -> list[Json]:
    """List the successful runs."""
    return [run for run in result["runs"] if "error" not in run]


def at_equal_tokens(result: Json) -> list[Json]:
    """List the finished runs that have the number of tokens common to all plugin sets."""
    return [run for run in finished(result) if length_of(run) == result["steps"]]


def length_of(run: Json) -> int:
    """Return a run's length in steps of the first plugin set, which may have other tokens."""
    return run.get("length", run["steps"])


def _curves(result: Json) -> Markup:
    """Plot the loss against tokens and seconds, and each plugin's effect during training."""
    colours = {name: number for number, name in enumerate(result["variants"])}
    equal = at_equal_tokens(result)

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

    def drawn(
        runs: Sequence[Json], key: str, x: Axis, share: float = 0.0
    ) -> Callable[[Size], Markup]:
        def draw(size: Size) -> Markup:
            return line_chart(lines(runs, key, share), x, LOSS, size, from_zero=not share)

        return draw

    figures = [
        page.chart("Loss against tokens", drawn(equal, "tokens", TOKENS)),
        page.chart("Loss against seconds", drawn(finished(result), "seconds", SECONDS)),
        page.chart("Loss against tokens, the second half", drawn(equal, "tokens", TOKENS, LATER)),
        page.chart(
            "Loss with minus loss without, same seed",
            lambda size: _differences(result, equal, colours, size),
        ),
    ]
    how = (
        "A thin line is one run. Seconds count training and waiting for data, not compilation and "
        "evaluation. The baseline is also run for as many steps as it makes in the time of the others."
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
    """Plot each plugin's paired differences (faint) and their mean, if both were evaluated after as many tokens."""
    by = {(run["variant"], run["seed"]): run["curve"] for run in runs}
    faint, means = [], []
    for plugin, one in result["plugins"].items():
        first = next(iter(result["variants"]))
        changed = one["without"] if one["with"] == first else one["with"]
        pairs = []
        for seed in result["seeds"]:
            having, without = by.get((one["with"], seed)), by.get((one["without"], seed))
            if having and without:
                at = {point["tokens"]: point["val_loss"] for point in without}
                points = [
                    (p["tokens"], p["val_loss"] - at[p["tokens"]])
                    for p in having
                    if p["tokens"] in at
                ]
                pairs += [points] if points else []
        number = colours[changed]
        faint += [Line(plugin, number, pair, faint=True) for pair in pairs if len(pairs) > 1]
        if pairs:
            mean = [(at[0][0], fmean(p[1] for p in at)) for at in zip(*pairs, strict=False)]
            means.append(Line(f"{plugin}, mean of {len(pairs)}", number, mean))
    return line_chart(
        [*faint, *means], TOKENS, Axis("nats a token; below 0 is better"), size, level=0.0
    )
