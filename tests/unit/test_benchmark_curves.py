"""Tests of a curve's crossing of a target: the last time that it falls below it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import crossings


def points(losses: list[float]) -> list[dict[str, float]]:
    return [
        {"seconds": 2.0 * i, "tokens": 100 * i, "val_loss": loss} for i, loss in enumerate(losses)
    ]


def test_between_two_points_the_loss_is_linear() -> None:
    assert crossings(points([5.0, 4.0, 3.0]), [4.5, 3.0, 2.9]) == {
        "4.5": {"seconds": 1.0, "tokens": 50},
        "3": {"seconds": 4.0, "tokens": 200},
        "2.9": None,
    }


def test_a_curve_that_rises_again_has_not_crossed_yet() -> None:
    found = crossings(points([5.0, 3.0, 5.0, 3.0]), [4.0])["4"]
    assert found == {"seconds": 5.0, "tokens": 250}
    assert crossings(points([5.0, 3.0, 5.0]), [4.0])["4"] is None


def test_a_curve_that_is_below_from_the_start_crosses_there() -> None:
    assert crossings(points([3.0, 2.0]), [4.0])["4"] == {"seconds": 0.0, "tokens": 0}
    assert crossings([], [4.0])["4"] is None


@given(st.lists(st.floats(1, 9), min_size=2, max_size=9), st.floats(1.5, 8.5))
def test_after_the_crossing_the_curve_stays_below(losses: list[float], target: float) -> None:
    curve = points(losses)
    found = crossings(curve, [target])[f"{target:g}"]
    target = float(f"{target:g}") if found is None else target
    assert (found is None) == (losses[-1] > target)
    if found:
        later = [p["val_loss"] for p in curve if p["seconds"] > found["seconds"] + 1e-3]
        assert all(loss <= target for loss in later)
        at = np.interp(found["seconds"], [p["seconds"] for p in curve], losses)
        assert losses[0] <= target or at == pytest.approx(target, abs=0.02)
