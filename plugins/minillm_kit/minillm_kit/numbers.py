"""Numbers: losses, logits and gradients against oracles that share no code with the backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from minillm_core import Plan, PlanError
from minillm_core.commands import counted
from minillm_kit.check import NOT_FINITE, RAISED, Failed, NotApplicable, own_line, place
from minillm_kit.oracle import Oracle
from minillm_kit.subject import ODD, Subject, first_row

LOSS = {"float32": 1e-5, "bfloat16": 1e-2}
"""dtype -> relative tolerance of a loss."""

LOGITS = {"float32": 1e-5, "bfloat16": 1e-1}
"""dtype -> tolerance of logits, relative to their norm."""

GRADIENT = {"float32": 1e-3, "bfloat16": 1e-1}
"""dtype -> tolerance of gradients, relative to their norm."""

REFUSED = {
    "float32": "an op is called with shapes or dtypes that this framework refuses",
    "bfloat16": "a float32 State, constant or schedule value meets bfloat16: self.ops.like(value, x)"
    " casts it",
}
"""dtype -> the likely cause of a framework's error."""

STEP = 1e-4
"""Step size of central differences, along a direction of unit elements."""


def forward(subject: Subject) -> str:
    """Check loss and logits of each backend and dtype against NumPy in float64, in even and odd sizes."""
    found = [_forward(subject, subject.plan(), "")]
    try:
        odd = subject.plan(**ODD)
    except PlanError as error:
        return f"{found[0]}; not in odd sizes: {error.what}"
    return "; in odd sizes ".join([*found, _forward(subject, odd, " in odd sizes", **ODD)])


def _forward(subject: Subject, plan: Plan, sizes: str, **changed: object) -> str:
    oracle, found = Oracle(subject, plan), []
    (batch,) = subject.batches(plan, 1)
    row = first_row(batch)
    loss, logits = oracle.loss(batch), oracle.logits(row)
    if not (np.isfinite(loss) and np.isfinite(logits).all()):
        raise Failed(
            f"numpy{sizes}: loss {loss}, with weights moved by 0.1 from their initial values",
            cause=NOT_FINITE,
        )
    for dtype in LOSS:
        stated = subject.found.cls.manifest
        # a value between two quantization levels may round either way, in any dtype
        level = "bfloat16" if stated.surrogate else dtype
        bound, bound_of_logits = LOSS[level], LOGITS[level]
        if dtype != "float32" and stated.discrete:
            bound, bound_of_logits = np.inf, np.inf
        for backend in subject.backends:
            rounded_plan = subject.plan(train_dtype=dtype, **changed)
            run = subject.trainer(rounded_plan, backend, stirred=True)
            try:
                apart = norm([run.next_logits(row) - logits]) / norm([logits])
                (got,) = subject.train(run, plan, [batch])
            except (TypeError, RuntimeError, ValueError) as error:
                its_own = dtype == "float32" and own_line(error, subject)
                raise Failed(
                    f"{backend} {dtype}{sizes}: {type(error).__name__}: {place(error, subject)}",
                    cause=RAISED if its_own else REFUSED[dtype],
                ) from error
            if not (np.isfinite(got) and np.isfinite(apart)):
                raise Failed(
                    f"{backend} {dtype}{sizes}: loss {got:.6f}, NumPy's {loss:.6f}; logits "
                    f"{apart:.1e} apart",
                    cause=NOT_FINITE,
                )
            error = abs(got - loss) / max(abs(loss), 1.0)
            if not (error <= bound and apart <= bound_of_logits):
                raise Failed(
                    f"{backend} {dtype}{sizes}: loss {got:.6f}, NumPy's {loss:.6f}: {error:.1e} "
                    f"(bound {bound:.0e}); logits {apart:.1e} apart (bound {bound_of_logits:.0e})",
                    cause="an op behaves otherwise on this backend, or a constant has another dtype",
                )
            found.append(f"{backend} {dtype} {error:.0e}, logits {apart:.0e}")
    return ", ".join(found)


