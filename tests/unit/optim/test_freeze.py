"""Tests of frozen parameters: declared in the plan, and respected everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minillm_core import Plan, PlanError, Plugin, option
from minillm_core.cli.main import main
from minillm_core.plan.diff import differences
from minillm_lab.study import graph_of

Planned = Callable[..., Plan]


class Freeze(Plugin, api=1):
    """Freezes the parameters whose roles begin with one of these."""

    roles: list[str] = option(["attention", "embedding"], help="beginnings of roles; empty: all")

    def optimizer_factory(self, optimizer):
        optimizer.freeze(lambda name, p: p.role.startswith(tuple(self.roles or [""])))


class Assigns(Plugin, api=1):
    """Assigns its own rule to queries, or only factors."""

    what: str = option("rule", help="rule, lr_mul, wd_mul or betas")

    def optimizer_factory(self, optimizer):
        def queries(name: str, p: Any) -> bool:
            return p.role == "attention.q"

        if self.what == "rule":
            optimizer.rule("plain", lr=0.1)
            optimizer.assign("plain", queries)
        elif self.what == "frozen":
            optimizer.rule("frozen", lr=0.1)
        else:
            optimizer.set(queries, **{self.what: (0.5, 0.9) if self.what == "betas" else 0.5})


def test_frozen_parameters_are_in_no_group_and_in_the_plan(planned: Planned) -> None:
    plain, plan = planned(), planned(freeze=Freeze())
    expected = {
        name for name, p in plan.parameters.items() if p.role.startswith(("attention", "embedding"))
    }
    assert plan.frozen == expected
    members = [member.name for group in plan.groups for member in group.members]
    assert sorted([*members, *plan.frozen]) == sorted(plan.parameters)
    assert plan.data()["optimizer"]["frozen"] == sorted(expected)
    assert plain.frozen == frozenset()
    assert "frozen" not in plain.data()["optimizer"]
    assert plan.hash != plain.hash
    assert graph_of(plan) != graph_of(plain)
    assert "optimizer.frozen" in differences(plain.data(), plan.data())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_counts_what_is_left_out(planned: Planned, dtype: str) -> None:
    plain, plan = planned(), planned(freeze=Freeze())
    before, after = plain.estimate(dtype), plan.estimate(dtype)
    frozen = sum(plan.parameters[name].size for name in plan.frozen)
    trained = plan.num_parameters - frozen
    low = dtype == "bfloat16"
    assert (after.parameters, after.frozen, before.frozen) == (before.parameters, frozen, 0)
    assert after.memory["gradients"] == trained * (6 if low else 4)
    assert after.memory["optimizer state (adamw)"] == 8 * trained
    assert after.memory["master weights"] == 4 * (trained if low else plan.num_parameters)
    assert after.memory["weights"] == before.memory["weights"]
    assert after.checkpoint_bytes == before.checkpoint_bytes - 8 * frozen
    # a frozen matrix has no gradient; the tied head is the frozen embedding
    matrices = [p.size for n, p in plan.parameters.items() if n in plan.frozen]
    assert after.flops_per_token == before.flops_per_token - 2 * sum(matrices)


def test_people_read_it(
    planned: Planned, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = " ".join(str(planned(freeze=Freeze())).split())
    assert "trained and" in shown
    assert "frozen not trained" in shown
    assert "opt.assign[frozen]" in shown
    assert "frozen" not in str(planned())
    file = tmp_path / "freeze.py"
    file.write_text(
        "from minillm_core import Plugin\n\n\n"
        'class Freeze(Plugin, api=1):\n    """Freezes."""\n\n'
        "    def optimizer_factory(self, optimizer):\n"
        '        optimizer.freeze(lambda name, p: p.role == "head")\n'
    )
    assert (
        main(["plugins", "why", "head.weight", "--plugins", f"{file}:Freeze", "model.tied=false"])
        == 0
    )
    assert "opt.assign: claims it" in " ".join(capsys.readouterr().out.split())


def test_a_plan_that_freezes_everything_is_refused(planned: Planned) -> None:
    with pytest.raises(PlanError, match="every parameter is frozen, by freeze") as found:
        planned(freeze=Freeze(roles=[]))
    assert found.value.plugins == ("freeze",)


def test_no_other_plugin_has_a_word_about_a_frozen_parameter(planned: Planned) -> None:
    with pytest.raises(PlanError, match="claimed by both 'freeze' and 'other'"):
        planned(freeze=Freeze(), other=Assigns())
    for what in ("lr_mul", "wd_mul", "betas"):
        with pytest.raises(PlanError, match=f"'other' sets {what} of .*, which 'freeze' freezes"):
            planned(freeze=Freeze(), other=Assigns(what=what))
    with pytest.raises(PlanError, match="no parameter fits"):
        planned(freeze=Freeze(roles=["nothing"]))
    with pytest.raises(PlanError, match="'frozen' is provided"):
        planned(other=Assigns(what="frozen"))


def test_a_plan_with_other_settings_has_the_same_frozen(planned: Planned) -> None:
    plan = planned(freeze=Freeze())
    assert plan.with_train(lr=0.5).frozen == plan.frozen
    assert replace(plan, groups=plan.groups[:1]).frozen > plan.frozen


class Idle(Plugin, api=1):
    """Fills no slot, with a reason."""

    def optimizer_factory(self, optimizer):
        pass


class Over(Plugin, api=1):
    """Overrides the rule of queries and keys."""

    freezes: bool = True
    over: bool = True

    def optimizer_factory(self, optimizer):
        def mine(name: str, p: Any) -> bool:
            return p.role in ("attention.q", "attention.k")

        if self.freezes:
            optimizer.freeze(mine, over=self.over)
        else:
            optimizer.assign("adamw", mine, over=self.over)


@pytest.mark.parametrize("freezes", [True, False])
def test_a_claim_over_others_passes_them_over_and_says_so(planned: Planned, freezes: bool) -> None:
    class Wide(Assigns, api=1):
        """Queries, keys and values."""

        def optimizer_factory(self, optimizer):
            optimizer.rule("plain", lr=0.1)
            optimizer.assign("plain", lambda _, p: p.role.startswith("attention"))

    plugins = {"over": Over(freezes=freezes), "wide": Wide()}
    for order in (plugins, dict(reversed(plugins.items()))):
        plan = planned(**order)
        rules = {one.name: g.rule.name for g in plan.groups for one in g.members}
        taken = [n for n, p in plan.parameters.items() if p.role in ("attention.q", "attention.k")]
        now = "are frozen" if freezes else "follow the rule 'adamw'"
        said = f"over: {len(taken)} parameters that 'wide' assigns to the rule 'plain' {now}"
        assert said in plan.notes
        assert {rules.get(name) for name in taken} == {None if freezes else "adamw"}
        assert rules["layers.0.attention.v.weight"] == "plain"


@pytest.mark.parametrize(
    ("freezes", "now"), [(True, "is frozen"), (False, "follows the rule 'adamw'")]
)
def test_one_that_is_passed_over_is_one_parameter(
    planned: Planned, freezes: bool, now: str
) -> None:
    class Narrow(Plugin, api=1):
        """Queries and values of the first layer."""

        def optimizer_factory(self, optimizer):
            optimizer.rule("plain", lr=0.1)
            wanted = [f"layers.0.attention.{one}.weight" for one in "qv"]
            optimizer.assign("plain", lambda name, _: name in wanted)

    plan = planned(over=Over(freezes=freezes), narrow=Narrow())
    assert f"over: 1 parameter that 'narrow' assigns to the rule 'plain' {now}" in plan.notes


def test_who_takes_everything_leaves_nothing_or_clashes(planned: Planned) -> None:
    for_over = "into the plan: its claims on parameters yield to over"
    with pytest.raises(PlanError, match=f"plugin 'assigns' put nothing {for_over}"):
        planned(over=Over(), assigns=Assigns())
    with pytest.raises(PlanError, match=r"plugin 'idle' put nothing into the plan\n"):
        planned(over=Over(), idle=Idle())
    with pytest.raises(PlanError, match="claimed by both 'again' and 'over'"):
        planned(over=Over(), again=Over(freezes=False))
    with pytest.raises(PlanError, match="claimed by both 'assigns' and 'over'"):
        planned(over=Over(over=False), assigns=Assigns())
