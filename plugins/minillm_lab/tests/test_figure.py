"""Tests of figures: everything stays inside its box, ticks are round, and text stays text."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_lab.figure import (
    BYTES,
    COUNT,
    NARROW,
    TIME,
    WIDE,
    Axis,
    Interval,
    Line,
    Size,
    colour,
    interval_chart,
    line_chart,
    number,
    scale_of,
    ticks,
)
from minillm_lab.markup import Markup, tag, text

finite = st.floats(-1e12, 1e12)
points = st.lists(st.tuples(st.floats(0, 1e12), finite | st.just(math.nan)), min_size=1)
sizes = st.sampled_from([WIDE, NARROW])
axes = st.sampled_from([Axis("tokens", COUNT), Axis("time", TIME), Axis("m", BYTES), Axis("x")])


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def places(svg: str) -> list[tuple[float, float]]:
    """List every point of lines, dots and whiskers."""
    found = []
    for one in drawn(svg).iter():
        pairs = [pair.split(",") for pair in one.get("points", "").split()]
        pairs += [
            [one.attrib[x], one.attrib[y]]
            for x, y in (("x", "y"), ("cx", "cy"), ("x1", "y1"), ("x2", "y2"))
            if one.get(x)
        ]
        found += [(float(x), float(y)) for x, y in pairs]
    return found


@given(points, axes, axes, sizes, st.none() | finite, st.booleans())
def test_every_point_lies_inside_the_figure(
    given_: list[tuple[float, float]], x: Axis, y: Axis, size: Size, level: float, zero: bool
) -> None:
    svg = line_chart([Line("a", 0, given_)], x, y, size, level=level, from_zero=zero)
    if all(math.isnan(b) for _, b in given_):
        assert "nothing to draw" in svg
        return
    for px, py in places(svg):
        assert -0.1 <= px <= size.width + 0.1
        assert -0.1 <= py <= size.height + 0.1
    lines = [one for one in drawn(svg).iter("polyline")]
    assert len(lines[0].get("points", "").split()) == sum(not math.isnan(b) for _, b in given_)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e3, 1e3)), min_size=2))
def test_more_is_further_to_the_right_and_higher(given_: list[tuple[float, float]]) -> None:
    svg = line_chart([Line("a", 0, given_)], Axis("x"), Axis("y"))
    drawn_ = [
        tuple(map(float, p.split(","))) for p in re.findall(r'points="([^"]*)"', svg)[0].split()
    ]
    for (one, at), (other, there) in itertools.combinations(
        list(zip(given_, drawn_, strict=True))[:8], 2
    ):
        assert (one[0] - other[0]) * (at[0] - there[0]) >= 0
        assert (one[1] - other[1]) * (at[1] - there[1]) <= 0


@given(finite, finite, st.integers(2, 9))
def test_ticks_are_round_increasing_and_few(low: float, high: float, most: int) -> None:
    scale = scale_of([low, high], 0, 100)
    found = ticks(scale.low, scale.high, most)
    assert all(a < b for a, b in itertools.pairwise(found))
    assert len(found) <= most + 1
    assert all(scale.low <= tick <= scale.high for tick in found)
    if len(found) > 2:
        step = found[1] - found[0]
        lead = step / 10 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(lead - by) for by in (1, 2, 5, 10)) < 1e-3
        labels = [number(tick, step) for tick in found]
        assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("value", "step", "label"),
    [(0.0, 0.5, "0.0"), (-0.05, 0.05, "−0.05"), (1500, 500, "1,500"), (2.0, 1.0, "2")],
)
def test_labels_have_the_decimals_that_ticks_need(value: float, step: float, label: str) -> None:
    assert number(value, step) == label


def test_an_axis_takes_the_unit_that_fits() -> None:
    assert Axis("tokens", COUNT).unit(3e7) == (1e6, "tokens, millions")
    assert Axis("tokens", COUNT).unit(512) == (1.0, "tokens")
    assert Axis("time", TIME).unit(90) == (60.0, "time, minutes")
    assert Axis("time", TIME).unit(0.2) == (1.0, "time, seconds")


@given(st.lists(st.tuples(finite, finite, finite).map(sorted), min_size=1, max_size=9), finite)
def test_intervals_lie_inside_and_around_their_dot(
    given_: list[list[float]], reference: float
) -> None:
    rows = [
        Interval(f"p{i}", e, lo, hi, "better", "told", "a note" * (i % 2))
        for i, (lo, e, hi) in enumerate(given_)
    ]
    svg = interval_chart(
        [*rows, Interval("none", None, note="why")], Axis("x"), reference=reference
    )
    height = float(str(drawn(svg).get("viewBox")).split()[3])
    assert all(-0.1 <= x <= 358.1 and -0.1 <= y <= height for x, y in places(svg))
    for group in list(drawn(svg).iter("g"))[: len(rows)]:
        dot = float(str(next(group.iter("circle")).get("cx")))
        whisker = next(group.iter("line"))
        assert float(str(whisker.get("x1"))) <= dot + 0.01
        assert dot - 0.01 <= float(str(whisker.get("x2")))


@given(st.text())
def test_text_and_attributes_are_read_back_and_are_no_markup(given_: str) -> None:
    for markup in (tag("p", given_), tag("p", tag("b", given_)), tag("p", title=given_)):
        assert len(re.findall(r"<", markup)) in (2, 4)
        drawn(markup)
    shown = re.sub(r"\s", "", drawn(tag("p", given_)).text or "")
    assert set(shown) <= {*given_, "?"}


def test_markup_is_escaped_once() -> None:
    assert text("a < b & c") == "a &lt; b &amp; c"
    assert text(Markup("<b>")) == "<b>"
    assert tag("p", "x", class_="a", aria_label="q\"'", none=None) == (
        '<p class="a" aria-label="q&quot;&#x27;">x</p>'
    )


def test_colours_begin_again_dashed() -> None:
    assert len({colour(n) for n in range(22)}) == 22
