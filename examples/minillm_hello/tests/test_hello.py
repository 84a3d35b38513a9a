"""The plugin against its definition, written out in NumPy float64; and minillm's contract."""

from __future__ import annotations

import numpy as np
import pytest
from minillm_kit import conformance, one_step

test_contract = conformance("hello")


def mean_loss(hidden: np.ndarray, head: np.ndarray, labels: np.ndarray, weight: float) -> float:
    """hidden (B, T, C), head (V, C), labels (B, T) -> the mean over labels >= 0."""
    losses = []
    for b, t in np.ndindex(labels.shape):
        if labels[b, t] >= 0:
            logits = head @ hidden[b, t]  # (V,)
            lse = np.log(np.exp(logits).sum())
            losses.append(lse - logits[labels[b, t]] + weight * lse**2)
    return float(np.mean(losses))


@pytest.mark.parametrize("weight", [1e-4, 0.05])
def test_a_step_s_loss_is_the_definition_s(minillm_backend: str, weight: float) -> None:
    step = one_step("hello", {"weight": weight}, backend=minillm_backend)
    want = mean_loss(step.hidden, step.head, step.batch["labels"], weight)
    assert step.loss == pytest.approx(want, rel=1e-5)
