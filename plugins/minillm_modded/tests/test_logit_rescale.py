"""Tests of the loss of scaled logits in NumPy, together with a cap, and of refusals without effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.errors import PlanError
from minillm_kit import one_step
from minillm_modded.logit_rescale import LogitRescale
from minillm_modded.softcap import Softcap


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_the_loss_is_that_of_scaled_logits(backend: str, scale: float | None) -> None:
    pytest.importorskip("torch" if backend == "torch" else "mlx.core")
    step = one_step("logit_rescale", {} if scale is None else {"scale": scale}, backend=backend)
    labels = step.batch["labels"]
    logits = (32**-0.5 if scale is None else scale) * (step.hidden @ step.head.T)  # (B, T, V)
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
        logits, np.maximum(labels, 0)[..., None], -1
    ).squeeze(-1)
    assert step.loss == pytest.approx(nats[labels >= 0].mean(), rel=1e-5)
    # of the head only: the sum over positions of (p - 1[label]) x, times the scale
    p = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    np.put_along_axis(
        p,
        np.maximum(labels, 0)[..., None],
        np.take_along_axis(p, np.maximum(labels, 0)[..., None], -1) - 1,
        -1,
    )
    slope = np.einsum("btv,btc->vc", p * (labels >= 0)[..., None], step.hidden)
    slope *= (32**-0.5 if scale is None else scale) / (labels >= 0).sum()
    np.testing.assert_allclose(step.gradients["head.weight"], slope, rtol=2e-4, atol=1e-6)


def test_a_cap_bounds_what_was_scaled(lab: Any) -> None:
    form = lab.plan(LogitRescale(), Softcap()).spec.loss.form
    assert (form.scale, form.cap.a) == (pytest.approx(32**-0.5), 23)
    x = np.linspace(-40, 40, 9)

    class NumPy:
        @staticmethod
        def sigmoid(z: np.ndarray) -> np.ndarray:
            return 1 / (1 + np.exp(-z))

    expected = 23 / (1 + np.exp(-(x * 32**-0.5 + 5) / 7.5))
    np.testing.assert_allclose(form.logits(NumPy, x), expected)
    with pytest.raises(PlanError, match="claimed by both"):
        lab.plan(LogitRescale(), Softcap(scale=0.5))


def test_a_factor_of_one_is_refused(lab: Any) -> None:
    with pytest.raises(PlanError, match="multiplies logits by 1"):
        lab.plan(LogitRescale(scale=1))
