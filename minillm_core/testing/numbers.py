"""The numbers: losses and gradients against oracles that share no code with the backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minillm_core.backends.numpy.model import last_logits, materialise
from minillm_core.nn.module import declared
from minillm_core.nn.node import Scope
from minillm_core.nn.param import Param
from minillm_core.plan import Plan
from minillm_core.testing.check import Check, Failed, NotApplicable
from minillm_core.testing.subject import Batch, Subject, supervised

__all__ = ["CHECKS", "compare"]

Grads = Mapping[str, np.ndarray]

LOSS = {"float32": 1e-5, "bfloat16": 2e-2}
"""dtype -> the largest difference of a loss, relative."""

STEP = 1e-4
"""Of central differences, along a direction of unit elements."""


def forward(subject: Subject) -> str:
    """The first loss of each backend and dtype is NumPy's in float64."""
    _needs_numpy(subject)
    found = []
    for dtype, bound in LOSS.items():
        plan = subject.plan(train_dtype=dtype)
        (batch,) = subject.batches(plan, 1)
        expected = _objective(plan, batch)
        for backend in subject.backends:
            got = _total(subject, plan, backend, batch)
            error = abs(got - expected) / max(abs(expected), 1.0)
            if not error <= bound:
                raise Failed(
                    f"{backend} {dtype}: loss {got:.6f}, NumPy's {expected:.6f}: {error:.1e} > "
                    f"{bound:.0e}",
                    cause="an op behaves otherwise on this backend, or a constant has another dtype",
                )
            found.append(f"{backend} {dtype} {error:.0e}")
    return ", ".join(found)


def slopes(subject: Subject) -> str:
    """Each parameter's gradient is the slope of NumPy's loss, by central differences."""
    _needs_numpy(subject)
    plan = subject.plan()
    (batch,) = subject.batches(plan, 1)
    model, values = materialise(plan, 0), _values(plan, batch)
    places = {name: place for name, place in _places(model).items() if name in plan.parameters}
    found = []
    for backend in subject.backends:
        _, grads, _ = subject.gradients(plan, backend, batch)
        total, worst, rng = _norm(grads.values()), 0.0, np.random.default_rng(3)
        for name, (module, attribute) in sorted(places.items()):
            start, grad = getattr(module, attribute), grads[name]
            direction = rng.choice([-STEP, STEP], start.shape)
            ends = []
            for sign in (1, -1):
                setattr(module, attribute, start + sign * direction)
                ends.append(float(model(dict(batch), values).objective))
            setattr(module, attribute, start)
            slope, expected = ends[0] - ends[1], 2.0 * float(np.sum(grad * direction))
            length = float(np.linalg.norm(direction))
            size = 2.0 * length * (float(np.linalg.norm(grad)) + 1e-3 * total)
            error = abs(slope - expected) / size
            worst = max(worst, error)
            if not error <= 1e-3:
                raise Failed(
                    f"{backend}, {name}: slope {slope:.4e} by differences, {expected:.4e} by the "
                    "gradient",
                    cause="stop_gradient where a gradient should pass, or a cast that cuts it off",
                )
        found.append(f"{backend} {worst:.0e}")
    return f"{len(places)} parameters: " + ", ".join(found)


def parity(subject: Subject) -> str:
    """Both frameworks start from the same bits and have the same gradients."""
    if len(backends := subject.backends) < 2:
        raise NotApplicable(f"{', '.join(backends)} alone: {subject.why_alone}")
    plan = subject.plan()
    (batch,) = subject.batches(plan, 1)
    starts = [subject.trainer(plan, backend).arrays() for backend in backends]
    for name in plan.parameters:
        first, second = (start[f"model.{name}"] for start in starts)
        if not np.array_equal(first, second):
            raise Failed(
                f"{name} starts {np.abs(first - second).max():.1e} apart",
                cause="initial values drawn from a framework's generator",
            )
    first, second = (subject.gradients(plan, backend, batch)[1] for backend in backends)
    return compare(first, second, f"{backends[0]} and {backends[1]}", cause="an op differs")


def identity(subject: Subject) -> str:
    """Before the first step the model gives what it gives without the plugin."""
    if not subject.found.cls.manifest.identity_at_init:
        raise NotApplicable("identity_at_init is not declared")
    _needs_numpy(subject)
    plans = (subject.plan(), subject.plan(without=True))
    (batch,) = subject.batches(plans[0], 1)
    row = {name: array[:1] for name, array in batch.items()}
    ours, plain = (last_logits(plan, materialise(plan, 0))(row, Scope) for plan in plans)
    apart = float(np.abs(ours - plain).max())
    if not apart <= 1e-9:
        raise Failed(
            f"logits {apart:.1e} apart at the start",
            cause="an initial value that is not 0 (or 1), though identity_at_init is declared",
        )
    return f"logits {apart:.0e} apart"


def compare(first: Grads, second: Grads, whose: str, *, cause: str) -> str:
    """Gradients are the same: 2e-6 of the norm together, 1e-5 a tensor, 1e-4 a number.

    Raises:
        Failed: they are not.
    """
    total = _norm(first.values())
    errors = {name: float(np.linalg.norm(first[name] - second[name])) for name in first}
    together = float(np.linalg.norm(list(errors.values()))) / total
    for name, error in errors.items():
        share = 1e-4 if first[name].size == 1 else 1e-5
        bound = share * float(np.linalg.norm(first[name])) + 1e-6 * total
        if not error <= bound:
            raise Failed(f"{whose}: the gradient of {name} differs by {error:.1e}", cause=cause)
    if not together <= 2e-6:
        raise Failed(f"{whose}: gradients differ by {together:.1e} of their norm", cause=cause)
    return f"{whose}: {together:.0e} of the gradients' norm"


def _needs_numpy(subject: Subject) -> None:
    if "numpy" not in subject.found.cls.manifest.backends:
        raise NotApplicable("the plugin does not support numpy, the oracle")


def _values(plan: Plan, batch: Batch) -> dict[str, Any]:
    return {
        **plan.values(1 / (plan.config.train.steps or 1)),
        "normaliser": 1 / supervised([batch]),
    }


def _objective(plan: Plan, batch: Batch) -> float:
    return float(materialise(plan, 0)(dict(batch), _values(plan, batch)).sums[0]) / supervised(
        [batch]
    )


def _total(subject: Subject, plan: Plan, backend: str, batch: Batch) -> float:
    return subject.train(subject.trainer(plan, backend), plan, [batch])[0]


def _places(model: Any) -> dict[str, tuple[Any, str]]:
    return {name: (module, attribute) for name, module, attribute, _ in declared(model, Param)}


def _norm(arrays: Any) -> float:
    return float(np.linalg.norm([float(np.linalg.norm(array)) for array in arrays]))


CHECKS = (
    Check("identity", "the model is unchanged before the first step", identity, ("plans",)),
    Check("forward", "losses are NumPy's in float64", forward, ("plans",)),
    Check("slopes", "gradients are slopes of NumPy's loss", slopes, ("forward",)),
    Check("parity", "both frameworks have the same gradients", parity, ("slopes",)),
)
