"""Tests of schedules that replace train.schedule: formulas, affected rates, and equality with wsd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_muon.muon import Muon
from minillm_optim.infinite_lr import InfiniteLR
from minillm_optim.power_cooldown import PowerCooldown
from minillm_optim.schedule_free import ScheduleFree

PLACES = np.linspace(0.01, 1.0, 100)
RATE = ("train.lr=1", "train.warmup=0.1")


def rates(plan: Any, name: str = "train.lr") -> np.ndarray:
    return np.array([plan.values(place)[name] for place in PLACES])


def test_power_one_is_wsd(planned: Any) -> None:
    settings = (*RATE, "train.schedule=wsd", "train.cooldown=0.4")
    want = rates(planned({}, *settings))
    plugin = PowerCooldown(power=1.0, cooldown=0.4)
    np.testing.assert_array_equal(rates(planned({"p": plugin}, *RATE)), want)


@pytest.mark.parametrize("end", [0.9, 1.0, 1.25])
def test_rates_are_the_least_of_the_peak_and_a_power(planned: Any, end: float) -> None:
    """Compare with min(lr, c (t_end - t)^1.2), the record's form, in steps of a run of 1,000."""
    plan = planned({"muon": Muon(lr=0.5), "p": PowerCooldown(cooldown=0.5, end=end)}, *RATE)
    t, t_end = 1000 * PLACES, 100 + 900 * end
    c = 1 / 450**1.2
    want = np.minimum(1.0, c * np.maximum(0.0, t_end - t) ** 1.2)
    want = np.where(t < 100, t / 100, want)
    np.testing.assert_allclose(rates(plan), want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(rates(plan, "muon.lr"), want / 2, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["cosine", "inverse_root"])
def test_the_infinite_schedule_has_the_papers_phases(planned: Any, form: Any) -> None:
    plugin = InfiniteLR(cooldown=0.5, form=form, constant=0.5, annealing=0.25, least=0.1)
    got = rates(planned({"i": plugin}, *RATE))
    for place, rate in zip(PLACES, got, strict=True):
        x = (place - 0.1) / 0.9
        if place < 0.1:
            want = place / 0.1
        elif x < 0.5 and form == "cosine":
            want = 0.5 + (1 - 0.5) / 2 * (1 + math.cos(math.pi * x / 0.5))
        elif x < 0.5:
            want = 1 - 0.5 * (1 - 1 / math.sqrt(1 + 10 * x / 0.5)) / (1 - 1 / math.sqrt(11))
        elif x <= 0.75:
            want = 0.5
        else:
            want = 0.5 * (0.1 / 0.5) ** ((x - 0.75) / 0.25)
        assert rate == pytest.approx(want)
    assert got[-1] == pytest.approx(0.1)


def test_without_annealing_it_has_no_end(planned: Any) -> None:
    got = rates(planned({"i": InfiniteLR(annealing=0)}, *RATE))
    np.testing.assert_allclose(got[-30:], 0.55)


def test_a_run_has_one_schedule_and_says_whose(planned: Any) -> None:
    plan = planned({"power_cooldown": PowerCooldown()}, *RATE)
    assert "power_cooldown after 10% warm-up" in str(plan)
    assert plan.notes == ("power_cooldown: rates follow it, and not train.schedule=cosine",)
    assert plan.data()["schedules"]["run"]["curve"][0] == "power_cooldown"
    assert "curve" not in planned({}, *RATE).data()["schedules"]["run"]
    assert ("power_cooldown", "opt.schedule") in [(p.owner, p.slot) for p in plan.placements]
    with pytest.raises(PlanError, match=r"slot opt.schedule is claimed by both 'i' and 'p'"):
        planned({"p": PowerCooldown(), "i": InfiniteLR()})
    with pytest.raises(PlanError, match="are more than the run"):
        planned({"i": InfiniteLR(cooldown=0.9)})
    with pytest.raises(PlanError, match=r"least=0\.6 is above infinite_lr\.constant=0\.55"):
        planned({"i": InfiniteLR(least=0.6)})
    for idle in (InfiniteLR(least=0.6, annealing=0), InfiniteLR(form="inverse_root", cooldown=0)):
        with pytest.raises(
            PlanError, match=r"has no effect with infinite_lr\.(annealing|cooldown)=0"
        ):
            planned({"i": idle})
    with pytest.raises(PlanError, match="rates would never reach their peak") as caught:
        planned({"p": PowerCooldown(end=0.5)})
    assert "power_cooldown.cooldown=0.5 or less" in str(caught.value)


def test_a_rate_of_its_own_does_not_follow_it(planned: Any) -> None:
    plan = planned({"free": ScheduleFree(lr=0.5), "p": PowerCooldown()}, *RATE)
    said = (
        "free: no parameter follows 'adamw', which train.lr, train.betas and train.epsilon are for"
    )
    assert said in plan.notes
    assert said not in planned({"free": ScheduleFree(scope="hidden")}, *RATE).notes
    (name,) = (
        one for one in plan.schedules if one.endswith("schedule_free.lr") or one == "free.lr"
    )
    np.testing.assert_allclose(rates(plan, name)[10:], 0.5)
