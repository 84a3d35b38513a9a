"""A small effect is not written as none, and every figure stays short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.plugins.cards import signed, times

sizes = st.floats(-99, 99, allow_nan=False)


@given(sizes)
def test_a_difference_keeps_its_sign_and_two_digits(value: float) -> None:
    told = signed(value)
    assert len(told) <= 9
    if value == 0:
        assert told == "+0.0000"
    else:
        assert told[0] == ("-" if value < 0 else "+")
        assert float(told) == pytest.approx(value, rel=0.05)


@given(sizes)
def test_four_decimals_are_there_where_they_suffice(value: float) -> None:
    assert abs(value) < 0.001 or signed(value) == f"{value:+.4f}"


@given(st.floats(0.01, 99))
def test_a_ratio_is_1_where_it_is(value: float) -> None:
    told = times(value)
    assert len(told) <= 12
    if value == 1:
        assert told == "1.000"
    elif abs(value - 1) >= 1e-9:
        assert float(told) != 1
        assert (float(told) > 1) == (value > 1)
    assert float(told) == pytest.approx(value, abs=0.0005)


def test_examples() -> None:
    assert [signed(v) for v in (0.05, 0.00051, -0.000123, 2.3e-7)] == [
        "+0.0500",
        "+0.00051",
        "-0.00012",
        "+2.3e-07",
    ]
    assert [times(v) for v in (0.9, 0.9996, 1.00002)] == ["0.900", "0.9996", "1.00002"]
