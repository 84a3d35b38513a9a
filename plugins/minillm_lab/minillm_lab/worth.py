"""A plugin's measured effect, from paired runs: loss at equal tokens and equal seconds, speed, memory.

- Pairs (same seed, same data, with and without the plugin): Student's t on their differences gives a
  95 % confidence interval. Seed variance, which both runs of a pair share, cancels.
- Lengths: the reference set is trained for a few more lengths. Each is the number of steps that it
  makes in the time of another set, so that its loss there is measured. Between two close lengths, the
  loss is interpolated linearly in the logarithm of the steps.
- At equal seconds each pair has its own time ratio: if these vary, as on a machine with other load,
  the interval is wider.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, linear_regression, median, stdev
from typing import Any

from minillm_lab.study import Trained

Runs = Mapping[int, Trained]  # by seed
Lengths = Mapping[int, Runs]  # by steps

# Pairs

MOST_PAIRS = 1000
"""Larger numbers of needed pairs are not reported."""

_EXACT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""The 97.5 % quantiles of Student's t with 1, 2, ... 20 degrees of freedom."""


@dataclass(frozen=True)
class Effect:
    """The effect of a change on a measurement: variant minus baseline, over pairs."""

    effect: float  # the mean difference
    low: float | None  # of the 95 % interval; None for a single pair
    high: float | None
    pairs: int
    distinguishable: bool  # the interval excludes 0
    pairs_needed: int | None  # to distinguish it from 0; None: it is already, or > MOST_PAIRS

    def data(self) -> dict[str, Any]:
        """Return the effect as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Noise:
    """The random part of a paired difference, estimated from several sets of runs."""

    spread: float  # its standard deviation
    freedom: int  # degrees of freedom of the estimate


def noise_of(losses: Sequence[Sequence[float]]) -> Noise | None:
    """Estimate the noise of differences between sets of runs with the same seeds.

    A loss is the sum of an effect of its set, one of its seed, and noise: a randomised block design. Of
    two sets this is the standard deviation of their differences; with more sets it is known better.

    Args:
        losses: of each set, one per seed, in the order of the seeds.

    Returns:
        The noise; None with less than two sets or two seeds.
    """
    sets, seeds = len(losses), len(losses[0]) if losses else 0
    if sets < 2 or seeds < 2:
        return None
    whole = fmean(itertools.chain(*losses))
    by_seed = [fmean(column) for column in zip(*losses, strict=True)]
    squares = math.fsum(
        (loss - fmean(row) - by_seed[seed] + whole) ** 2
        for row in losses
        for seed, loss in enumerate(row)
    )
    freedom = (sets - 1) * (seeds - 1)
    return Noise(math.sqrt(2.0 * squares / freedom), freedom)


NEAR = 3.0
"""Sets of runs show the noise of a difference if their distance from ours is within this factor of it."""


def near(sets: Sequence[Runs], ours: Runs, others: Runs) -> list[Runs]:
    """Choose the sets of runs that are about as noisy as two that are compared: ours, and those about as far away.

    Runs that learn badly differ more from seed to seed: without `muon` by ten times as much. So sets that are
    much nearer to ours than the others show too little noise, and sets much further away too much; a distance
    within the noise is none. Where a set's mean loss lies says nothing of how its runs scatter around it, so
    the choice does not bias the noise.
    """

    def differences(one: Runs) -> list[float]:
        return [run.val_loss - ours[seed].val_loss for seed, run in one.items() if seed in ours]

    def distance(one: Runs) -> float:
        return abs(fmean(differences(one))) if differences(one) else math.inf

    apart, pairs = distance(others), differences(others)
    reach = NEAR * max(apart, stdev(pairs) if len(pairs) > 1 else 0.0)
    rest = (one for one in sets if any(one.get(seed) != run for seed, run in ours.items()))
    return [ours, *(one for one in rest if apart / NEAR <= distance(one) <= reach)]


def noise_among(
    sets: Sequence[Runs], seeds: Sequence[int], figure: Callable[[Trained], float]
) -> Noise | None:
    """Estimate the noise of a figure's differences from the sets that have a run of each of these seeds."""
    whole = [one for one in sets if all(seed in one for seed in seeds)]
    return noise_of([[figure(one[seed]) for seed in seeds] for one in whole])