def slopes(subject: Subject) -> str:
    """Check each parameter's gradient against central differences of NumPy's loss.

    The differences hold what no gradient flows through at its values: weights of positions
    (``loss.weights``) and, of a surrogate, all constants (``stop_gradient``).
    """
    plan, found = subject.plan(), []
    (batch,) = subject.batches(plan, 1)
    # a discrete choice that changes within a difference is a jump, not a slope
    stated = subject.found.cls.manifest
    step = STEP / 100 if stated.discrete else STEP
    oracle = Oracle(subject, plan)
    as_declared = (
        oracle.held(batch) if stated.surrogate else nullcontext(partial(oracle.forward, batch))
    )
    with as_declared as forward, oracle.weights_held(batch):
        measured = _slopes(oracle, forward, step)
    for backend in subject.backends:
        _, grads, _ = subject.first_gradients(backend)
        total, worst = norm(grads.values()), 0.0
        for name, (direction, slope) in measured.items():
            grad = grads[name]
            expected = 2.0 * float(np.sum(grad * direction))
            length = float(np.linalg.norm(direction))
            size = 2.0 * length * (float(np.linalg.norm(grad)) + 1e-3 * total)
            error, bound = abs(slope - expected) / size, GRADIENT["float32"]
            worst = max(worst, error)
            if not error <= bound:
                raise Failed(
                    f"{backend}, {name}: slope {slope:.4e} by differences, {expected:.4e} by the "
                    f"gradient: {error:.1e} of its norm (bound {bound:.0e})",
                    cause="stop_gradient where a gradient should pass, or a cast that cuts it off",
                )
        found.append(f"{backend} {worst:.0e}, bfloat16 {_coarse(subject, backend, grads)}")
    return f"{counted(len(measured), 'parameter')}: " + ", ".join(found)


def _slopes(
    oracle: Oracle, forward: Callable[[], Any], step: float
) -> dict[str, tuple[np.ndarray, float]]:
    """Draw a direction per parameter; return it with the objective's difference between its ends."""
    measured, rng = {}, np.random.default_rng(3)
    for name in sorted(oracle.places):
        start, ends = oracle.get(name), []
        direction = rng.choice([-step, step], start.shape)
        for sign in (1, -1):
            oracle.load({name: start + sign * direction})
            ends.append(float(forward().objective))
        oracle.load({name: start})
        measured[name] = (direction, ends[0] - ends[1])
    return measured


def _coarse(subject: Subject, backend: str, fine: Mapping[str, np.ndarray]) -> str:
    """Compare gradients in bfloat16 with those in float32; return the difference.

    Raises:
        Failed: the difference exceeds the tolerance.
    """
    _, grads, _ = subject.first_gradients(backend, train_dtype="bfloat16")
    errors = {name: float(np.linalg.norm(grads[name] - fine[name])) for name in fine}
    together, bound = norm(errors.values()) / norm(fine.values()), GRADIENT["bfloat16"]
    bound = np.inf if subject.found.cls.manifest.discrete else bound
    if not together <= bound:
        worst = max(errors, key=errors.__getitem__)
        raise Failed(
            f"{backend} bfloat16: gradients {together:.1e} of their norm from float32's (bound "
            f"{bound:.0e}), most in {worst}",
            cause="a sum, a norm or an exponential in bfloat16: cast to float32 before it",
        )
    return f"{together:.0e}"


def identity(subject: Subject) -> str:
    """Check that before the first step the logits equal those without the plugin."""
    if not subject.found.cls.manifest.identity_at_init:
        raise NotApplicable("identity_at_init is not declared")
    plans = (subject.plan(), subject.plan(without=True))
    row = first_row(subject.batches(plans[0], 1)[0])
    ours, plain = (Oracle(subject, plan, stirred=False).logits(row) for plan in plans)
    if not np.isfinite(ours).all():
        raise Failed("numpy: logits at the start are NaN or infinite", cause=NOT_FINITE)
    apart = float(np.abs(ours - plain).max())
    if not apart <= 1e-9:
        raise Failed(
            f"logits {apart:.1e} apart at the start (bound 1e-09)",
            cause="an initial value that is not 0 (or 1), though identity_at_init is declared",
        )
    return f"logits {apart:.0e} apart"


def on_host(array: np.ndarray) -> np.ndarray:
    """Convert an array of optimizer state from a checkpoint to float64; int16 holds the bits of bfloat16."""
    if array.dtype == np.int16:
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def norm(arrays: Iterable[np.ndarray | float]) -> float:
    """Return the norm of all arrays together."""
    return float(np.linalg.norm([float(np.linalg.norm(array)) for array in arrays]))
