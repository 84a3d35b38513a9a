"""Tests of values from the command line, and of settings' descriptions in words."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.config.check import expected
from minillm_core.config.origins import line_of
from minillm_core.config.schema import SECTIONS
from minillm_core.config.values import read_value, show

PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False),
    lambda item: st.lists(item, max_size=3),
    max_leaves=5,
)


@given(st.text())
def test_any_text_is_a_toml_value_or_itself(text: str) -> None:
    value = read_value(text)
    if value != text:
        assert tomllib.loads(f"value = {text}")["value"] == value


@given(PLAIN)
def test_what_is_shown_can_be_typed(value) -> None:
    shown = show(value)
    assert shown.endswith("...") or read_value(shown) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ('"1"', "1"),
        ("{a = 1}", {"a": 1}),
        ("match_rms", "match_rms"),
        ("data/#1", "data/#1"),
        ("5#3", "5#3"),
        ("1,2", "1,2"),
        ("1,", "1,"),
        ("1\nx = 2", "1\nx = 2"),
        ("2024-01-01", "2024-01-01"),
        pytest.param("[" * 3000, "[" * 3000, id="nested"),
        pytest.param("[" * 3000 + "]" * 3000, "[" * 3000 + "]" * 3000, id="nested lists"),
        ("007", "007"),
        ("", ""),
    ],
)
def test_a_value_is_one_toml_value_or_text(text: str, value: object) -> None:
    assert read_value(text) == value


@given(st.text())
def test_shown_values_are_short(text: str) -> None:
    assert len(show(text)) <= 60


def test_every_setting_can_be_described() -> None:
    for section, model in SECTIONS.items():
        for name in model.model_fields:
            assert "a value" not in expected(f"{section}.{name}")


@given(before=st.integers(0, 3), between=st.integers(0, 3))
def test_lines_are_found(before: int, between: int) -> None:
    text = "\n" * before + "a.b = 1\n" + "# c\n" * between + "[t.'u']  # table\nv = 2\n"
    assert line_of(text, ("a", "b")) == before + 1
    assert line_of(text, ("t", "u")) == before + between + 2
    assert line_of(text, ("t", "u", "v")) == before + between + 3
    assert line_of(text, ("absent",)) is None
