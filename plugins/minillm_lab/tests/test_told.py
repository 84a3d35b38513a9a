"""Tests of formatted effects: a small effect never reads as zero, and every figure stays short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_lab.card import signed

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


def test_examples() -> None:
    assert [signed(v) for v in (0.05, 0.00051, -0.000123, 2.3e-7)] == [
        "+0.0500",
        "+0.00051",
        "-0.00012",
        "+2.3e-07",
    ]
