"""Tests of the stages of a run."""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, stages
from minillm_core.plan import stages_of


class Narrow(Plugin, api=1):
    """A window that widens."""

    def build_attention(self, attn: Any) -> None:
        if attn.layer == 0:
            attn.window(stages((0, 4), (0.5, 8)))


class Wide(Plugin, api=1):
    """Another one, with other knots."""

    def build_attention(self, attn: Any) -> None:
        if attn.layer == 1:
            attn.window(stages((0, 6), (0.25, 12)))


def test_every_combination_that_occurs_in_order(planned: Any) -> None:
    found = stages_of(planned(narrow=Narrow(), wide=Wide()))
    names = ("narrow.window", "wide.window")
    assert [tuple(stage[n] for n in names) for stage in found] == [(4, 6), (4, 12), (8, 12)]


def test_a_plan_without_staged_values_has_one(planned: Any) -> None:
    assert stages_of(planned()) == ({},)


def test_stages_are_those_of_the_steps(planned: Any) -> None:
    plan = planned(narrow=Narrow(), wide=Wide())
    met = []
    for step in range(1, 101):
        values = plan.values(step / 100)
        stage = {name: int(values[name]) for name in plan.staged}
        if stage not in met:
            met.append(stage)
    assert tuple(met) == stages_of(plan)