def effect_of(differences: Sequence[float], noise: Noise | None = None) -> Effect:
    """Estimate the mean effect and its interval from paired differences.

    Args:
        differences: variant minus baseline, one per pair; at least one.
        noise: of a difference, where more is known of it than these differences show.

    Raises:
        ValueError: the sequence is empty, or a value is not finite.
    """
    n = len(differences)
    if not n or not all(map(math.isfinite, differences)):
        raise ValueError(f"an effect needs finite differences, not {list(differences)}")
    mean = math.fsum(differences) / n
    if noise is not None:
        spread, freedom = noise.spread, noise.freedom
    elif n == 1:
        return Effect(mean, None, None, 1, False, None)
    else:
        spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
        freedom = n - 1
    half = quantile(freedom) * spread / math.sqrt(n)
    tells = abs(mean) > half
    return Effect(mean, mean - half, mean + half, n, tells, None if tells else needed(mean, spread))


def needed(mean: float, spread: float) -> int | None:
    """Compute the fewest pairs whose interval would exclude 0, with this mean and standard deviation."""
    for n in range(2, MOST_PAIRS + 1):
        if quantile(n - 1) * spread / math.sqrt(n) < abs(mean):
            return n
    return None


def quantile(freedom: int) -> float:
    """Compute the 97.5 % quantile of Student's t.

    Uses a table up to 20 degrees of freedom; beyond them the Cornish-Fisher expansion around the normal
    quantile, whose error is below 1e-5 there.
    """
    if freedom <= len(_EXACT):
        return _EXACT[freedom - 1]
    z = 1.959963985
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


# Lengths

GAP = 1.25
"""Maximum ratio of two trained lengths between which a loss is interpolated.

With loss = a steps^-b the line is too high by at most (b log GAP)^2 / 8 of the reducible part:
0.2 % of it at b = 0.5.
"""

BEYOND = 1.02
"""Maximum factor of extrapolation beyond two trained lengths."""


def extra_lengths(steps: int, wanted: Iterable[int]) -> list[int]:
    """Choose a few of the wanted lengths to train, so that all others can be interpolated.

    Args:
        steps: the length that is trained anyway.
        wanted: lengths at which the loss is needed.

    Returns:
        Lengths to train besides ``steps``, shortest first. One or two wanted lengths are all trained,
        unless both are on the same side of ``steps``.
    """
    chosen: list[int] = []
    for side in (
        sorted({one for one in wanted if one > steps}),
        sorted({one for one in wanted if one < steps}, reverse=True),
    ):
        if all(neighbours(one, {steps, *chosen}) for one in side):
            continue
        last, left = steps, side
        while left:
            near = [one for one in left if _near(last, one)]
            last = near[-1] if near else left[0]
            left = left[left.index(last) + 1 :]
            chosen.append(last)
    return sorted(chosen)


def neighbours(steps: int, trained: Collection[int]) -> tuple[int, int] | None:
    """Find two trained lengths to interpolate ``steps`` from: the two around it, or the nearest two.

    Returns:
        ``steps`` twice if it was trained itself. None if no trained lengths are close enough.
    """
    if steps in trained:
        return steps, steps
    ordered = sorted(trained)
    for below, above in itertools.pairwise(ordered):
        first = below / BEYOND if below == ordered[0] else below
        last = above * BEYOND if above == ordered[-1] else above
        if first <= steps <= last and _near(below, above):
            return below, above
    return None


def loss_at(steps: int, losses: Mapping[int, float], between: tuple[int, int]) -> float:
    """Interpolate the loss after ``steps`` between two lengths, in the logarithm of the steps."""
    below, above = between
    if below == above:
        return losses[below]
    share = math.log(steps / below) / math.log(above / below)
    return (1 - share) * losses[below] + share * losses[above]


def _near(one: int, other: int) -> bool:
    return max(one, other) <= GAP * min(one, other)


# Both

ALIKE = 0.01
"""Relative difference of speeds up to which the runs at equal tokens serve as those at equal seconds."""

