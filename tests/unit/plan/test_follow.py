"""Tests of a parameter that follows another one in a plan: its data, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from minillm_core import Plan, PlanError, Plugin, option, piecewise, zeros
from minillm_core.optim.schedules import Plateaus
from minillm_core.plan.slots import slots_of

Planned = Callable[..., Plan]
HEAD, EMBEDDING = "head.weight", "embedding.weight"


@pytest.fixture
def planned(planned: Planned) -> Planned:
    """Return plans with a separate head."""
    return partial(planned, "model.tied=false")


class Follow(Plugin, api=1):
    """Lets one parameter follow another."""

    name: str = option(HEAD, help="who follows")
    leader: str = option(EMBEDDING, help="whom")
    until: float = option(0.5, help="share of the run")

    def optimizer_factory(self, optimizer):
        optimizer.follow(self.name, self.leader, until=self.until)


class Set(Plugin, api=1):
    """Distinguishes the head from the embedding."""

    how: str = option("lr", help="in what")

    def build_model(self, model):
        if self.how == "init":
            model.init(HEAD, zeros)

    def optimizer_factory(self, optimizer):
        def head(name: str, _: Any) -> bool:
            return name == HEAD

        if self.how == "freeze":
            optimizer.freeze(head)
        elif self.how == "rule":
            optimizer.rule("other", lr=0.1)
            optimizer.assign("other", head)
        elif self.how == "betas":
            optimizer.set(head, betas=(0.5, 0.9))
        elif self.how == "schedule":
            optimizer.set(head, lr_mul=piecewise((0, 1.0), (1, 0.5)))
        elif self.how == "lead":
            optimizer.follow(EMBEDDING, HEAD)
        elif self.how == "lr":
            optimizer.set(head, lr_mul=0.5)


def member(plan: Plan, name: str) -> Any:
    return next(m for group in plan.groups for m in group.members if m.name == name)


def test_who_follows_is_data_of_the_plan(planned: Planned) -> None:
    plain, plan = planned(), planned(follow=Follow())
    assert "follow" not in json.dumps(plain.data()["optimizer"])
    assert {name: one.leader for name, one in plan.follows.items()} == {HEAD: EMBEDDING}
    groups = plan.data()["optimizer"]["groups"]
    (found,) = [one["follows"] for g in groups for one in g["members"] if "follows" in one]
    value = {"value": "follow.head.weight.tied", "until": 0.5}
    assert found == {"owner": "follow", "leader": EMBEDDING, **value}
    assert plan.data()["model"]["inits"][HEAD] == {"init": "same", "parameter": EMBEDDING}
    numbers = [plan.values(progress)["follow.head.weight.tied"] for progress in (0.1, 0.5, 0.51, 1)]
    assert numbers == [1, 1, 0, 0]
    to_the_end = planned(follow=Follow(until=1))
    assert to_the_end.values(1.0)["follow.head.weight.tied"] == 1
    assert plan.hash != planned(follow=Follow(until=0.6)).hash
    assert plan.num_parameters == plain.num_parameters
    estimates = plan.estimate(), plain.estimate()
    assert estimates[0].checkpoint_bytes == estimates[1].checkpoint_bytes
    assert any("opt.follow" in line for line in slots_of(plan, "follow"))
    report = plan.table[f"opt.follow[{HEAD}]"]
    assert [(h.owner, h.what) for h in report.held] == [
        ("follow", "embedding.weight until 0.5 of the run")
    ]
    (one,) = plan.plugins
    assert f"follow:{HEAD}" in one.expected


def test_factors_are_the_leader_s_until_they_part(planned: Planned) -> None:
    plan = planned(follow=Follow(), other=Set())
    head, embedding = member(plan, HEAD), member(plan, EMBEDDING)
    schedules = [plan.schedules[one.lr_mul][1] for one in (head, embedding)]
    assert schedules == [Plateaus(((0, 1.0), (0.5, 0.5))), Plateaus(((0, 1.0), (0.5, 1.0)))]
    assert head.wd_mul == embedding.wd_mul == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("freeze", "'other' freezes 'head.weight'"),
        ("rule", "they have the rules 'other' and 'adamw'"),
        ("betas", "they have different betas"),
        ("schedule", "the lr_mul of only one of them follows that schedule"),
        ("lead", "follows another itself"),
        ("init", "plugin 'other' gives initial values to 'head.weight'"),
    ],
)
def test_what_cannot_be_one_is_refused(planned: Planned, how: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        planned(follow=Follow(), other=Set(how=how))
    assert "leave out" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "head.wieght"}, "did you mean head.weight?"),
        ({"leader": "norm.weight"}, "cannot stand for 'head.weight'"),
        ({"leader": HEAD}, "cannot stand for 'head.weight'"),
        ({"until": 0.0}, "until=0.0"),
        ({"until": 1.5}, "until=1.5"),
    ],
)
def test_what_is_no_pair_is_refused(planned: Planned, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        planned(follow=Follow(**options))
    assert said in str(caught.value)
    assert "'follow'" in str(caught.value)
