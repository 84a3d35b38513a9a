"""Tests that docs/scale.md has the cost model's current table, and that the model is close to measurements."""

from __future__ import annotations

import pytest

from minillm_mesh.cost import seconds
from tools.scale_page import H200, PAGE, POINTS, SIZES, Point


@pytest.mark.slow
def test_the_page_is_what_the_model_says() -> None:
    assert PAGE.generated() == PAGE.text(), "python -m tools.scale_page --write"


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.what}, {point.more[0]} cards")
def test_the_model_is_near_what_was_measured(point: Point) -> None:
    assert point.predicted() / point.more[1] == pytest.approx(1.0, abs=0.05)


def test_the_first_measurement_is_met() -> None:
    """A prediction for the same GPUs equals the measurement there."""
    for point in POINTS:
        again = Point(*(*list(vars(point).values())[:5], point.few, point.exchanges))
        assert again.predicted() == pytest.approx(point.few[1], rel=1e-6)


def test_large_all_reduces_are_near_what_was_measured() -> None:
    for mib, measured in SIZES[1:]:
        found = seconds("all-reduce", mib * 2**20, 2, H200)
        assert found == pytest.approx(measured, rel=0.12)
