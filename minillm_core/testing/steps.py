"""For tests of an author's own: one training step, with all that went in and came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm_core.backends.numpy.model import materialise
from minillm_core.nn.module import declared
from minillm_core.nn.param import Param
from minillm_core.testing.subject import Batch, Subject, supervised

__all__ = ["Step", "one_step"]


@dataclass(frozen=True)
class Step:
    """One step of a small model."""

    batch: Batch  # ids, labels, documents, positions: int32 (B, T), as on_batch left them
    values: dict[str, float]  # schedule value -> what it was: "my_rule.lr"
    hidden: np.ndarray  # (B, T, C) float64, what the head is given, computed by NumPy
    head: np.ndarray  # (V, C) float64
    loss: float  # the main target's, nats a supervised label
    before: dict[str, np.ndarray]  # parameter -> float64
    gradients: dict[str, np.ndarray]  # of the loss, as they reach the optimizer; not clipped
    after: dict[str, np.ndarray]  # parameter -> float64


def one_step(spec: str, options: Mapping[str, Any] | None = None, *, backend: str) -> Step:
    """Train a small model with the plugin for one step, on a CPU.

    The model is the plain one, of odd sizes: two layers, C = 32, V = 97, rows of 13 tokens, some
    labels unsupervised; every parameter is moved away from its initial value.

    ::

        step = one_step("my_loss", {"weight": 0.05}, backend="mlx")
        expected = reference.mean_loss(step.hidden, step.head, step.batch["labels"], 0.05)
        assert step.loss == pytest.approx(expected, rel=1e-5)

    Args:
        spec: the plugin's name, or a file and its class.
        options: its options, where not the defaults.
        backend: ``torch`` or ``mlx``.

    Raises:
        NotApplicable: the plugin does not run on the backend, or that is not installed.
    """
    subject = Subject(spec, options, backend=backend)
    (backend,) = subject.backends
    plan = subject.plan()
    (batch,) = subject.batches(plan, 1)
    run = subject.stirred(plan, backend)
    before = _weights(run.arrays())
    (loss,) = subject.train(run, plan, [batch])
    values = plan.values(1 / (plan.config.train.steps or 1))
    model = materialise(plan, 0)
    for name, module, attribute, _ in declared(model, Param):
        setattr(module, attribute, before[name])
    hidden, _, _ = model.hidden(dict(batch), {**values, "normaliser": 1 / supervised([batch])})
    return Step(
        batch,
        values,
        hidden,
        model.head_weight(),
        loss,
        before,
        subject.gradients(plan, backend, batch)[1],
        _weights(run.arrays()),
    )


def _weights(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    prefix = "model."
    return {
        name.removeprefix(prefix): value.astype(np.float64)
        for name, value in arrays.items()
        if name.startswith(prefix)
    }
