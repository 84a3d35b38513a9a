"""Tests of rotary tables: one for the whole run, or one for each value of a staged argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.config.load import load
from minillm_core.nn.attention import AttentionSpec
from minillm_core.nn.initial import initial_values
from minillm_core.nn.module import materialising
from minillm_core.nn.rope import RopeSpec, llama_frequencies, rope_of
from minillm_core.optim.schedules import stages
from minillm_core.plan import Plan, build_plan, stages_of
from minillm_core.plan.plan import as_json
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.plugin import Plugin
from minillm_kit import GEOMETRY, NumPyFramework, materialise

BY = (1, 4, 2)


def slowed(frequencies: np.ndarray, by: int, power: float = 1.0) -> np.ndarray:
    return frequencies / by**power


class Slowed(Plugin, api=1):
    """Rotations that slow down in stages, in all layers but the first."""

    def build_attention(self, attn: Any) -> None:
        if attn.layer:
            knots = zip((0, 0.25, 0.5), BY, strict=True)
            attn.rope.scaling(slowed, by=stages(*knots), power=0.5)


def planned(*plugins: Plugin) -> Plan:
    config = load(preset="tiny", default_preset=lambda: ("tiny", "test")).config
    return build_plan(config, [LoadedPlugin.of(type(p).__name__.lower(), p) for p in plugins])


def test_tables_are_cos_and_sin_of_positions_times_frequencies() -> None:
    theta = llama_frequencies(8, 100.0)
    with materialising(NumPyFramework()):
        rope = rope_of(GEOMETRY, RopeSpec(100.0), 13)
    for part, attribute, value in initial_values(rope, {}, 0):
        setattr(part, attribute, value)
    assert rope.at({}) is rope
    cos, sin, frequencies, positions = rope(None)
    angles = np.arange(13)[:, None] * theta
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-7)
    np.testing.assert_allclose(frequencies, theta, rtol=1e-7)
    assert positions is None


def test_a_staged_argument_is_a_staged_value_and_reaches_who_names_it_alone() -> None:
    plan = planned(Slowed())
    assert plan.staged == ("slowed.rope.by",)
    assert [stage["slowed.rope.by"] for stage in stages_of(plan)] == list(BY)
    reads = ["slowed.rope.by" in block.reads() for block in plan.spec.blocks]
    assert reads == [False] + [True] * (len(reads) - 1)
    attention = plan.spec.blocks[1].attention
    assert isinstance(attention, AttentionSpec)
    assert as_json(attention.rope.scaling)[2] == [
        ["by", {"value": "slowed.rope.by", "numbers": [1, 2, 4]}],
        ["power", 0.5],
    ]


@pytest.mark.parametrize(("progress", "by"), [(0.25, 1), (0.26, 4), (0.5, 4), (1.0, 2)])
def test_each_stage_turns_by_frequencies_of_its_own(progress: float, by: int) -> None:
    plan = planned(Slowed())
    first, second, *_ = materialise(plan, 0).layers
    values, dim = plan.values(progress), plan.spec.geometry.head_dim
    plain = llama_frequencies(dim, plan.config.model.rope_base)
    np.testing.assert_allclose(first.attention.rope.at(values).frequencies, plain, rtol=1e-6)
    there = second.attention.rope.at(values).frequencies
    np.testing.assert_allclose(there, plain / by**0.5, rtol=1e-6)


def test_a_plan_without_stages_has_the_tables_that_it_had() -> None:
    plan = planned()
    assert plan.staged == ()
    rope = materialise(plan, 0).layers[0].attention.rope
    assert rope.at({}) is rope
