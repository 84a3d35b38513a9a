"""Tests of schedules: their knots, their bounds, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.optim.schedules import (
    SHAPES,
    Cosine,
    TrainSchedule,
    cosine,
    piecewise,
    plateaus,
    scheduled,
    stages,
)

progress = st.floats(0, 1, exclude_min=True)
number = st.floats(-10, 10)
run = st.builds(TrainSchedule, st.sampled_from(sorted(SHAPES)), st.floats(0, 1))


def places(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[tuple[float, float]]]:
    """Draw increasing knots at hundredths of the run."""
    at = st.sets(st.integers(0, 100), min_size=1, max_size=6).map(sorted)
    return at.flatmap(
        lambda held: st.tuples(*[values] * len(held)).map(
            lambda drawn: [(x / 100, y) for x, y in zip(held, drawn, strict=True)]
        )
    )


@given(places(number), progress, run)
def test_piecewise_goes_through_its_knots_and_stays_between(
    knots: list[tuple[float, float]], where: float, train: TrainSchedule
) -> None:
    schedule = piecewise(*knots)
    for x, y in knots:
        assert schedule.at(x, train) == pytest.approx(y, abs=1e-9)
    here = schedule.at(where, train)
    left = [y for x, y in knots if x <= where][-1:] or [knots[0][1]]
    right = [y for x, y in knots if x >= where][:1] or [knots[-1][1]]
    low, high = min(*left, *right), max(*left, *right)
    assert low - 1e-9 <= here <= high + 1e-9


@given(number, number)
def test_piecewise_is_linear_between_knots(first: float, last: float) -> None:
    schedule = piecewise((0.2, first), (0.6, last))
    train = TrainSchedule("constant", 0.0)
    assert schedule.at(0.4, train) == pytest.approx((first + last) / 2, abs=1e-9)
    assert schedule.at(0.1, train) == first
    assert schedule.at(0.9, train) == last


@given(number, number, progress, progress, run)
def test_cosine_runs_from_start_to_end_without_turning(
    start: float, end: float, a: float, b: float, train: TrainSchedule
) -> None:
    schedule = cosine(start, end)
    early, late = sorted((a, b))
    assert schedule.at(1.0, train) == pytest.approx(end, abs=1e-9)
    assert schedule.at(1e-9, train) == pytest.approx(start, abs=1e-6)
    change = schedule.at(late, train) - schedule.at(early, train)
    assert change * (end - start) >= -1e-9


@given(places(st.integers(1, 9)), progress, run)
def test_a_stage_holds_until_the_next_begins(
    knots: list[tuple[float, float]], where: float, train: TrainSchedule
) -> None:
    held = [(0.0, 7), *((x, int(y)) for x, y in knots if x)]
    schedule = stages(*held)
    assert schedule.at(where, train) == [n for x, n in held if x < where or x == 0][-1]
    assert set(schedule.all()) == {n for _, n in held}
    jumps = plateaus(*((x, n / 4) for x, n in held))
    assert jumps.at(where, train) == schedule.at(where, train) / 4  # at the same steps


@given(run, progress)
def test_the_factor_stays_within_zero_and_one(train: TrainSchedule, where: float) -> None:
    assert -1e-12 <= train.factor(where) <= 1 + 1e-12
    assert scheduled(3.0).at(where, train) == 3.0 * train.factor(where)


@given(st.sampled_from(sorted(SHAPES)), st.floats(0.01, 0.99), st.floats(0.01, 1))
def test_warm_up_is_linear_and_ends_at_the_peak(shape: str, warmup: float, share: float) -> None:
    train = TrainSchedule(shape, warmup)
    assert train.factor(warmup * share) == pytest.approx(share if share < 1 else 1.0)
    assert train.factor(warmup) == pytest.approx(1.0)


@pytest.mark.parametrize(("shape", "end"), [("constant", 1.0), ("cosine", 0.1), ("wsd", 0.0)])
@pytest.mark.parametrize("warmup", [0.0, 0.05])
def test_each_shape_ends_where_it_says(shape: str, end: float, warmup: float) -> None:
    assert TrainSchedule(shape, warmup).factor(1.0) == pytest.approx(end)


def test_wsd_is_flat_until_the_last_fifth() -> None:
    train = TrainSchedule("wsd", 0.0)
    assert [train.factor(x) for x in (0.5, 0.8)] == pytest.approx([1.0, 1.0])
    assert train.factor(0.9) == pytest.approx(0.5)


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 0.9))
def test_a_cooldown_is_linear_and_a_share_of_what_follows_the_warm_up(
    cooldown: float, share: float, warmup: float
) -> None:
    train = TrainSchedule("wsd", warmup, cooldown)
    begins = warmup + (1 - warmup) * (1 - cooldown)
    assert train.factor(begins + share * (1 - begins)) == pytest.approx(1 - share, abs=1e-6)


def test_warm_up_alone_is_a_schedule() -> None:
    train = TrainSchedule("cosine", 1.0)
    assert [train.factor(x) for x in (0.25, 1.0)] == [0.25, 1.0]


@pytest.mark.parametrize("make", [piecewise, plateaus, stages])
@pytest.mark.parametrize(
    "knots",
    [
        (),
        ((0.5, 1), (0.5, 2)),
        ((0.5, 1), (0.2, 2)),
        ((-0.1, 1),),
        ((0.0, 1), (1.1, 2)),
        ((float("nan"), 1),),
        ((0.0, float("nan")),),
        ((0.0, float("inf")),),
    ],
)
def test_knots_that_make_no_schedule_are_refused(
    make: Callable[..., object], knots: tuple[tuple[float, float], ...]
) -> None:
    with pytest.raises(ValueError, match="knots need"):
        make(*knots)


def test_stages_begin_at_zero_and_are_whole() -> None:
    for make in (stages, plateaus):
        with pytest.raises(ValueError, match="the first stage begins at 0"):
            make((0.1, 1))
    with pytest.raises(ValueError, match="whole numbers"):
        stages((0, 2.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "schedule",
    [
        *(piecewise((0, 1), (1, 0)), cosine(1, 0), scheduled(0.1)),
        *(plateaus((0, 0.5), (0.5, 1)), stages((0, 4), (0.5, 8))),
    ],
)
def test_a_schedule_is_data(schedule: Cosine) -> None:
    data = json.loads(json.dumps(schedule.data(), allow_nan=False))
    assert data["schedule"] == type(schedule).__name__.lower()
    assert len(data) > 1
