"""Tests of the overfitting warning: once, where held-out loss rises and training loss falls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minillm_core.train.events import Evaluated, Stepped, Throughput
from minillm_core.train.validation import Trend

RATE = Throughput(1.0, 1.0, 1.0)


def told(curve: Sequence[tuple[float, float]], *, recalled: int = 0) -> tuple[Trend, list[str]]:
    """Return a trend after evaluations, each with the preceding training loss.

    Args:
        curve: training loss, held-out loss.
        recalled: number of evaluations by an earlier process of the run.
    """
    said: list[str] = []
    trend = Trend(said.append)
    events: list[Any] = []
    for n, (training, held_out) in enumerate(curve):
        events += [Stepped(step, training, 0.1, 1, RATE, 1.0, None, None, 1.0) for step in (n, n)]
        events.append(Evaluated(n, held_out, None, 100))
    before = events[: 3 * recalled]
    trend.resume([one.data() for one in before], [one for one in before if one.event == "eval"])
    for event in events[3 * recalled :]:
        trend(event)
    return trend, said


MEMORISES = [(9.0, 8.3), (5.0, 5.1), (4.0, 5.0), (3.5, 5.2), (3.0, 5.4), (2.0, 6.0)]


@pytest.mark.parametrize("recalled", [0, 1, 3, 4])
def test_a_model_that_memorises_is_said_once(recalled: int) -> None:
    trend, said = told(MEMORISES, recalled=recalled)
    assert len(said) == 1
    assert said[0].startswith("held-out loss has risen since step 2 while the training loss falls")
    assert "from 5.000 to 5.400" in said[0]
    assert "more text" in said[0]
    assert "a lower train.lr, fewer steps" in said[0]
    assert "checkpoint.best=true" in said[0]
    assert max(len(line) for line in said[0].splitlines()) < 100
    assert trend.best is not None
    assert (trend.best.step, trend.best.val_loss) == (2, 5.0)


@pytest.mark.parametrize(
    "curve",
    [
        MEMORISES[:4],  # one evaluation may be noise
        [(9.0, 8.3), (5.0, 5.1), (4.0, 5.0), (3.5, 5.2), (3.4, 4.9), (3.3, 5.1)],
        [(9.0, 8.3), (5.0, 5.1), (4.0, 5.0), (4.5, 5.2), (5.0, 5.4)],  # both rise, twice
        [(9.0, 8.3), (float("nan"), float("nan")), (float("nan"), float("nan"))],
    ],
)
def test_others_are_not(curve: list[tuple[float, float]]) -> None:
    assert told(curve)[1] == []


def test_a_held_out_loss_that_rises_with_the_training_loss_is_said_at_the_third() -> None:
    curve = [(9.0, 8.3), (5.0, 5.1), (4.0, 5.0), (4.5, 5.2), (5.0, 5.4), (5.1, 5.5), (5.2, 9.0)]
    trend, said = told(curve)
    (line,) = said
    assert line.startswith("held-out loss has risen since step 2, from 5.000 to 5.500")
    assert "memorising" not in line
    for cure in ("a lower train.lr", "fewer steps", "checkpoint.best=true"):
        assert cure in line
    assert max(map(len, line.splitlines())) < 100
    assert trend.newest is not None
    assert trend.newest.val_loss == 9.0


def test_what_was_said_before_a_resume_is_not_said_again() -> None:
    trend, said = told(MEMORISES, recalled=5)
    assert trend.rising
    assert said == []


def test_an_evaluation_of_other_predictions_is_not_compared() -> None:
    trend, _ = told(MEMORISES)
    trend(Evaluated(9, 1.0, None, 800))
    assert trend.best is not None
    assert trend.best.step == 2
    assert trend.newest is not None
    assert trend.newest.step == 5
