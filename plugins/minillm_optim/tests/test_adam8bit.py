"""Tests of AdamW in 8 bits: its formulas, its deviation from AdamW, and its stored state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_kit import NumPyOps
from minillm_muon.muon import Muon
from minillm_optim.adam8bit import Adam8bit, adam

torch = pytest.importorskip("torch")


def test_wide_moments_are_torchs_adam() -> None:
    rng = np.random.default_rng(0)
    weight, grads = rng.standard_normal((4, 6)), rng.standard_normal((5, 4, 6))
    tensor = torch.nn.Parameter(torch.tensor(weight))
    theirs = torch.optim.Adam([tensor], lr=0.1, betas=(0.8, 0.95), eps=1e-8)
    state = {"m": np.zeros((4, 6)), "r": np.zeros((4, 6))}
    for step, grad in enumerate(grads, 1):
        given = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-8, "updates": float(step)}
        update, state = adam(NumPyOps(), grad, weight, state, **given)
        weight = weight - 0.1 * update
        tensor.grad = torch.tensor(grad)
        theirs.step()
    np.testing.assert_allclose(weight, tensor.detach().numpy(), rtol=1e-10)


def test_updates_stay_near_those_of_adamw(planned: Any, drawn: Any, stepped: Any) -> None:
    plain, narrow = planned({}), planned({"adam8bit": Adam8bit()})
    rng = np.random.default_rng(1)
    params, grads = drawn(plain, rng), [drawn(plain, rng) for _ in range(20)]
    (want, _), (got, _) = (stepped(p, params, grads, {"train.lr": 0.01}) for p in (plain, narrow))
    for name, array in params.items():
        moved = np.linalg.norm(want[name] - array)
        assert np.linalg.norm(got[name] - want[name]) < 0.05 * moved, name


def test_its_state_is_a_quarter_and_says_so(planned: Any) -> None:
    plans = [planned({}), planned({"adam8bit": Adam8bit()})]
    wide, narrow = (plan.estimate().memory["optimizer state (adamw)"] for plan in plans)
    assert wide == 8 * plans[0].num_parameters
    assert 0.25 * wide < narrow < 0.27 * wide
    both = planned({"adam8bit": Adam8bit(), "muon": Muon()})
    assert {
        name for name, rule in both.rules.items() if any(s.narrow for _, _, s in rule.stages)
    } == {"adamw"}
