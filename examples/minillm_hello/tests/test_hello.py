"""The plugin against its definition, written out in NumPy float64; and minillm's contract."""

from __future__ import annotations

import numpy as np
import pytest
from minillm_core.backends.numpy.model import materialise
from minillm_core.testing import conformance
from minillm_core.testing.subject import Subject, supervised

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
def test_the_loss_is_its_definition(weight: float) -> None:
    subject = Subject("hello", {"weight": weight})
    plan = subject.plan()
    (batch,) = subject.batches(plan, 1)  # some labels are unsupervised
    values = plan.values(0.5) | {"normaliser": 1 / supervised([batch])}
    model = materialise(plan, seed=0)  # NumPy, float64
    hidden, _, _ = model.hidden(batch, values)
    want = mean_loss(hidden, model.head_weight(), batch["labels"], weight)
    assert float(model(batch, values).objective) == pytest.approx(want, rel=1e-12)
    for backend in subject.backends:
        loss, _, _ = subject.gradients(plan, backend, batch)
        assert loss == pytest.approx(want, rel=1e-5), backend


def test_held_out_text_is_judged_without_it() -> None:
    subject = Subject("hello", {"weight": 0.05})
    (batch,) = subject.batches(subject.plan(), 1)
    plans = subject.plan(), subject.plan(without=True)
    for backend in subject.backends:
        penalised, plain = (subject.trainer(one, backend).evaluate([batch]) for one in plans)
        assert penalised == plain, backend
