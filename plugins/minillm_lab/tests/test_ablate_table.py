"""Tests of the table of an ablation: intervals never wrap, at any terminal width, for few or many plugins."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from minillm_lab.card import signed
from minillm_lab.cli.ablate_table import show_findings
from minillm_lab.worth import effect_of

NARROWEST = 50
"""Terminal width from which on nothing overflows, with the names and figures of these tests."""

differences = st.lists(st.floats(-9, 9), min_size=1, max_size=5)
names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=24)


def finding(differences: list[float], **more: Any) -> dict[str, Any]:
    effect = effect_of(differences).data()
    speed = judged(0.9, 0.85, 12.345)
    peak = {"with": 3 * 2**30, "without": 2**30, **judged(3.001, 2.9, 3.1)}
    found = {"failed": 0, "equal_seconds": effect, "speed": speed, "peak_bytes": peak}
    return effect | found | more


def judged(effect: float, low: float, high: float, needed: int | None = None) -> dict[str, Any]:
    """Build a ratio's result; it is distinguishable from 1 where ``needed`` is None."""
    found = {"effect": effect, "low": low, "high": high, "pairs_needed": needed}
    return {**found, "distinguishable": needed is None}


def result(plugins: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = {"design": "one at a time", "seeds": [0, 1], "steps": 1000, "device": "a device"}
    return {**about, "plugins": plugins, "not_judged": {}, **more}


def shown(result: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_findings(result, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def interval(effect: dict[str, Any]) -> str:
    return f"{signed(effect['effect'])} [{signed(effect['low'])}, {signed(effect['high'])}]"


@pytest.mark.slow
@given(plugins=st.dictionaries(names, differences, min_size=1), width=st.integers(NARROWEST, 200))
def test_no_interval_is_ever_broken(plugins: dict[str, list[float]], width: int) -> None:
    found = {name: finding(pairs) for name, pairs in plugins.items()}
    text = shown(result(found), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for name, one in found.items():
        assert any(name in line.split() for line in lines)
        assert one["low"] is None or interval(one) in text
    for figure in ("0.900 x [0.850, 12.345]", "3.001 x [2.900, 3.100], 3.00 GiB"):
        assert text.count(figure) == len(found)


@pytest.mark.parametrize("count", [3, 25])
@pytest.mark.parametrize(
    ("width", "tables", "lines_each"), [(60, 0, 7), (80, 2, 3), (140, 1, 2)], ids=str
)
def test_what_does_not_fit_beside_stands_below(
    count: int, width: int, tables: int, lines_each: int
) -> None:
    found = {f"technique_{n}": finding([-0.25, 0.125]) for n in range(count)}
    text = shown(result(found), width)
    assert text.count("plugin  ") == tables
    assert len(text.splitlines()) <= count * lines_each + 16
    assert text.count(interval(found["technique_0"])) == 2 * count


def test_in_less_room_than_a_figure_nothing_is_cut_off() -> None:
    one = finding([-0.25, 0.125])
    text = shown(result({"muon": one}), 20)
    assert text.count(interval(one)) == 2
    assert "…" not in text


def test_it_says_what_is_better_and_what_cannot_be_told() -> None:
    better, open_, far = [-0.2, -0.21, -0.2], [0.2, -0.1, 0.1], [0.2, -0.2001, 0.0]
    found = {
        "good": finding(better),
        "bad": finding([-d for d in better]),
        "vague": finding(open_, equal_seconds=finding(far)),
    }
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    show_findings(result(found), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for name, colour in (("good", "\x1b[32m"), ("bad", "\x1b[31m")):
        assert f"{colour}{interval(found[name])}" in text
    plain = shown(result(found), 80)
    needed = found["vague"]["pairs_needed"]
    assert f"within noise ({needed})" in plain
    assert "within noise (>1,000)" in plain
    assert "within noise (N): about N pairs would settle it" in plain
    assert "would settle" not in shown(result({"good": found["good"]}), 80)


def test_one_pair_and_none_have_no_interval() -> None:
    bare = {"effect": None, "low": None, "high": None, "failed": 5}
    unknown = {"with": None, "without": 2**30}
    alone = finding([0.5], equal_seconds=None, peak_bytes=unknown)
    alone["speed"] = {"effect": 0.9, "low": None, "high": None, "distinguishable": False}
    text = shown(result({"alone": alone, "gone": bare}), 80)
    for said in ("+0.5000", "one pair: no interval", "no pair finished", "0.900 x", "unknown"):
        assert said in text
    assert "5 pairs failed" in text
    assert "not measured" in shown(result({"alone": alone}, equal_seconds=False), 80)
    assert text.count("gone") == 1  # it has no row in the table of costs


def test_an_undecided_ratio_of_too_few_pairs_has_no_interval() -> None:
    wide = finding([-0.1, -0.2], speed=judged(0.202, 1e-8, 4e6, 4))
    assert "0.202 x, too few pairs" in (text := shown(result({"muon": wide}), 200))
    assert "within noise (4)" in text
    assert "4000000" not in text
    decided = finding([-0.1, -0.2], speed=judged(0.05, 0.001, 0.5))
    assert "0.050 x [0.001, 0.500]" in shown(result({"muon": decided}), 200)


def test_what_was_left_out_together_is_said_below() -> None:
    found = {"muon": finding([0.1, 0.2]) | {"together": ["normuon", "head_muon"]}}
    said = "muon was left out together with what builds on it: normuon, head_muon"
    assert said in " ".join(shown(result(found), 80).split())


def test_what_is_not_judged_is_said_below() -> None:
    why = {"role_lr": "its \x1b[31mdefaults do nothing " + "in so small a model " * 5}
    text = shown(result({"muon": finding([0.1, 0.2])}, not_judged=why), 80)
    assert "role_lr is not measured: its defaults do nothing in so" in text
    assert "\x1b" not in text


def test_speed_and_memory_are_judged_too() -> None:
    open_, none = judged(1.1, 0.9, 1.3, 17), judged(1.0, 1.0, 1.0) | {"distinguishable": False}
    heavy = {"with": 3 * 2**30, "without": 2**30, **judged(1.00002, 1.00001, 1.00003)}
    better, worse = [-0.2, -0.21, -0.2], [0.2, 0.21, 0.2]
    found = {
        "vague": finding(better, speed=open_),
        "alike": finding(better, speed=none),
        "heavy": finding(better, peak_bytes=heavy),
        "swift": finding(worse, speed=judged(1.2, 1.1, 1.3)),
    }
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    show_findings(result(found), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[31m1.00002 x [1.00001, 1.00003], 3.00 GiB" in text
    assert "\x1b[32m1.200 x [1.100, 1.300]" in text
    plain = shown(result(found), 80)
    for part in ("within noise (17)", "about N pairs would settle it", "the same in every pair"):
        assert part in plain
    assert max(map(len, plain.splitlines())) <= 80


def test_memory_that_is_not_counted_or_has_no_interval() -> None:
    unknown, bare = ({"with": one, "without": one} for one in (None, 2**31))
    text = shown(
        result({"a": finding([0.1], peak_bytes=unknown), "b": finding([0.1], peak_bytes=bare)}), 80
    )
    assert "unknown" in text
    assert "1.000 x, 2.00 GiB" in text


def test_where_all_failed_nothing_is_explained() -> None:
    text = shown(result({"gone": {"effect": None, "failed": 1}}, steps=1, seeds=[0]), 80)
    assert "1 pair of 1 step, a device" in text
    assert "1 pair failed" in text
    assert "is better" not in text
