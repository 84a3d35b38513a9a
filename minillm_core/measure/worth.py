"""What a plugin is worth, from the runs of two variants: loss at equal tokens and seconds, speed, memory.

At equal seconds the times of the pairs are part of the finding: where they differ from pair to pair,
as on a machine that does other things too, the interval is the wider for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, linear_regression, median
from typing import Any

from minillm_core.measure.ladder import loss_at, neighbours
from minillm_core.measure.paired import effect_of
from minillm_core.measure.rig import Trained

__all__ = ["ALIKE", "UNIT", "Lengths", "steps_in_time", "worth"]

ALIKE = 0.01
"""Speeds that differ by no more than this share: the run at equal tokens is the one at equal seconds."""

UNIT = "nats a token of held-out text, at equal tokens; below 0 is better"

Runs = Mapping[int, Trained]  # by seed
Lengths = Mapping[int, Runs]  # by steps


def worth(
    having: Lengths, without: Lengths, steps: int, *, reference: bool, pairs: int
) -> dict[str, Any]:
    """A plugin's effects: with it minus without it, or as many times.

    Args:
        having: runs with it.
        without: those without it.
        steps: of the runs at equal tokens.
        reference: the runs with it are of several lengths; else those without it.
        pairs: how many there should be.

    Returns:
        As in ablation.json; the loss at equal tokens comes first.
    """
    ours, others = having.get(steps, {}), without.get(steps, {})
    seeds = sorted(ours.keys() & others.keys())
    failed = pairs - len(seeds)
    if not seeds:
        return {"effect": None, "low": None, "high": None, "failed": failed}
    rates = [ours[s].tokens_per_second / others[s].tokens_per_second for s in seeds]
    peaks = {"with": _largest(ours.values()), "without": _largest(others.values())}
    more = [a / b for s in seeds if (a := ours[s].peak_bytes) and (b := others[s].peak_bytes)]
    return {
        **effect_of([ours[s].val_loss - others[s].val_loss for s in seeds]).data(),
        "unit": UNIT,
        "failed": failed,
        "equal_seconds": (
            _in_equal_time(others, having, steps, -1)
            if reference
            else _in_equal_time(ours, without, steps, 1)
        ),
        "speed": _times(rates),
        "peak_bytes": peaks | (_times(more) if more else {}),
    }


def _times(ratios: Sequence[float]) -> dict[str, Any]:
    """The effect behind the ratios of pairs, as many times: 1 is none."""
    found = effect_of([math.log(ratio) for ratio in ratios]).data()
    times = {key: found[key] for key in ("effect", "low", "high")}
    return found | {key: None if log is None else math.exp(log) for key, log in times.items()}


def steps_in_time(runs: Runs, reference: Runs, steps: int) -> int | None:
    """How many steps the reference makes in the time in which others make ``steps``.

    Returns:
        ``steps`` where they are equally fast; None while one of them has no run.
    """
    if not runs or not reference:
        return None
    own, others = (median(run.seconds for run in some.values()) for some in (runs, reference))
    share = own / others
    return steps if abs(share - 1) <= ALIKE else max(1, round(steps * share))


def _in_equal_time(runs: Runs, reference: Lengths, steps: int, sign: int) -> dict[str, Any] | None:
    """The runs' loss minus the reference's in as many seconds, times a sign.

    Each pair is held to its own time, so that what the speeds vary by is in the interval.

    Returns:
        The effect; ``steps``, which the reference makes in that time; ``between``, the trained
        lengths whose line tells its loss, the same twice where it was measured. None where the
        reference was not trained for such lengths.
    """
    at = steps_in_time(runs, reference[steps], steps)
    between = neighbours(at, reference) if at else None
    if at is None or between is None:
        return None
    below, above = (reference[length] for length in between)
    seeds = sorted(runs.keys() & reference[steps].keys() & below.keys() & above.keys())
    if not seeds:
        return None
    times = [math.log(runs[seed].seconds / reference[steps][seed].seconds) for seed in seeds]
    usual, slope = fmean(times), _slope(reference, steps)
    differences = [
        runs[seed].val_loss
        - loss_at(
            at,
            {between[0]: below[seed].val_loss, between[1]: above[seed].val_loss},
            between,
        )
        - slope * (time - usual)  # a pair's own time is as many steps more of the reference
        for seed, time in zip(seeds, times, strict=True)
    ]
    found = effect_of([sign * difference for difference in differences])
    return {**found.data(), "steps": at, "between": list(between)}


def _slope(reference: Lengths, steps: int) -> float:
    """How the reference's loss changes with the logarithm of its steps.

    By least squares through the trained lengths. Of a single one by the second half of its runs, which
    a falling learning rate makes steeper: the interval is then too wide rather than too narrow.
    """
    shared = set[int].intersection(*({*runs} for runs in reference.values()))
    if len(reference) > 1 and shared:
        losses = [fmean(runs[seed].val_loss for seed in shared) for runs in reference.values()]
        return linear_regression([math.log(length) for length in reference], losses).slope
    slopes = []
    for run in reference[steps].values():
        early = [point for point in run.curve if 0 < 2 * point.step <= run.steps]
        if early:
            fallen = run.val_loss - early[-1].val_loss
            slopes.append(fallen / math.log(run.steps / early[-1].step))
    return fmean(slopes) if slopes else 0.0


def _largest(runs: Iterable[Trained]) -> int | None:
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return max(peaks, default=None)
