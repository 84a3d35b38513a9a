"""Tests of the gradient chain: the stages before a rule's own, their order, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minillm_core import INHERITED, PlanError, Plugin, piecewise, stage
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin


def planned(**plugins: Plugin) -> Plan:
    sizes = ("model.layers=1", "model.dim=16", "model.hidden=8", "model.vocab=16")
    config = load(preset="tiny", assignments=sizes, default_preset=lambda: ("tiny", "test")).config
    return build_plan(config, [LoadedPlugin.of(name, one) for name, one in plugins.items()])


def scaled(ops: Any, update: Any, param: Any, state: Any, *, by: Any) -> Any:
    return update * by, state


class Joins(Plugin, api=1):
    """Joins the gradients of some rules."""

    rules: tuple[str, ...] = ("*",)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    twice: str | None = None

    def optimizer_factory(self, optimizer):
        order = {"before": self.before, "after": self.after}
        for rule in self.rules:
            draft = stage(scaled, by=piecewise((0, 0.5), (1, 1.0)))
            optimizer.gradient(rule, draft, **order)
            if self.twice:
                optimizer.gradient(rule, stage(scaled, by=2.0), name="too", after=self.twice)


class Own(Plugin, api=1):
    """A rule of its own, for the head or for all parameters."""

    whole: bool = False

    def optimizer_factory(self, optimizer):
        optimizer.rule("own", lr=0.1, scale=stage(scaled, by=3.0))
        optimizer.assign("own", lambda _, p: self.whole or p.role == "head")


class Extends(Plugin, api=1):
    """Fills the chain like a stage."""

    how: str = "extend"

    def optimizer_factory(self, optimizer):
        if self.how == "extend":
            optimizer.extend("*", "gradient", stage(scaled, by=1.0))
        elif self.how == "rule":
            optimizer.rule("mine", lr=0.1, gradient=stage(scaled, by=1.0))
        elif self.how == "inherit":
            optimizer.gradient("*", stage(scaled, by=INHERITED))
        else:
            optimizer.gradient("*", scaled)


def chains(plan: Plan) -> dict[str, list[str]]:
    return {
        name: [anchor for anchor, _, _ in rule.stages if anchor.startswith("gradient")]
        for name, rule in plan.rules.items()
    }


def test_stages_stand_before_a_rules_own_in_the_order_that_is_said() -> None:
    plugins = {"a": Joins(after=("b", "absent")), "b": Joins(rules=("own",)), "own": Own()}
    for order in (plugins, dict(reversed(plugins.items()))):
        plan = planned(**order)
        found = chains(plan)
        assert found == {"adamw": ["gradient[a]"], "own": ["gradient[b]", "gradient[a]"]}
        for rule in plan.rules.values():
            anchors = [anchor for anchor, _, _ in rule.stages]
            assert anchors[: len(found[rule.name])] == found[rule.name]
        assert plan.values(0.5)["own.b.by"] == plan.values(0.5)["adamw.a.by"] == 0.75
        (report,) = (r for r in plan.table if r.slot == "opt.rule[own].gradient")
        assert (report.kind, [h.owner for h in report.held]) == ("chain", ["b", "a"])
        expected = {p.name: p.expected for p in plan.plugins}
        assert expected["a"] == ("stage:adamw.gradient[a]", "stage:own.gradient[a]")


def test_a_plugin_joins_twice_under_two_names() -> None:
    assert chains(planned(a=Joins(twice="a")))["adamw"] == ["gradient[a]", "gradient[a_too]"]


def test_a_rule_without_parameters_leaves_no_trace() -> None:
    plugins = {"a": Joins(), "own": Own(whole=True)}
    expected = {p.name: p.expected for p in planned(**plugins).plugins}
    assert expected["a"] == ("stage:own.gradient[a]",)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: {"a": Joins(), "b": Joins(before=("c",))},
            r"the order of 'a' and 'b' in opt.rule\[adamw\].gradient is not stated",
        ),
        (lambda: {"a": Joins(before=("b",)), "b": Joins(before=("a",))}, "is circular"),
        (lambda: {"a": Joins(rules=("*", "adamw"))}, "two nodes named 'a'"),
        (lambda: {"a": Joins(rules=("lost",))}, "builds on the rule 'lost', which no active"),
        (lambda: {"a": Extends()}, "'gradient' is joined, not replaced"),
        (lambda: {"a": Extends(how="rule")}, "a rule has no stage 'gradient'"),
        (lambda: {"a": Extends(how="inherit")}, "by=INHERITED, and no stage is replaced"),
        (lambda: {"a": Extends(how="function")}, "stage gradient: .* is not a stage"),
    ],
)
def test_what_cannot_join_is_refused(made: Callable[[], dict[str, Plugin]], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(**made())
