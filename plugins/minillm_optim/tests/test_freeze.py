"""Tests of frozen parameters: selection and time, and that the others train as with constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_muon.muon import Muon
from minillm_muon.role_lr import RoleLR
from minillm_optim.ema_nesterov import EMANesterov
from minillm_optim.freeze import Freeze
from minillm_optim.schedule_free import ScheduleFree
from minillm_optim.snoo import Snoo

STEPS = 10
RATES = ("train.lr=0.01", "train.warmup=0", "train.schedule=constant")


def moves(planned: Any, drawn: Any, stepped: Any, plugins: Any, name: str) -> list[float]:
    """Measure how far a parameter moves in each of ten steps."""
    plan, rng = planned(plugins, *RATES), np.random.default_rng(0)
    now, state, found = drawn(plan, rng), None, []
    for step in range(1, STEPS + 1):
        before, grad, values = now[name], drawn(plan, rng), plan.values(step / STEPS)
        now, state = stepped(plan, now, [grad], values, state=state, first=step)
        found.append(float(np.abs(now[name] - before).max()))
    return found


@pytest.mark.parametrize(
    ("until", "after", "trained"),
    [(0.3, None, range(3, 10)), (None, 0.6, range(6)), (0.2, 0.5, range(2, 5))],
)
@pytest.mark.parametrize(
    "plugins",
    [
        {},
        {"muon": Muon()},
        {"snoo": Snoo(every=2)},
        {"ahead": EMANesterov(start=0, stop=1)},
        {"free": ScheduleFree()},
    ],
)
def test_steps_of_a_share_are_left_out(
    planned: Any, drawn: Any, stepped: Any, until: Any, after: Any, trained: range, plugins: Any
) -> None:
    chosen, other = "layers.1.mlp.up.weight", "layers.0.mlp.up.weight"
    frozen = plugins | {"freeze": Freeze(of=("layers.1.*",), until=until, after=after)}
    found = moves(planned, drawn, stepped, frozen, chosen)
    assert [step for step, size in enumerate(found) if size] == [*trained]
    assert all(moves(planned, drawn, stepped, frozen, other))


def test_moments_follow_while_the_rate_is_0(planned: Any, drawn: Any, stepped: Any) -> None:
    plan = planned({"freeze": Freeze(of=("norm",), until=0.5)}, *RATES)
    plain, rng = planned({}, *RATES), np.random.default_rng(1)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(4)]
    values = [plan.values(0.1)] * 4
    got, state = stepped(plan, params, grads, values)
    want, kept = stepped(plain, params, grads, values)
    for key, group in enumerate(plan.groups):
        name = group.members[0].name
        np.testing.assert_array_equal(
            state[str(key)]["precondition"]["m"], kept[str(key)]["precondition"]["m"]
        )
        frozen = plan.parameters[name].role == "norm"
        np.testing.assert_array_equal(got[name], params[name] if frozen else want[name])


def test_for_good_they_are_in_no_group(planned: Any) -> None:
    plan = planned({"muon": Muon(), "freeze": Freeze(of=("layers.0.*", "embedding.*"))})
    assert plan.frozen == {
        name
        for name, info in plan.parameters.items()
        if name.startswith("layers.0.") or info.role == "embedding.token"
    }
    (note,) = plan.notes
    assert note.startswith("freeze: 7 parameters that 'muon' assigns")


def test_what_cannot_be_frozen_is_refused(planned: Any) -> None:
    with pytest.raises(PlanError, match=r"'layers.9.*' is not a parameter's name or role"):
        planned({"freeze": Freeze(of=("norm", "layers.9.*"))})
    with pytest.raises(PlanError, match=r"until=0.6 is not before freeze.after=0.4") as caught:
        planned({"freeze": Freeze(until=0.6, after=0.4)})
    assert "set freeze.until below freeze.after" in str(caught.value)
    with pytest.raises(PlanError, match=r"lr_mul is claimed by both .freeze. and .role_lr."):
        planned({"freeze": Freeze(of=("norm",), until=0.5), "role_lr": RoleLR(norm=2.0)})
    with pytest.raises(PlanError, match="every parameter is frozen"):
        planned({"freeze": Freeze(of=("*",))})
