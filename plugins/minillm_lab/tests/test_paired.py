"""Tests of paired intervals, against SciPy where installed and against their definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_lab.worth import effect_of, quantile

differences = st.lists(st.floats(-5, 5), min_size=2, max_size=9)


@pytest.mark.parametrize(
    ("freedom", "published"),
    [
        (1, 12.706),
        (4, 2.776),
        (9, 2.262),
        (20, 2.086),
        (25, 2.060),
        (30, 2.042),
        (60, 2.000),
        (120, 1.980),
    ],
)
def test_quantiles_are_the_published_ones(freedom: int, published: float) -> None:
    assert quantile(freedom) == pytest.approx(published, abs=6e-4)


def test_quantiles_fall_towards_the_normals() -> None:
    found = [quantile(n) for n in range(1, 400)]
    assert all(a > b for a, b in itertools.pairwise(found))
    assert quantile(10**6) == pytest.approx(1.95996, abs=1e-4)


def test_an_interval_worked_by_hand() -> None:
    found = effect_of([-0.02, -0.04, -0.03, -0.05, -0.01])
    half = 2.776 * math.sqrt(0.00025) / math.sqrt(5)
    assert found.effect == pytest.approx(-0.03)
    assert (found.low, found.high) == pytest.approx((-0.03 - half, -0.03 + half))
    assert found.distinguishable
    assert found.pairs_needed is None


def test_one_pair_has_no_interval() -> None:
    found = effect_of([0.5])
    assert (found.effect, found.low, found.high) == (0.5, None, None)
    assert not found.distinguishable


@pytest.mark.parametrize("bad", [[], [float("nan")], [1.0, float("inf")]])
def test_nothing_finite_is_no_effect(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        effect_of(bad)


@given(differences)
def test_the_mean_lies_within_and_signs_do_not_matter(given_: list[float]) -> None:
    found, mirrored = effect_of(given_), effect_of([-d for d in given_])
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.effect <= found.high
    assert mirrored.low == pytest.approx(-found.high)
    assert found.distinguishable == (found.low > 0 or found.high < 0)


@given(differences, st.floats(-3, 3))
def test_a_shift_of_all_pairs_moves_the_interval_by_as_much(given_: list[float], by: float) -> None:
    before, after = effect_of(given_), effect_of([d + by for d in given_])
    assert after.effect == pytest.approx(before.effect + by, abs=1e-9)
    assert after.high - after.low == pytest.approx(before.high - before.low, abs=1e-9)  # type: ignore[operator]


def test_as_many_pairs_as_it_names_tell_it_from_nothing() -> None:
    few = effect_of([-0.03, 0.01, -0.02])
    assert not few.distinguishable
    assert few.pairs_needed is not None
    spread = np.std([-0.03, 0.01, -0.02], ddof=1)
    half = [
        quantile(n - 1) * spread / math.sqrt(n) for n in (few.pairs_needed - 1, few.pairs_needed)
    ]
    assert half[1] < abs(few.effect) <= half[0]


def test_an_effect_of_nothing_needs_more_than_anyone_runs() -> None:
    assert effect_of([0.01, -0.01]).pairs_needed is None


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        found = effect_of(list(0.3 + rng.standard_normal(5)))
        covered += found.low <= 0.3 <= found.high  # type: ignore[operator]
    assert 0.935 < covered / 2000 < 0.965
