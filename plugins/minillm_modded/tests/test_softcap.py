"""Tests of the loss of capped logits against its definition, in a whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.errors import PlanError, PluginError
from minillm_core.plugins.options import validated
from minillm_modded.softcap import Softcap

Curve = Callable[[np.ndarray], np.ndarray]

CASES: list[tuple[dict[str, Any], Curve]] = [
    ({}, lambda z: 23 / (1 + np.exp(-(z + 5) / 7.5))),
    ({"a": 15.0, "b": 0.0}, lambda z: 15 / (1 + np.exp(-z / 7.5))),
    ({"form": "tanh"}, lambda z: 15 * np.tanh(z / 15)),
    ({"form": "tanh", "cap": 30.0, "scale": 0.5}, lambda z: 30 * np.tanh(z / 60)),
]


@pytest.mark.parametrize(("options", "curve"), CASES)
def test_the_loss_is_that_of_the_capped_logits(
    lab: Any, rng: Any, options: dict[str, Any], curve: Curve
) -> None:
    plan = lab.plan(Softcap(**options))
    model = lab.model(plan)
    batch = lab.batch() | {"labels": rng.integers(0, 29, (2, 9)).astype(np.int32)}
    z = 40 * (model.hidden(batch) @ model.net.head.weight.T)
    model.net.head.weight = 40 * model.net.head.weight  # far into the nonlinear range
    logits = curve(z)
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
        logits, batch["labels"][..., None], -1
    ).squeeze(-1)
    loss = model.net(batch, plan.values(1.0) | {"normaliser": 1.0 / nats.size})
    np.testing.assert_allclose(loss.objective, nats.mean(), rtol=1e-9)


@given(st.floats(-60, 60))
def test_the_record_of_2025_02_is_a_tanh_but_for_a_constant(z: float) -> None:
    sigmoid = 15 / (1 + np.exp(-z / 7.5))
    assert abs(sigmoid - 7.5 - 7.5 * np.tanh(z / 15)) < 1e-9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"form": "tanh", "a": 10.0, "c": 2.0}, "form tanh does not read a or c"),
        ({"cap": 30.0}, "form sigmoid does not read cap"),
    ],
)
def test_an_option_of_the_other_form_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        validated(Softcap, "softcap", options)
    whole = Softcap().model_dump() | {"form": "tanh"}  # all options are named, as in a run's record
    assert validated(Softcap, "softcap", whole).form == "tanh"


def test_only_one_may_say_what_the_logits_are(lab: Any) -> None:
    class Other(Softcap, api=1):
        """A second cap."""

    with pytest.raises(
        PlanError, match=r"loss.logits\[cap\] is claimed by both 'other' and 'softcap'"
    ):
        lab.plan(Softcap(), Other())
