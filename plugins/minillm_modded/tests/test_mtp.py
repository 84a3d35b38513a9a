"""Tests of multi-token prediction against the explicit sum, and of when targets leave the step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import PlanError
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan, stages_of
from minillm_core.plugins.manager import LoadedPlugin
from minillm_kit import materialise
from minillm_kit.subject import traced_trainer
from minillm_modded.mtp import MTP

VOCAB, ROWS, LENGTH = 23, 2, 7


def planned(plugin: MTP, *extra: str) -> Plan:
    sizes = {"layers": 1, "dim": 16, "heads": 2, "kv_heads": 2, "hidden": 8, "vocab": VOCAB}
    run = {"steps": 9, "rows": ROWS, "seq_len": LENGTH, "warmup": 0}
    given_ = [f"model.{k}={v}" for k, v in sizes.items()] + [
        f"train.{k}={v}" for k, v in run.items()
    ]
    config = load(
        preset="tiny", assignments=[*given_, *extra], default_preset=lambda: ("tiny", "test")
    ).config
    return build_plan(config, [LoadedPlugin.of("mtp", plugin)])


def drawn(rng: np.random.Generator) -> dict[str, np.ndarray]:
    ids = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    labels = ids[:, 1:].copy()
    labels[0, :2] = -1
    return {"ids": ids[:, :-1].copy(), "labels": labels}


def definition(log_p: np.ndarray, labels: np.ndarray, weights: list[float]) -> float:
    """Sum weight x nats of the label 0, 1, 2 ... positions further, divided by the main target's count."""
    total = 0.0
    for row in range(ROWS):
        for t in range(LENGTH):
            for ahead, weight in enumerate(weights):
                if t + ahead < LENGTH and labels[row, t + ahead] >= 0:
                    total -= weight * log_p[row, t, labels[row, t + ahead]]
    return total / np.count_nonzero(labels >= 0)


@settings(max_examples=20)
@given(progress=st.floats(1e-3, 1), seed=st.integers(0, 2**32))
def test_the_loss_is_the_weighted_sum(progress: float, seed: int) -> None:
    plan = planned(MTP(end=2 / 3))
    model, batch = materialise(plan, 0), drawn(np.random.default_rng(seed))
    values = plan.values(progress)
    supervised = np.count_nonzero(batch["labels"] >= 0)
    loss = model(dict(batch), {**values, "normaliser": 1 / supervised})
    hidden, _, _ = model.hidden(dict(batch), values)
    logits = hidden @ model.head.weight.T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    second = 0.5 * np.clip((2 / 3 - progress) * 3, 0, 1)
    third = 0.25 * np.clip((1 / 3 - progress) * 3, 0, 1)
    want = definition(log_p, batch["labels"], [1.0, second, third])
    assert loss.objective == pytest.approx(want, rel=1e-9)
    assert loss.sums[0] / supervised == pytest.approx(definition(log_p, batch["labels"], [1.0]))


@pytest.mark.parametrize(
    ("weights", "end", "want"),
    [
        ((0.5, 0.25), 2 / 3, [(0, 3), (1 / 3, 2), (2 / 3, 1)]),
        ((0.3,), 0.5, [(0, 2), (0.5, 1)]),
        ((0.5, 0.4, 0.3), 1.0, [(0, 4), (1 / 3, 3), (2 / 3, 2)]),
    ],
)
def test_targets_leave_one_after_the_other(
    weights: tuple[float, ...], end: float, want: list[tuple[float, int]]
) -> None:
    plan = planned(MTP(weights=weights, end=end))
    for start, targets in want:
        values = plan.values(start + 1e-6)
        assert 1 + len(plan.spec.loss.present(values)) == targets
    assert len(stages_of(plan)) == len(want)
    for target in plan.spec.loss.targets:  # a removed target already had weight 0
        if target.stage is not None:
            start = plan.schedules[target.stage][1].knots[1][0]  # type: ignore[attr-defined]
            assert plan.values(start)[target.weight.value or ""] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_target_that_is_gone_is_not_computed(backend: str) -> None:
    """Train through all three stages: reports name the remaining targets."""
    pytest.importorskip({"torch": "torch", "mlx": "mlx.core"}[backend])
    plan = planned(MTP(end=2 / 3), "train.compile=off")
    run = traced_trainer(plan, backend)
    rng, found = np.random.default_rng(0), []
    for step in (1, 5, 9):
        batch = drawn(rng)
        supervised = int(np.count_nonzero(batch["labels"] >= 0))
        result = run.read(run.step([batch], plan.values(step / 9), supervised))
        found.append(sorted(result.terms))
    assert found == [["offset2", "offset3"], ["offset2"], []]


def test_an_end_outside_the_run_is_refused() -> None:
    from minillm_core.plugins.builders import LossBuilder, LossSlots
    from minillm_core.plugins.builders.base import ValueTable

    builder = LossBuilder("mine", ValueTable(), LossSlots(LENGTH, rows=2, dim=8))
    with pytest.raises(PlanError, match=r"until=1.5"):
        builder.target(0.5, offset=2, until=1.5)


def test_a_target_beyond_the_row_is_refused() -> None:
    """It would have no labels: nothing to learn, and a loss of 0 in the reports."""
    planned(MTP(weights=(0.5,) * (LENGTH - 1)))
    with pytest.raises(PlanError, match=rf"offset {LENGTH + 1}, and a row of {LENGTH} tokens"):
        planned(MTP(weights=(0.5,) * LENGTH))


def test_it_leaves_the_model_as_it_is() -> None:
    assert planned(MTP()).export.layout == "llama"
