"""The runs of an ablation, as lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from minillm_core.measure import page
from minillm_core.measure.figure import Line, Size, line_chart
from minillm_core.measure.markup import Markup, tag
from minillm_core.measure.ticks import COUNT, TIME, Axis

__all__ = ["at_equal_tokens", "curves", "finished"]

Json = Mapping[str, Any]

TOKENS, SECONDS = Axis("tokens", COUNT), Axis("time of training", TIME)
LOSS = Axis("held-out loss, nats a token")
LATER = 0.5  # share of a run from which on it is shown closer


def finished(result: Json) -> list[Json]:
    """The runs that did not fail."""
    return [run for run in result["runs"] if "error" not in run]


def at_equal_tokens(result: Json) -> list[Json]:
    """Those with the steps that all sets were given."""
    return [run for run in finished(result) if run["steps"] == result["steps"]]


def curves(result: Json) -> Markup:
    """Loss against tokens and against seconds, and what a plugin does to it on the way."""
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
        "A thin line is one run. Seconds are those of training and of waiting for data; "
        "compilation and validation are not in them, and the first set of plugins was run again for "
        "as many steps as it makes in the time of others."
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
        first = next(iter(result["variants"]))
        changed = one["without"] if one["with"] == first else one["with"]
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
