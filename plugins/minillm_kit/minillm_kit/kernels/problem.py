"""A case with its values: the arguments of a call, and the expected results in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from minillm_core.inspection import CONTRACTS
from minillm_kit.kernels.examples import CASES, Case
from minillm_kit.pullbacks import pull_back
from minillm_kit.reference import reference_op

DTYPES = ("float32", "bfloat16", "float16")

IN_FLOAT32 = frozenset({"logits", "linear_cross_entropy", "token_losses"})
"""Ops whose outputs are float32 in any compute dtype; the other ops' outputs have the compute dtype."""


@dataclass(frozen=True)
class Problem:
    """A call of an op and its expected results; the arrays must not be modified."""

    case: Case
    dtype: str  # compute dtype
    floats: Mapping[str, np.ndarray]  # float32, exact in the compute dtype
    others: Mapping[str, Any]
    facts: Mapping[str, Any]
    upstream: Sequence[np.ndarray]  # float32, one per differentiable output
    outputs: Sequence[np.ndarray]  # float64
    gradients: Mapping[str, np.ndarray]  # float64, of every float; 0 where there is none

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return {**self.floats, **self.others}


@lru_cache(maxsize=4)  # several kernels are tested on a problem in turn
def problem(op: str, index: int, dtype: str, seed: int, draw: int = 0) -> Problem:
    """Draw the values of a case.

    Args:
        op: a key of ``CASES``.
        index: of the case.
        dtype: the compute dtype, to which the values are rounded.
        seed: the seed.
        draw: index of the draw: other values of the same sizes.
    """
    case = CASES[op][index]
    rng = np.random.default_rng((seed, index, draw))
    example = case.make(rng)
    floats = {name: rounded(x, dtype) for name, x in example.floats.items()}
    outputs = _exact(op, {**floats, **example.others})
    smooth = outputs[: 1 if op == "linear_cross_entropy" else None]
    # never 0 or 1, and exact in every dtype
    upstream = [np.asarray(rng.integers(-8, 8, y.shape) / 8 + 1 / 16, np.float32) for y in smooth]
    without: dict[str, np.ndarray] = {}
    found = Problem(case, dtype, floats, example.others, example.facts, upstream, outputs, without)
    return replace(found, gradients=gradients(found, upstream))


def gradients(of: Problem, upstream: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the gradient of each float argument for other upstream gradients than the problem's."""
    op, given = of.case.op, of.arguments
    rows = _supervised(op, given)
    wide = [np.asarray(c, np.float64) for c in upstream]
    if rows is None:
        found = dict(pull_back(op)(*wide, **given))
    else:
        found = dict(pull_back(op)(*wide, **_taken(given, rows)))
        if "hidden" in found:
            whole = np.zeros(of.floats["hidden"].shape)
            whole[rows] = found["hidden"]
            found["hidden"] = whole
    return {
        name: found[name] if name in CONTRACTS[op].differentiable else np.zeros(x.shape)
        for name, x in of.floats.items()
    }


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to the nearest float32 values that ``dtype`` represents exactly, ties to even."""
    x = np.asarray(x, np.float32)
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return x.astype(dtype).astype(np.float32)


def _exact(op: str, given: Mapping[str, Any]) -> list[np.ndarray]:
    rows = _supervised(op, given)
    found = reference_op(op)(**(given if rows is None else _taken(given, rows)))
    outputs = [np.asarray(y) for y in (found if isinstance(found, tuple) else (found,))]
    if op == "token_losses" and rows is not None:
        (losses,) = outputs
        whole = np.zeros(len(given["targets"]))
        whole[rows] = losses
        outputs = [whole]
    return outputs


def _supervised(op: str, given: Mapping[str, Any]) -> np.ndarray | None:
    """Return the supervised rows of a loss, if they are few: the others would cost gigabytes."""
    if op not in ("linear_cross_entropy", "token_losses"):
        return None
    taken: np.ndarray = np.atleast_2d(given["targets"] >= 0).any(0)
    return np.flatnonzero(taken) if 0 < taken.sum() < len(taken) / 8 else None


def _taken(given: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    weights = given.get("weights")
    found = {**given, "hidden": given["hidden"][rows], "targets": given["targets"][..., rows]}
    if weights is not None and weights.ndim == 2:
        found["weights"] = weights[:, rows]
    return found
