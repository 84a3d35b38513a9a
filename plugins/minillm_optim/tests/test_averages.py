"""Tests of weight averages against their formulas in NumPy: stored state and evaluated weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_core.inspection import views_of
from minillm_kit import NumPyFramework
from minillm_muon.muon import Muon
from minillm_muon.role_lr import RoleLR
from minillm_optim.ema import EMA
from minillm_optim.freeze import Freeze
from minillm_optim.lion import Lion
from minillm_optim.schedule_free import ScheduleFree
from minillm_optim.swa import SWA

STEPS = 12
NAMES = ("embedding.weight", "layers.0.attention.q.weight", "norm.weight")
Arrays = dict[str, np.ndarray]


@pytest.fixture
def followed(drawn: Any, stepped: Any) -> Callable[..., Iterator[tuple[Arrays, Arrays, Arrays]]]:
    """Record parameters, evaluated weights and gradients, before and after each of 12 steps."""

    def follow(plan: Any) -> Iterator[tuple[Arrays, Arrays, Arrays]]:
        rng, groups = np.random.default_rng(0), {str(i): g for i, g in enumerate(plan.groups)}
        start, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(STEPS)]
        values = [plan.values((step + 1) / STEPS) for step in range(STEPS)]
        for count in range(STEPS + 1):
            now, state = stepped(plan, start, grads[:count], values[:count])
            views = dict(views_of(NumPyFramework(), groups, now, state))
            yield now, views, grads[count - 1] if count else {}

    return follow


def test_an_average_leaves_the_parameters_as_they_are(planned: Any, followed: Any) -> None:
    muon, settings = {"muon": Muon()}, ("train.schedule=constant",)
    plain, *others = (planned(muon | more, *settings) for more in ({}, {"e": EMA()}, {"s": SWA()}))
    assert "average" not in [anchor for anchor, _, _ in plain.rules["muon"].stages]
    assert "view" not in str(plain.data())
    alone = [now for now, _, _ in followed(plain)]
    for plan in others:
        assert plan.views.keys() == plan.parameters.keys()
        for (now, _, _), before in zip(followed(plan), alone, strict=True):
            assert all(np.array_equal(now[name], before[name]) for name in now)


@pytest.mark.parametrize(
    ("rule", "start", "decay"),
    [({}, 0.0, 0.5), ({"muon": Muon()}, 0.5, 0.2), ({"l": Lion()}, 0, 0.999)],
)
def test_ema_is_its_formula(
    planned: Any, followed: Any, rule: dict[str, Any], start: float, decay: float
) -> None:
    plan = planned({**rule, "ema": EMA(decay=decay, start=start)})
    mean: Arrays = {}
    for step, (now, views, _) in enumerate(followed(plan)):
        count = max(0, step - round(start * STEPS))
        kept = min(decay, (count - 1) / (count + 9))
        for name in NAMES:
            if count <= 1:
                mean[name] = now[name]
            else:
                mean[name] = kept * mean[name] + (1 - kept) * now[name]
            np.testing.assert_allclose(views[name], mean[name], rtol=1e-12, atol=1e-14)


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    ("last", "every", "count"), [(0.25, 1, 3), (1.0, 1, 12), (0.75, 4, 3), (0.5, 5, 1)]
)
def test_swa_is_the_mean_of_the_tail(
    planned: Any, followed: Any, last: float, every: int, count: int
) -> None:
    plan = planned({"swa": SWA(last=last, every=every)})
    tail: list[Arrays] = []
    for step, (now, views, _) in enumerate(followed(plan)):
        if step > (1 - last) * STEPS and step % every == 0:
            tail.append(now)
        for name in NAMES:
            mean = np.mean([one[name] for one in tail], 0) if tail else now[name]
            np.testing.assert_allclose(views[name], mean, rtol=1e-12, atol=1e-14)
    assert len(tail) == count
    noted = "steps may have no multiple of swa.every" in " ".join(plan.notes)
    assert noted == (every > 1)


@pytest.mark.broad(2)
@pytest.mark.parametrize("warmup", [0.0, 0.5])
@pytest.mark.parametrize(("beta1", "own"), [(0.9, 0.75), (0.5, 0.0)])
def test_schedule_free_is_the_papers(
    planned: Any, followed: Any, warmup: float, beta1: float, own: float
) -> None:
    """Compare x, y and z with their definitions; the parameter is y, x is evaluated, and norms have betas of their own."""
    free = ScheduleFree(lr=0.1, beta1=beta1, beta2=0.8, epsilon=1e-4, weight_decay=0.3)
    others = {"role_lr": RoleLR(betas={"norm": (own, 0.8)})}
    plan = planned({"free": free, **others}, f"train.warmup={warmup}")
    assert "free: its rate stays constant after the warm-up" in " ".join(plan.notes)
    betas = {name: own if "norm" in name else beta1 for name in plan.parameters}
    x, z, v, total, peak = {}, {}, {}, 0.0, 0.0
    for step, (now, views, grads) in enumerate(followed(plan)):
        if step == 0:
            x, z, v = dict(now), dict(now), {name: 0.0 for name in now}
        else:
            rate = 0.1 * min(1.0, step / STEPS / warmup) if warmup else 0.1
            peak = max(peak, rate)
            total += peak**2
            share = peak**2 / total
            for name in now:
                y = (1 - betas[name]) * z[name] + betas[name] * x[name]
                v[name] = 0.8 * v[name] + 0.2 * grads[name] ** 2
                update = grads[name] / (np.sqrt(v[name] / (1 - 0.8**step)) + 1e-4)
                wd = 0.3 * plan.parameters[name].wd_mul
                z[name] = z[name] - rate * (update + wd * y)
                x[name] = (1 - share) * x[name] + share * z[name]
        for name in now:
            y = (1 - betas[name]) * z[name] + betas[name] * x[name]
            np.testing.assert_allclose(now[name], y, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(views[name], x[name], rtol=1e-10, atol=1e-12)


def test_its_first_step_may_have_the_rate_0(planned: Any, drawn: Any, stepped: Any) -> None:
    """By the clock, progress is 0 until the seconds of the first step are known."""
    plan, rng = planned({"free": ScheduleFree()}, "train.warmup=0.5"), np.random.default_rng(0)
    start, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(3)]
    still, state = stepped(plan, start, grads[:1], [plan.values(0.0)])
    groups = {str(i): group for i, group in enumerate(plan.groups)}
    views = dict(views_of(NumPyFramework(), groups, still, state))
    for name in start:
        np.testing.assert_array_equal(still[name], start[name])
        np.testing.assert_array_equal(views[name], start[name])
    got, _ = stepped(plan, still, grads[1:], [plan.values(x) for x in (0.1, 0.2)], state, first=2)
    assert all(np.isfinite(got[name]).all() and (got[name] != start[name]).any() for name in got)


@pytest.mark.parametrize(("until", "after", "trained"), [(0.5, None, 6), (None, 0.5, 0)])
def test_a_frozen_parameter_keeps_its_average(
    planned: Any, followed: Any, until: float | None, after: float | None, trained: int
) -> None:
    freeze = Freeze(of=("norm",), until=until, after=after)
    steps = [*followed(planned({"free": ScheduleFree(lr=0.1), "freeze": freeze}))]
    for step, (before, following) in enumerate(pairwise(steps)):
        moves = trained <= step < trained + 6
        for place in range(2):  # the parameter, and its average
            one, other = before[place]["norm.weight"], following[place]["norm.weight"]
            assert np.array_equal(one, other) != moves
    now, views, _ = steps[trained + 1]  # the average starts with the first update that moves it
    np.testing.assert_allclose(views["norm.weight"], now["norm.weight"], rtol=1e-12)


def test_its_rate_follows_the_run_s_warm_up_and_no_cooldown(planned: Any) -> None:
    plan = planned({"free": ScheduleFree(lr=0.5)}, "train.warmup=0.25", "train.schedule=cosine")
    (name,) = (name for name in plan.schedules if name.endswith("schedule_free.lr"))
    rates = [plan.values(at)[name] for at in (0.05, 0.25, 0.5, 1.0)]
    np.testing.assert_allclose(rates, [0.1, 0.5, 0.5, 0.5])


def test_it_shares_a_model_with_muon_and_only_its_own_are_viewed(planned: Any) -> None:
    plan = planned({"free": ScheduleFree(scope="rest"), "muon": Muon()})
    rules = {one.name: group.rule.name for group in plan.groups for one in group.members}
    assert {*rules.values()} == {"muon", "schedule_free"}
    assert {*plan.views} == {name for name, rule in rules.items() if rule == "schedule_free"}


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        (EMA(), SWA(), "opt.extend(adamw, average)"),
        (EMA(), ScheduleFree(), "opt.view[embedding.weight]"),
    ],
)
def test_a_parameter_has_one_view(planned: Any, one: Any, other: Any, where: str) -> None:
    with pytest.raises(PlanError, match="claimed by both 'a' and 'b'") as caught:
        planned({"a": one, "b": other})
    assert where in str(caught.value)
