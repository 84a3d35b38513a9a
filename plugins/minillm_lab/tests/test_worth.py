"""Tests of effects at equal seconds, on a machine whose speed varies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_lab.study import Point, Trained
from minillm_lab.worth import Runs, effect_of, noise_of, times, worth

STEPS = 100


def trained(seed: int, seconds: float, loss: float, steps: int = STEPS) -> Trained:
    half = Point(steps // 2, steps // 2, seconds / 2, loss + 0.5, None)
    end = Point(steps, steps, seconds, loss, None)
    return Trained(seed, steps, steps, seconds, steps / seconds, None, (half, end))


def runs(seconds: Sequence[float], loss: float = 4.0, steps: int = STEPS) -> Runs:
    return {
        seed: trained(seed, time, loss + 0.1 * seed, steps) for seed, time in enumerate(seconds)
    }


def timed(ours: Runs, *others: Runs) -> dict[str, Any]:
    lengths = {next(iter(some.values())).steps: some for some in others}
    return worth({STEPS: ours}, lengths, STEPS, reference=False, pairs=len(ours))["equal_seconds"]


def test_a_steady_machine_adds_nothing_to_the_interval() -> None:
    told = timed(runs([12.0] * 3, 3.9), runs([10.0] * 3), runs([12.0] * 3, 3.95, 120))
    assert told["steps"] == 120
    assert told["effect"] == pytest.approx(-0.05)
    assert told["high"] - told["low"] == pytest.approx(0, abs=1e-9)


def test_a_plugin_is_not_told_from_none_by_what_the_machine_does_beside() -> None:
    """The runs are equal; one set ran while the machine was busy at times."""
    usual, busy = runs([10.0, 10.2, 9.9, 10.0, 10.1]), runs([10.0, 19.0, 9.9, 14.0, 13.0])
    told = timed(usual, busy, runs([8.0] * 5, 4.4, 77))
    assert told["steps"] == 77
    assert told["effect"] == pytest.approx(-0.4)  # as for the usual pair
    assert told["low"] < 0 < told["high"]
    assert not told["distinguishable"]
    assert told["pairs_needed"] is not None


def test_of_a_single_length_the_way_there_tells_what_time_is_worth() -> None:
    steady = timed(runs([10.0] * 4, 3.99), runs([10.0] * 4))
    shaken = timed(runs([10.0, 10.1, 9.0, 11.0], 3.99), runs([10.0] * 4))
    assert steady["steps"] == shaken["steps"] == STEPS
    assert steady["distinguishable"]
    assert not shaken["distinguishable"]
    assert shaken["effect"] == pytest.approx(steady["effect"])
    assert shaken["high"] - shaken["low"] > 0.05


def test_both_designs_say_the_same_of_the_same_runs() -> None:
    slow, fast = runs([12.0, 12.5, 11.9], 3.9), runs([10.0, 10.4, 9.8])
    more = runs([12.0] * 3, 3.95, 120)
    told = timed(slow, fast, more)
    other = worth({STEPS: fast, 120: more}, {STEPS: slow}, STEPS, reference=True, pairs=3)
    flipped = other["equal_seconds"]
    assert flipped["effect"] == pytest.approx(-told["effect"])
    assert flipped["low"] == pytest.approx(-told["high"])


def test_speed_and_memory_have_their_intervals_too() -> None:
    def heavier(some: Runs, peaks: Sequence[int]) -> Runs:
        return {s: replace(one, peak_bytes=peaks[s]) for s, one in some.items()}

    ours = heavier(runs([12.5, 12.5, 12.5]), [220, 220, 220])
    others = heavier(runs([10.0, 10.0, 10.0]), [200, 200, 200])
    told = worth({STEPS: ours}, {STEPS: others}, STEPS, reference=False, pairs=3)
    for key, ratio in (("speed", 0.8), ("peak_bytes", 1.1)):
        assert told[key]["effect"] == pytest.approx(ratio)
        assert told[key]["low"] == pytest.approx(ratio)
        assert (told[key]["distinguishable"], told[key]["pairs"]) == (True, 3)
    assert (told["peak_bytes"]["with"], told["peak_bytes"]["without"]) == (220, 200)

    shaken = heavier(runs([9.0, 12.0, 10.0]), [190, 230, 210])
    told = worth({STEPS: shaken}, {STEPS: others}, STEPS, reference=False, pairs=3)
    for key in ("speed", "peak_bytes"):
        assert told[key]["low"] < 1 < told[key]["high"]
        assert not told[key]["distinguishable"]
        assert told[key]["pairs_needed"] > 3


def test_memory_that_nobody_counts_has_no_interval() -> None:
    told = worth(
        {STEPS: runs([1.0] * 3)}, {STEPS: runs([1.0] * 3)}, STEPS, reference=False, pairs=3
    )
    assert told["peak_bytes"] == {"with": None, "without": None}


@given(st.floats(0.01, 99))
def test_a_ratio_is_1_where_it_is(value: float) -> None:
    told = times(value)
    assert len(told) <= 12
    if value == 1:
        assert told == "1.000"
    elif abs(value - 1) >= 1e-9:
        assert float(told) != 1
        assert (float(told) > 1) == (value > 1)
    assert float(told) == pytest.approx(value, abs=0.0005 + 1e-9)  # halves are rounded


def test_examples_of_ratios() -> None:
    assert [times(v) for v in (0.9, 0.9996, 1.00002)] == ["0.900", "0.9996", "1.00002"]


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=6))
def test_noise_of_two_sets_is_that_of_their_differences(pairs: list[tuple[float, float]]) -> None:
    ours, others = zip(*pairs, strict=True)
    differences = [one - other for one, other in pairs]
    noise = noise_of([ours, others])
    assert noise is not None
    assert noise.freedom == len(pairs) - 1
    assert noise.spread == pytest.approx(np.std(differences, ddof=1), abs=1e-9)
    own, pooled = effect_of(differences), effect_of(differences, noise)
    assert (pooled.low, pooled.high) == pytest.approx((own.low, own.high), abs=1e-8)


def test_intervals_by_the_noise_of_many_sets_hold_as_often_as_they_say_and_are_narrower() -> None:
    draw, hit, narrower = np.random.default_rng(0), 0, []
    for _ in range(1000):
        worth = draw.normal(0, 0.1, (12, 1))  # twelve sets, two seeds
        losses = worth + draw.normal(0, 0.3, (1, 2)) + draw.normal(0, 0.02, (12, 2))
        noise, differences = noise_of(losses.tolist()), (losses[0] - losses[1]).tolist()
        found, own = effect_of(differences, noise), effect_of(differences)
        hit += found.low <= float(worth[0, 0] - worth[1, 0]) <= found.high  # type: ignore[operator]
        narrower.append((own.high - own.low) / (found.high - found.low))  # type: ignore[operator]
    assert 0.93 < hit / 1000 < 0.97
    assert np.median(narrower) > 2


def test_quiet_sets_do_not_narrow_the_interval_of_a_noisy_one() -> None:
    """Among 20 sets, one learns badly and differs ten times as much from seed to seed."""
    draw, hits = np.random.default_rng(0), {1: 0, 19: 0}
    worths, spreads = [*draw.normal(0, 0.02, 19), 0.6], [0.002] * 19 + [0.02]
    for _ in range(400):
        of_seed = draw.normal(0, 0.1, 3)
        sets = [
            {s: trained(s, 1.0, w + of_seed[s] + draw.normal(0, spread)) for s in range(3)}
            for w, spread in zip(worths, spreads, strict=True)
        ]
        for at in hits:
            told = worth(
                {STEPS: sets[0]}, {STEPS: sets[at]}, STEPS, reference=False, pairs=3, sets=sets
            )
            hits[at] += told["low"] <= worths[0] - worths[at] <= told["high"]
    assert all(0.92 < hit / 400 < 0.98 for hit in hits.values())


@pytest.mark.parametrize("losses", [[], [[1.0, 2.0]], [[1.0], [2.0]]])
def test_one_set_or_one_seed_shows_no_noise(losses: list[list[float]]) -> None:
    assert noise_of(losses) is None
