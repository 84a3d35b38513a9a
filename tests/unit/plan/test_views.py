"""Tests of parameter views in a plan: claims, data, and refusals of duplicates."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from minillm_core import Plan, PlanError, Plugin, option, stage
from minillm_core.cli.main import main
from minillm_core.plan.diff import differences
from minillm_core.plan.slots import slots_of

Planned = Callable[..., Plan]


class Kept(Plugin, api=1):
    """Keeps what was written, and is evaluated at it."""

    roles: str = option("", help="beginning of the roles")
    share: float = option(0.5, help="of it")

    def optimizer_factory(self, optimizer):
        optimizer.extend("*", "average", stage(kept, state={"last": "like"}))
        optimizer.view(lambda _, p: p.role.startswith(self.roles), seen, share=self.share)


class Seen(Plugin, api=1):
    """Views alone."""

    what: str = option("seen", help="seen, local, array or nobody")

    def optimizer_factory(self, optimizer):
        given = {"array": {"share": object()}}.get(self.what, {"share": 1})
        function = (lambda ops, param, state: param) if self.what == "local" else seen
        optimizer.view(
            lambda _, p: self.what != "nobody" and p.role == "mlp.down", function, **given
        )


class Freeze(Plugin, api=1):
    """Freezes the embedding."""

    def optimizer_factory(self, optimizer):
        optimizer.freeze(lambda _, p: p.role == "embedding.token")


def kept(ops: Any, update: Any, param: Any, state: Any) -> Any:
    """Store the new parameter."""
    return update, {"last": param}


def seen(ops: Any, param: Any, state: Any, *, share: float) -> Any:
    """Return a fraction of the parameter."""
    return param * share


def test_a_view_is_data_of_the_plan_where_it_is_claimed(planned: Planned) -> None:
    plain, plan = planned(), planned(kept=Kept(roles="mlp"))
    assert "view" not in json.dumps(plain.data()["optimizer"])
    assert {*plan.views} == {n for n, p in plan.parameters.items() if p.role.startswith("mlp")}
    view = {"owner": "kept", "reference": f"{__name__}:seen", "arguments": [["share", 0.5]]}
    found = json.loads(json.dumps(plan.data()["optimizer"]["groups"]))
    assert [one["view"] for g in found for one in g["members"] if "view" in one] == [view] * len(
        plan.views
    )
    assert plan.hash != plain.hash
    assert differences(plan.data(), planned(kept=Kept(roles="mlp", share=0.25)).data())
    assert __name__ in plan.data()["digests"]
    assert plain.rules["adamw"].stages == plan.rules["adamw"].stages[:-1]
    assert plan.rules["adamw"].stages[-1][:2] == ("average", "kept")


def test_a_plan_says_who_and_what_it_costs(planned: Planned) -> None:
    plain, plan = planned(), planned(kept=Kept())
    numbers = plan.num_parameters
    assert plan.estimate().viewed == 4 * numbers
    assert plan.estimate().data()["viewed"] == 4 * numbers
    assert "viewed" not in plain.estimate().data()
    more = plan.estimate().checkpoint_bytes - plain.estimate().checkpoint_bytes
    assert more == 2 * 4 * numbers  # the stage's state, and the view
    assert f"{len(plan.parameters)} parameters are evaluated by 'kept'" in " ".join(
        str(plan).split()
    )
    assert f"opt.view: {len(plan.parameters)} parameters" in slots_of(plan, "kept")
    (one,) = (p for p in plan.plugins if p.name == "kept")
    assert "stage:adamw.average" in one.expected
    assert {f"view:{name}" for name in plan.parameters} <= {*one.expected}
    report = plan.table["opt.view[norm.weight]"]
    assert [(h.owner, h.what, h.why) for h in report.held] == [("kept", "seen", "claims it")]


def test_a_frozen_parameter_has_no_view(planned: Planned) -> None:
    plan = planned(kept=Kept(), freeze=Freeze())
    assert plan.frozen == {"embedding.weight"}
    assert {*plan.views} == {*plan.parameters} - plan.frozen
    (one,) = (p for p in plan.plugins if p.name == "kept")
    assert "view:embedding.weight" not in one.expected


def test_two_views_of_a_parameter_are_refused_with_both_names(planned: Planned) -> None:
    with pytest.raises(PlanError, match="claimed by both 'kept' and 'other'") as caught:
        planned(kept=Kept(), other=Seen())
    assert caught.value.where == "opt.view[layers.0.mlp.down.weight]"
    assert (
        planned(kept=Kept(roles="attention"), other=Seen()).views["layers.0.mlp.down.weight"].owner
        == "other"
    )


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("local", "cannot be referred to"),
        ("array", "is not JSON"),
        ("nobody", "opt.view: no parameter fits"),
    ],
)
def test_what_is_no_view_is_refused_while_planning(planned: Planned, what: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        planned(seen=Seen(what=what))
    assert "'seen'" in str(caught.value)


def test_why_shows_who_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "why", "opt.view", "--plugins", "ema", "--preset", "tiny"]) == 0
    said = capsys.readouterr().out
    assert "opt.view[head.weight]" in said
    assert "averaged" in said
    assert main(["plan", "--plugins", "ema", "--preset", "tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    members = [one for g in found["plan"]["optimizer"]["groups"] for one in g["members"]]
    assert {one["view"]["owner"] for one in members} == {"ema"}
