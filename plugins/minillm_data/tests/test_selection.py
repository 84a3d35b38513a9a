"""rho1 and jest: the selected tokens and rows, their gradients, and the losses they are selected by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import Plan, PlanError
from minillm_data.jest import Learnability
from minillm_data.rho1 import ExcessLoss
from minillm_kit import run_module
from minillm_kit.oracle import Oracle, referred, step_values
from minillm_kit.subject import Subject, supervised

BACKENDS = ("torch", "mlx")


@st.composite
def drawn(draw: Any) -> dict[str, np.ndarray]:
    """Draw losses of two models, and labels, (B, T); some rows are entirely unsupervised."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    labels = rng.integers(-3, 20, shape).astype(np.int32)
    labels[rng.random(shape[0]) < 0.2] = -1
    there = labels >= 0
    losses, reference = (np.where(there, rng.uniform(0, 9, shape), 0.0) for _ in range(2))
    return {"losses": losses, "reference": reference, "labels": labels}


@settings(max_examples=60)
@given(arrays=drawn(), share=st.sampled_from([0.05, 0.3, 0.5, 0.6, 0.99]))
def test_rho1_weighs_the_tokens_of_the_highest_excess_loss(
    arrays: dict[str, np.ndarray], share: float
) -> None:
    weights, _ = run_module(ExcessLoss, {"share": share}, **arrays)
    there = np.argwhere(arrays["labels"] >= 0)
    excess = arrays["losses"] - arrays["reference"]
    highest = sorted(there.tolist(), key=lambda place: -excess[tuple(place)])
    count = len(there)
    number = max(1, int(np.ceil(count * share - 0.5))) if count else 0  # rounded half down
    expected = np.zeros_like(excess)
    for place in highest[:number]:
        expected[tuple(place)] = count / number
    np.testing.assert_allclose(weights, expected)
    if (
        count
    ):  # the objective, weights x losses over the supervised count, is the mean of the selected
        chosen = [arrays["losses"][tuple(place)] for place in highest[:number]]
        mean = float((weights * arrays["losses"]).sum()) / count
        assert mean == pytest.approx(sum(chosen) / number)


@settings(max_examples=40)
@given(arrays=drawn())
def test_jest_scores_a_row_by_the_mean_excess_of_its_tokens(arrays: dict[str, np.ndarray]) -> None:
    scores, _ = run_module(Learnability, **arrays)
    rows = zip(arrays["losses"], arrays["reference"], arrays["labels"] >= 0, strict=True)
    for score, (loss, reference, there) in zip(scores, rows, strict=True):
        assert score == pytest.approx((loss - reference)[there].mean() if there.any() else -1e9)


def oracle_of(name: str) -> tuple[Subject, Plan, dict[str, np.ndarray], Any, np.ndarray, Oracle]:
    """Return a plan with a stand-in reference, a batch, its NumPy loss, and the excess loss (B, T)."""
    subject = Subject(name)
    plan = subject.plan()
    (batch,) = subject.batches(plan, 1)
    oracle = Oracle(subject, plan)
    (reference,) = referred(plan, batch).values()
    plain = oracle.model.losses(dict(batch), step_values(plan, batch))
    return subject, plan, batch, oracle.forward(batch), plain - reference, oracle


def test_rho1_is_the_mean_over_chosen_tokens_and_reports_all() -> None:
    _, plan, batch, loss, excess, oracle = oracle_of("rho1")
    there = batch["labels"] >= 0
    plain = oracle.model.losses(dict(batch), step_values(plan, batch))
    number = int(np.ceil(there.sum() * 0.6 - 0.5))
    edge = np.sort(excess[there])[-number]
    assert float(loss.objective) == pytest.approx(plain[there & (excess >= edge)].mean())
    assert float(loss.sums[0]) == pytest.approx(plain.sum())
    assert float(loss.count) == there.sum()


def test_jest_is_the_mean_over_kept_rows_and_reports_all() -> None:
    _, plan, batch, loss, excess, oracle = oracle_of("jest")
    there = batch["labels"] >= 0
    plain = oracle.model.losses(dict(batch), step_values(plan, batch))
    best = int(np.argmax(excess.sum(1) / there.sum(1)))  # a quarter of three rows: one
    assert float(loss.objective) == pytest.approx(plain[best][there[best]].mean())
    assert float(loss.sums[0]) == pytest.approx(plain.sum())
    assert float(loss.count) == there.sum()


