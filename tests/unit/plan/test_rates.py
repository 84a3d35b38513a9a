"""Tests of factors on the run's schedule: the plan's data, the rates that follow it, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minillm_core import Plan, PlanError, Plugin, option, piecewise, plateaus, scheduled, stages

Planned = Callable[..., Plan]


class Rates(Plugin, api=1):
    """A factor, and rules whose rates follow the run's schedule, or have one of their own."""

    what: str = option("plateaus", help="which factor")

    def optimizer_factory(self, optimizer):
        factors: dict[str, Any] = {
            "plateaus": plateaus((0, 1.0), (0.5, 2.0)),
            "stages": stages((0, 1), (0.5, 2)),
            "scheduled": scheduled(2.0),
            "number": 2.0,
        }
        optimizer.rates(factors[self.what])
        optimizer.rule("follows", lr=0.1)
        optimizer.rule("own", lr=piecewise((0, 0.3), (1, 0.3)))
        optimizer.assign("follows", lambda _, p: p.role == "norm")
        optimizer.assign("own", lambda _, p: p.role == "mlp.down")


class Again(Plugin, api=1):
    """Another factor."""

    def optimizer_factory(self, optimizer):
        optimizer.rates(plateaus((0, 1.0), (0.1, 3.0)))


def test_every_rate_that_follows_the_run_has_it(planned: Planned) -> None:
    plan, plain = planned(rates=Rates()), planned()
    for at, factor in ((0.01, 1), (0.5, 1), (0.6, 2), (1.0, 2)):
        ours, theirs = plan.values(at), plain.values(at)
        assert ours["train.lr"] == pytest.approx(factor * theirs["train.lr"])
        assert ours["follows.lr"] / 0.1 == pytest.approx(ours["train.lr"] / plan.config.train.lr)
        assert ours["own.lr"] == 0.3
    knots = [[0.0, 1.0], [0.5, 2.0]]
    assert plan.data()["schedules"]["run"]["rates"]["schedule"] == "plateaus"
    assert [list(k) for k in plan.data()["schedules"]["run"]["rates"]["knots"]] == knots
    assert "rates" not in plain.data()["schedules"]["run"]
    assert "plateaus: 1 from 0, 2 from 0.5 of the run" in " ".join(str(plan).split())


@pytest.mark.parametrize("what", ["stages", "scheduled", "number"])
def test_another_factor_is_refused(planned: Planned, what: str) -> None:
    with pytest.raises(PlanError, match="is not a factor over the run"):
        planned(rates=Rates(what=what))


def test_two_factors_are_refused_with_both_names(planned: Planned) -> None:
    with pytest.raises(PlanError, match="claimed by both 'other' and 'rates'") as caught:
        planned(rates=Rates(), other=Again())
    assert caught.value.where == "opt.rates"
