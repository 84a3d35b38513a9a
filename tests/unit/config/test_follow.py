"""Tests of settings derived from another one: horizons of a recipe, and the dial of preset depth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minillm_core as minillm
from minillm_core.config.load import Loaded
from minillm_core.config.origins import Follows
from minillm_core.errors import ConfigError
from tests.unit.config.test_presets import parameters

Load = Callable[..., Loaded]
DEPTHS = range(4, 25)


@given(
    knots=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=2, max_size=6),
    dial=st.floats(-2e6, 2e6),
)
def test_lines_are_straight_and_level_beyond_their_ends(
    knots: list[tuple[float, float]], dial: float
) -> None:
    xs = sorted({round(x) for x, _ in knots})
    ys = [y for _, y in knots][: len(xs)]
    value = Follows("train.steps", tuple(zip(xs, ys, strict=True)), "a test", "here").at(dial).value
    assert value == pytest.approx(np.interp(dial, xs, ys), rel=1e-5, abs=1e-5 * max(map(abs, ys)))


def test_whole_numbers_stay_whole() -> None:
    rule = Follows("model.layers", ((4, 3), (8, 5)), "a test", "here")
    assert [rule.at(depth).value for depth in (3, 4, 5, 6, 7, 8, 9)] == [3, 3, 4, 4, 4, 5, 5]
    assert isinstance(rule.at(5).value, int)


@pytest.mark.parametrize(("steps", "cooldown"), [(20, 0.3), (40, 0.3), (125, 0.35), (460, 0.4)])
def test_speedrun_cools_down_by_its_horizon(loaded: Load, steps: int, cooldown: float) -> None:
    found = loaded(preset="speedrun", flags={"--steps": steps})
    assert found.train.cooldown == pytest.approx(cooldown)
    assert found.origins["train.cooldown"] == f"preset speedrun, by train.steps={steps}"
    assert loaded("train.cooldown=0.2", preset="speedrun").train.cooldown == 0.2


def test_a_dial_that_is_not_given_leaves_a_note(loaded: Load) -> None:
    found = loaded("train.minutes=1", preset="speedrun")
    assert found.train.cooldown == 0.4
    assert any("train.cooldown follows train.steps, which is not given" in n for n in found.notes)


def test_a_file_of_one_s_own_says_what_follows(
    loaded: Load, settings_file: Callable[[str], Path]
) -> None:
    path = settings_file('[by."train.rows"]\n"train.lr" = [[8, 1e-3], [32, 2e-3]]\n')
    assert loaded("train.rows=20", file=path).train.lr == pytest.approx(1.5e-3)
    assert loaded("train.rows=20", "train.lr=0.1", file=path).train.lr == 0.1


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ('[by."train.step"]\n"train.lr" = [[1, 1], [2, 2]]', "no setting 'train.step'", "quotes"),
        ("[by.train.steps]\nx = 1", "no setting 'train'", '[by."train.steps"]'),
        ('[by."train.steps"]\n"train.lr" = [[1, 1]]', "two or more pairs", "[[40, 0.3]"),
        ('[by."train.steps"]\n"train.lr" = 0.1', "two or more pairs", "[[40, 0.3]"),
        ('[by."train.steps"]\n"train.lr" = [[1, true], [2, 2]]', "pairs of numbers", "[[40, 0.3]"),
        ('[by."train.steps"]\n"train.lr" = [[1, nan], [2, 2]]', "pairs of numbers", "[[40, 0.3]"),
        (
            '[by."train.steps"]\n"train.lr" = [[2, 1], [1, 2]]',
            "not increase",
            "in increasing order",
        ),
        ("by = 1", "'by' holds a table for each setting", '[by."train.steps"]'),
        ('[by]\n"train.steps" = 1', "by.train.steps is not a table", '[by."train.steps"]'),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_line(
    loaded: Load, settings_file: Callable[[str], Path], text: str, what: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(file=settings_file(text))
    assert what in refused.value.what
    assert fix in (refused.value.fix or "")
    assert "line" in (refused.value.where or "")


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_depth_is_planned_with_twenty_tokens_a_parameter(depth: int) -> None:
    loaded = minillm.load(preset="depth", settings={"model.layers": depth})
    model, train = loaded.model, loaded.train
    assert (model.dim, model.heads, model.kv_heads) == (64 * depth, depth, depth)
    assert train.steps is not None
    tokens = train.steps * train.rows * train.accumulate * train.seq_len
    assert 17.5 <= tokens / parameters(model) <= 22.5
    plan = minillm.build_plan(loaded)
    assert plan.estimate().parameters == parameters(model)


def test_depths_grow_in_every_way() -> None:
    found = [minillm.load(preset="depth", settings={"model.layers": depth}) for depth in DEPTHS]
    for falls, values in (
        (True, [one.train.lr for one in found]),
        (False, [one.train.steps for one in found]),
        (False, [one.train.accumulate for one in found]),
    ):
        assert values == sorted(values, reverse=falls)  # pyright: ignore[reportArgumentType]


def test_the_dial_alone_chooses_its_preset(loaded: Load) -> None:
    found = loaded(flags={"--depth": 6})
    assert (found.preset, found.model.layers, found.model.dim) == ("depth", 6, 384)
    assert found.origins["model.layers"] == "--depth"
    assert loaded(preset="depth").model.layers == 12


@pytest.mark.parametrize(
    ("preset", "depth", "what", "fix"),
    [
        (None, 3, "preset depth goes from 4 to 24 layers", "--depth 4"),
        ("depth", 25, "preset depth goes from 4 to 24 layers", "--depth 24"),
        ("small", 6, "no setting of preset small follows model.layers", "--preset depth --depth 6"),
    ],
)
def test_a_depth_that_nothing_follows_is_refused(
    loaded: Load, preset: str | None, depth: int, what: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(preset=preset, flags={"--depth": depth})
    assert refused.value.what == what
    assert fix in (refused.value.fix or "")
    assert refused.value.where == f"--depth {depth}"