@pytest.mark.parametrize("name", ["rho1", "jest"])
def test_both_frameworks_choose_and_learn_as_numpy_does(name: str) -> None:
    subject, plan, batch, loss, _, oracle = oracle_of(name)
    found = {backend: subject.gradients(plan, backend, batch) for backend in BACKENDS}
    expected = float(loss.sums[0]) / supervised([batch])
    for measured, _, _ in found.values():
        assert measured == pytest.approx(expected, rel=1e-5)
    ours, theirs = (grads for _, grads, _ in found.values())
    for parameter, grad in ours.items():
        np.testing.assert_allclose(grad, theirs[parameter], atol=1e-5)
    # along the gradient NumPy's objective falls by the gradient's length, squared
    step = 1e-7
    for name_, grad in ours.items():
        oracle.load({name_: oracle.get(name_) - step * grad})
    fallen = float(loss.objective) - float(oracle.forward(batch).objective)
    length = sum(float((grad**2).sum()) for grad in ours.values())
    assert fallen == pytest.approx(step * length, rel=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["rho1", "jest"])
def test_an_evaluation_is_of_the_trained_model_alone(name: str, backend: str) -> None:
    subject = Subject(name)
    plan, plain = subject.plan(), subject.plan(without=True)
    (batch,) = subject.batches(plan, 1)
    ours, theirs = (subject.trainer(p, backend, stirred=True) for p in (plan, plain))
    assert ours.evaluate([batch]) == theirs.evaluate([batch])
    assert sorted(ours.arrays()) == sorted(theirs.arrays())  # the reference is in no checkpoint


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_fewer_rows_than_the_share_needs_jest_keeps_one(backend: str) -> None:
    """Stages of a run may have smaller micro-batches than train.rows."""
    subject = Subject("jest")
    plan = subject.plan()
    batch = {name: array[:1] for name, array in subject.batches(plan, 1)[0].items()}
    run = subject.trainer(plan, backend)
    result = run.read(run.step([batch], plan.values(0.5), supervised([batch])))
    assert np.isfinite(result.loss)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_several_micro_batches_weighs_them_by_their_tokens(backend: str) -> None:
    """Each micro-batch counts as the mean over its selected tokens, times its share of supervised tokens."""
    subject = Subject("rho1")
    plan = subject.plan()
    batches = subject.batches(plan, 2)
    batches[1]["labels"][0] = -1
    values, total = plan.values(0.5), supervised(batches)
    run = subject.trainer(plan, backend, stirred=True)
    result = run.read(run.step(batches, values, total))
    oracle = Oracle(subject, plan)
    sums = [float(oracle.forward(one).sums[0]) for one in batches]
    assert result.loss == pytest.approx(sum(sums) / total, rel=1e-5)


def test_the_estimate_counts_forward_passes_and_the_reference() -> None:
    plans = {name: Subject(name).plan() for name in ("rho1", "jest")}
    plain = Subject("rho1").plan(without=True).estimate()
    rho1, jest = (plans[name].estimate() for name in ("rho1", "jest"))
    reference = plain.flops_per_token // 3
    model = plans["rho1"].config.model
    assert rho1.part("reference 'rho1_reference'").flops == reference
    assert rho1.flops_per_token == plain.flops_per_token + reference + 2 * model.dim * model.vocab
    third = plain.flops_per_token / 3  # one row of three is kept
    assert jest.flops_per_token == pytest.approx(third + 2 * reference, abs=20)
    assert jest.parameters == rho1.parameters == plain.parameters
    tokens = 3 * 13
    held = 4 * (plain.parameters + tokens)
    assert rho1.memory["reference 'rho1_reference'"] == held


def test_a_share_that_keeps_every_row_is_refused() -> None:
    with pytest.raises(PlanError, match="it must keep fewer than") as refused:
        Subject("jest", {"keep": 0.9}).planned()
    assert "train.rows=3" in str(refused.value)
