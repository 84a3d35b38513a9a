"""Tests of the extra training lengths: few, and dense enough to interpolate losses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_lab.worth import BEYOND, GAP, extra_lengths, loss_at, neighbours

lengths = st.integers(1, 5000)


@given(steps=lengths, wanted=st.lists(lengths, max_size=12))
def test_every_length_is_trained_or_lies_close_between_two(steps: int, wanted: list[int]) -> None:
    chosen = extra_lengths(steps, wanted)
    assert set(chosen) <= set(wanted)
    assert len(chosen) == len({*chosen} - {steps})
    for one in wanted:
        between = neighbours(one, {steps, *chosen})
        assert between is not None
        below, above = between
        assert below / BEYOND <= one <= above * BEYOND
        assert below <= above <= GAP * below


@given(steps=lengths, wanted=lengths)
def test_one_length_is_trained_itself(steps: int, wanted: int) -> None:
    assert extra_lengths(steps, [wanted]) == ([wanted] if wanted != steps else [])


def test_no_more_are_trained_than_that_takes() -> None:
    assert extra_lengths(100, [101, 105, 110, 120, 99, 97]) == [97, 120]
    assert extra_lengths(100, [120, 99]) == [120]  # 99 is on the same line, just before it begins
    assert extra_lengths(100, [99]) == [99]
    assert extra_lengths(100, [101, 120, 130, 145]) == [120, 145]
    assert extra_lengths(100, [200]) == [200]


@pytest.mark.parametrize("trained", [(), (100,), (100, 126), (120, 125), (90, 107)])
def test_nothing_is_said_beyond_or_far_from_what_was_trained(trained: tuple[int, ...]) -> None:
    assert neighbours(110, trained) is None


@given(
    below=lengths,
    share=st.floats(0, 1),
    slope=st.floats(-2, 0),
    start=st.floats(0, 10),
)
def test_a_line_in_the_logarithm_is_read_exactly(
    below: int, share: float, slope: float, start: float
) -> None:
    above = max(below + 1, int(GAP * below))
    at = round(below + share * (above - below))

    def loss(steps: int) -> float:
        return start + slope * math.log(steps)

    between = neighbours(at, (below, at, above))
    assert between == (at, at)
    assert loss_at(at, {at: loss(at)}, (at, at)) == loss(at)
    read = loss_at(at, {below: loss(below), above: loss(above)}, (below, above))
    assert read == pytest.approx(loss(at), abs=1e-9)