UNIT = "nats a token of held-out text, at equal tokens; below 0 is better"


def worth(
    having: Lengths,
    without: Lengths,
    steps: int,
    *,
    reference: bool,
    pairs: int,
    sets: Sequence[Runs] = (),
) -> dict[str, Any]:
    """Compute a plugin's effects: differences, with minus without, and ratios, with over without.

    Args:
        having: runs with the plugin.
        without: runs without it.
        steps: of the runs at equal tokens.
        reference: True: the runs with it have several lengths; False: the runs without it.
        pairs: the expected number of pairs.
        sets: the runs at equal tokens of all sets, whose noise counts for the loss: of those :func:`near`
            the runs with the plugin. None: that of the pairs alone.

    Returns:
        The effects as in ablation.json, the loss at equal tokens first.
    """
    ours, others = having.get(steps, {}), without.get(steps, {})
    seeds = sorted(ours.keys() & others.keys())
    failed = pairs - len(seeds)
    if not seeds:
        return {"effect": None, "low": None, "high": None, "failed": failed}
    rates = [ours[s].tokens_per_second / others[s].tokens_per_second for s in seeds]
    peaks = {"with": _largest(ours.values()), "without": _largest(others.values())}
    more = [a / b for s in seeds if (a := ours[s].peak_bytes) and (b := others[s].peak_bytes)]
    noise = noise_among(near(sets, ours, others), sorted(ours), lambda run: run.val_loss)
    return {
        **effect_of([ours[s].val_loss - others[s].val_loss for s in seeds], noise).data(),
        **({"pooled": True} if noise else {}),
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
    """Estimate a ratio and its interval from paired ratios; 1 means no effect."""
    found = effect_of([math.log(ratio) for ratio in ratios]).data()
    times = {key: found[key] for key in ("effect", "low", "high")}
    return found | {key: None if log is None else math.exp(log) for key, log in times.items()}


def steps_in_time(runs: Runs, reference: Runs, steps: int) -> int | None:
    """Compute the steps that the reference makes while the other runs make ``steps``.

    Returns:
        ``steps`` if they are equally fast; None while either has no run.
    """
    if not runs or not reference:
        return None
    own, others = (median(run.seconds for run in some.values()) for some in (runs, reference))
    share = own / others
    return steps if abs(share - 1) <= ALIKE else max(1, round(steps * share))


def _in_equal_time(runs: Runs, reference: Lengths, steps: int, sign: int) -> dict[str, Any] | None:
    """Compare the runs' loss with the reference's at equal seconds: the difference, times a sign.

    Each pair uses its own time, so that the interval includes the variance of the speeds.

    Returns:
        The effect; ``steps``, the number that the reference makes in that time; ``between``, the trained
        lengths between which its loss is interpolated, equal if it was measured. None if the
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
        - slope * (time - usual)  # corrects for the pair's own time, in reference steps
        for seed, time in zip(seeds, times, strict=True)
    ]
    found = effect_of([sign * difference for difference in differences])
    return {**found.data(), "steps": at, "between": list(between)}


def _slope(reference: Lengths, steps: int) -> float:
    """Estimate the slope of the reference's loss over the logarithm of its steps.

    Least squares through the trained lengths. For a single length, through the second half of its runs,
    where learning-rate decay makes it steeper: the interval is then too wide rather than too narrow.
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


FINEST = 9
"""Maximum decimals of a ratio: 1e-9 of 80 GB is 80 bytes."""


WIDEST = 100.0
"""Quotient of the ends of a ratio's interval from which it shows nothing but that there are too few pairs."""


def too_wide(ratio: Mapping[str, Any]) -> bool:
    """Return whether a ratio's 95 % interval contains 1 and is too wide to be worth reading."""
    low, high = ratio["low"], ratio["high"]
    return low is not None and low <= 1 <= high and high > WIDEST * low


def times(value: float) -> str:
    """Format a ratio with three decimals, or more if a value other than 1 would round to 1."""
    apart = abs(value - 1)
    decimals = math.ceil(-math.log10(apart) - 1e-9) if apart else 0
    return f"{value:.{min(max(3, decimals), FINEST)}f}"
