"""Kernels: each alone against its op's reference, to the accuracy that the op's contract asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minillm_core.backends.trial import rounded, tried
from minillm_core.ops import CONTRACTS, Candidate, Request, reference
from minillm_core.testing.check import Check, Failed, NotApplicable
from minillm_core.testing.examples import EXAMPLES, Example
from minillm_core.testing.subject import Subject
from minillm_core.text import nearest

__all__ = ["CHECKS"]

DTYPES = ("float32", "bfloat16", "float16")

STEP = 1e-5
"""Of central differences of the reference, in float64."""

CAUSES = {
    "output": "the forward pass: an edge, a size that is no power of two, a sum in a half dtype",
    "gradient": "the backward pass: a factor, a term that is left out, a sum in a half dtype",
}


def kernel(subject: Subject) -> str:
    """Outputs and gradients of each kernel that serves a CPU, in each dtype that it accepts."""
    offers = [one for owner, one in subject.plan().candidates if owner == subject.name]
    if not offers:
        raise NotApplicable("it brings no kernel")
    for one in offers:
        if one.op not in CONTRACTS:
            close = nearest(one.op, CONTRACTS)
            raise Failed(
                f"kernel '{one.name}' is for '{one.op}', and there is no such op",
                cause=f"did you mean '{close}'?" if close else f"one of {', '.join(CONTRACTS)}",
            )
    told, refused = [], []
    for one in offers:
        for backend in subject.backends:
            for dtype in DTYPES:
                worst, reason = _tried(one, backend, dtype)
                if worst is None:
                    refused.append(f"{one.op}={one.name}: {reason}")
                else:
                    told.append(f"{one.op}={one.name} {backend} {dtype} {worst:.0e}")
    if not told:
        raise NotApplicable(f"none serves a CPU here: {'; '.join(dict.fromkeys(refused))}")
    return "from the reference: " + ", ".join(told)


def _tried(candidate: Candidate, backend: str, dtype: str) -> tuple[float | None, str]:
    """The largest error, or None and why the kernel serves no example.

    Raises:
        Failed: it is above the contract's tolerance.
    """
    worst, reason = None, ""
    for example in EXAMPLES[candidate.op](np.random.default_rng(11)):
        request = Request(candidate.op, backend, "cpu", dtype, facts=example.facts)
        if (refusal := candidate.refusal(request)) is None:
            worst = max(worst or 0.0, _compared(candidate, backend, dtype, example))
        reason = refusal or reason
    return worst, reason


def _compared(candidate: Candidate, backend: str, dtype: str, example: Example) -> float:
    """The largest error of an output or a gradient, as the contract measures it."""
    contract = CONTRACTS[candidate.op]
    floats = {name: rounded(backend, x, dtype) for name, x in example.floats.items()}
    wanted = [name for name in contract.differentiable if name in floats]
    op = getattr(reference, candidate.op)

    def exact(**moved: np.ndarray) -> list[np.ndarray]:
        found = op(**{**floats, **example.others, **moved})
        return [np.asarray(y) for y in (found if isinstance(found, tuple) else (found,))]

    expected = exact()
    smooth = expected[: 1 if candidate.op == "linear_cross_entropy" else None]
    rng = np.random.default_rng(7)
    upstream = [np.asarray(rng.integers(-8, 8, y.shape) / 8 + 1 / 16, np.float32) for y in smooth]
    given = {**floats, **example.others}
    outputs, grads = tried(backend, candidate.load(), given, wanted, upstream, dtype)
    where = f"{backend} {dtype}, kernel {candidate.op}={candidate.name}"
    if len(outputs) != len(expected):
        raise Failed(f"{where}: {len(outputs)} outputs, not {len(expected)}", cause=contract.doc)
    pairs = [
        ("output", f"output {index}", got, want)
        for index, (got, want) in enumerate(zip(outputs, expected, strict=True))
    ]
    for name in wanted:
        slopes = _slopes(exact, name, floats[name].astype(np.float64), upstream)
        pairs.append(("gradient", f"the gradient of {name}", grads[name], slopes))
    return max(_error(where, *pair, contract.tolerance[dtype]) for pair in pairs)


def _error(
    where: str, kind: str, what: str, got: np.ndarray, want: np.ndarray, tolerance: float
) -> float:
    """How far it is.

    Raises:
        Failed: further than the contract tolerates, or of another shape.
    """
    called = f"{where}: {what}"
    if got.shape != want.shape:
        raise Failed(f"{called} is {got.shape}, not {want.shape}", cause=CAUSES[kind])
    size = max(float(np.linalg.norm(want)), want.size**0.5, 1.0)
    error = float(np.linalg.norm(got - want)) / size
    if not error <= tolerance:
        raise Failed(
            f"{called} {want.shape} is {error:.1e} from the reference (tolerance {tolerance:.0e})",
            cause=CAUSES[kind],
        )
    return error


def _slopes(
    exact: Callable[..., list[Any]], name: str, at: np.ndarray, upstream: Sequence[np.ndarray]
) -> np.ndarray:
    """The gradient of the outputs times ``upstream``, by central differences in each element."""
    found = np.zeros_like(at)

    def value(moved: np.ndarray) -> float:
        return sum(
            float(np.sum(y * c)) for y, c in zip(exact(**{name: moved}), upstream, strict=False)
        )

    for index in np.ndindex(at.shape):
        ends = []
        for sign in (1, -1):
            moved = at.copy()
            moved[index] += sign * STEP
            ends.append(value(moved))
        found[index] = (ends[0] - ends[1]) / (2 * STEP)
    return found


CHECKS = (Check("kernel", "its kernels keep their ops' contracts, alone", kernel, ("plans",)),)
