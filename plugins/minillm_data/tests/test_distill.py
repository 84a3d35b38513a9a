"""Distillation: the divergence and gradients of both frameworks against NumPy, and learning from a teacher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.ops.form import LossForm, SigmoidCap
from minillm_data.distill import Divergence
from minillm_kit import run_module
from minillm_kit.oracle import Oracle, referred, step_values
from minillm_kit.subject import Subject, supervised

BACKENDS = ("torch", "mlx")


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def divergence(
    ours: np.ndarray, theirs: np.ndarray, labels: np.ndarray, t: float, reverse: bool
) -> float:
    """Compute t^2 times the mean KL over supervised positions, position by position."""
    found = []
    for at in np.ndindex(labels.shape):
        if labels[at] >= 0:
            q, p = softmax(ours[at] / t), softmax(theirs[at] / t)
            p, q = (q, p) if reverse else (p, q)
            found.append(sum(p[i] * (np.log(p[i]) - np.log(q[i])) for i in range(len(p))))
    return t * t * float(np.mean(found)) if found else 0.0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    reverse=st.booleans(),
    form=st.sampled_from([LossForm(), LossForm(scale=0.25), LossForm(cap=SigmoidCap(23, 5, 7.5))]),
)
def test_the_term_is_the_mean_divergence(
    seed: int, temperature: float, reverse: bool, form: Any
) -> None:
    rng = np.random.default_rng(seed)
    (B, T, C, V) = (*rng.integers(1, 4, 2), 5, 7)
    x, head = rng.standard_normal((B, T, C)), rng.standard_normal((V, C))
    teacher = 3 * rng.standard_normal((B, T, V))
    labels = rng.integers(-2, V, (B, T)).astype(np.int32)
    given = {"temperature": temperature, "reverse": reverse}
    found, _ = run_module(
        Divergence, given, x=x, head=head, form=form, teacher=teacher, labels=labels
    )
    logits = x @ head.T * form.scale
    if form.cap is not None:
        logits = 23 / (1 + np.exp(-(logits + 5) / 7.5))
    expected = divergence(logits, teacher, labels, temperature, reverse)
    assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("options", [{}, {"direction": "reverse", "only": True, "weight": 0.5}])
def test_both_frameworks_learn_what_numpy_does(options: dict[str, Any]) -> None:
    subject = Subject("distill", options)
    plan = subject.plan()
    (batch,) = subject.batches(plan, 1)
    oracle = Oracle(subject, plan)
    loss, values = oracle.forward(batch), step_values(plan, batch)
    plain = oracle.model.losses(dict(batch), values)
    (teacher,) = referred(plan, batch).values()
    ours = oracle.model.all_logits(dict(batch), values)
    reverse, weight = options.get("direction") == "reverse", options.get("weight", 1.0)
    apart = divergence(ours, teacher, batch["labels"], 2.0, reverse)
    assert apart > 0.1
    labels = 0.0 if options.get("only") else plain[batch["labels"] >= 0].mean()
    assert float(loss.objective) == pytest.approx(labels + weight * apart)
    assert float(loss.sums[0]) == pytest.approx(plain.sum())  # the reported loss is the labels'
    found = {backend: subject.gradients(plan, backend, batch) for backend in BACKENDS}
    for measured, _, _ in found.values():
        assert measured == pytest.approx(plain.sum() / supervised([batch]), rel=1e-5)
    mine, theirs = (grads for _, grads, _ in found.values())
    for name, grad in mine.items():
        np.testing.assert_allclose(grad, theirs[name], atol=2e-5)
    step = 1e-7  # along the gradient the objective falls by the gradient's length, squared
    for name, grad in mine.items():
        oracle.load({name: oracle.get(name) - step * grad})
    fallen = float(loss.objective) - float(oracle.forward(batch).objective)
    length = sum(float((grad**2).sum()) for grad in mine.values())
    assert fallen == pytest.approx(step * length, rel=1e-3)


@pytest.mark.broad(1)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_model_is_drawn_to_its_teacher_without_labels(direction: str) -> None:
    """With the teacher alone, the divergence of one batch falls to a tenth; the labels' loss need not fall."""
    pytest.importorskip("torch")
    subject = Subject("distill", {"direction": direction, "only": True, "temperature": 1.0})
    plan = subject.plan()
    (batch,) = subject.batches(plan, 1)
    run = subject.trainer(plan, "torch", stirred=True)
    values = {**plan.values(0.2), "train.lr": 0.01}
    found = []
    for _ in range(150):
        result = run.read(run.step([batch], values, supervised([batch])))
        found.append(result.terms["distill"])
    assert found[-1] < 0.1 * found[0]
