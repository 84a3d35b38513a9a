"""Tests of the float64 reference results of kernels, and of the cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from minillm_core import Candidate
from minillm_core.inspection import CONTRACTS
from minillm_kit.kernels.calls import loaded
from minillm_kit.kernels.check import Chooser, facts_of
from minillm_kit.kernels.examples import CASES, LOUD
from minillm_kit.kernels.problem import gradients, problem, rounded
from minillm_kit.kernels.workloads import WORKLOADS
from minillm_kit.reference import reference_op

STEP = 1e-6


def test_every_op_that_has_a_contract_has_cases_and_a_workload() -> None:
    assert CASES.keys() == CONTRACTS.keys() == WORKLOADS.keys()
    for op, cases in CASES.items():
        assert len({one.name for one in cases}) == len(cases), op


@pytest.mark.parametrize("op", [*CASES])
def test_gradients_are_slopes_of_the_reference(op: str, quick: Chooser) -> None:
    """Compare with central differences, along a random direction of each argument."""
    for index, case in enumerate(CASES[op]):
        if not quick(case):
            continue
        found = problem(op, index, "float32", 3)
        rng = np.random.default_rng(5)

        def value(moved: Any, found: Any = found) -> float:
            outputs = reference_op(op)(**{**found.arguments, **moved})
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return sum(float(np.sum(y * c)) for y, c in zip(outputs, found.upstream, strict=False))

        for name in CONTRACTS[op].differentiable:
            if name not in found.floats:
                continue
            at = found.floats[name].astype(np.float64)
            loud = at == LOUD  # values that no result depends on
            direction = np.where(loud, 0.0, rng.standard_normal(at.shape))
            ends = [value({name: at + sign * STEP * direction}) for sign in (1, -1)]
            slope = (ends[0] - ends[1]) / (2 * STEP)
            exact = float(np.sum(found.gradients[name] * direction))
            size = float(np.linalg.norm(found.gradients[name])) + at.size**0.5
            assert abs(slope - exact) <= 1e-6 * size, (case.name, name, slope, exact)
            assert not found.gradients[name][loud].any(), (case.name, name)


def test_few_supervised_rows_are_computed_alone() -> None:
    (index,) = (
        i
        for i, one in enumerate(CASES["linear_cross_entropy"])
        if "N=65539" in one.name and one.effort == "usual"
    )
    found = problem("linear_cross_entropy", index, "float32", 3)
    total, sums, count = found.outputs
    whole = reference_op("linear_cross_entropy")(**found.arguments)
    np.testing.assert_allclose([total, *sums, count], [whole[0], *whole[1], whole[2]], rtol=1e-12)
    assert not found.gradients["hidden"][29:-70].any()
    assert found.gradients["hidden"][-70:].all(0).any()


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("bfloat16", [1.0, 1.00390625, 1.01171875, -3.1415927], [1.0, 1.0, 1.015625, -3.140625]),
        ("float16", [1.0, 0.1], [1.0, 0.0999755859375]),
        ("float32", [0.1], [np.float32(0.1)]),
    ],
)
def test_numbers_are_rounded_to_the_nearest(
    dtype: str, values: Sequence[float], expected: Sequence[float]
) -> None:
    np.testing.assert_array_equal(rounded(np.array(values, np.float32), dtype), expected)


def test_rounding_is_the_frameworks() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    for dtype in ("bfloat16", "float16"):
        theirs = torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()
        np.testing.assert_array_equal(rounded(x, dtype), theirs)


def test_a_problem_is_known_by_its_seed_and_draw() -> None:
    asked: tuple[str, int, str] = ("attention", 8, "float32")
    one, same, other, drawn = (
        problem(*asked, 1),
        problem(*asked, 1),
        problem(*asked, 2),
        problem(*asked, 1, 1),
    )
    assert one is same
    for another in (other, drawn):
        assert another.floats["q"].shape == one.floats["q"].shape
        assert not np.array_equal(another.floats["q"], one.floats["q"])
        assert another.facts == one.facts == facts_of(one.case)


@pytest.mark.parametrize(
    ("op", "loud"),
    [("attention", "k"), ("linear_cross_entropy", "hidden"), ("embedding", "weight")],
)
def test_what_must_not_matter_is_loud_somewhere(op: str, loud: str, quick: Chooser) -> None:
    whole = [problem(op, i, "float32", 3) for i, one in enumerate(CASES[op]) if quick(one)]
    assert any((one.floats[loud] == LOUD).any() for one in whole)


def test_other_upstream_gradients_scale_gradients(quick: Chooser) -> None:
    for op, cases in CASES.items():
        index = next(i for i, one in enumerate(cases) if quick(one))
        found = problem(op, index, "float32", 3)
        doubled = gradients(found, [2 * c for c in found.upstream])
        for name, gradient in found.gradients.items():
            np.testing.assert_allclose(doubled[name], 2 * gradient, atol=1e-12)


def test_the_smaller_work_of_a_window_is_counted() -> None:
    load: Callable[[dict[str, int]], Any] = WORKLOADS["attention"].forward  # type: ignore[assignment]
    sizes = {"B": 2, "T": 5, "H": 3, "K": 1, "D": 4, "window": 0}
    i, j = np.arange(5)[:, None], np.arange(5)
    for window in (0, 1, 3, 9):
        seen = (i >= j) & (i - j < (window or 5))
        assert load({**sizes, "window": window}).flops == 4 * 2 * 3 * 4 * seen.sum()


def masks_received(*arrays: object, **others: object) -> tuple[object, ...]:
    """Return the arguments of a call."""
    return (*arrays, others)


class OnDevice:
    """A stand-in for an array of a GPU."""

    def cpu(self) -> str:
        return "on the host"


@pytest.mark.parametrize("host", [True, False])
def test_a_kernel_that_reads_masks_on_the_host_is_given_them_there(host: bool) -> None:
    candidate = Candidate(
        "attention", "mine", ("torch",), f"{__name__}:masks_received", host_masks=host
    )
    q, ids = OnDevice(), OnDevice()
    found = loaded(candidate)(q, window=3, documents=ids, scale=None)
    given = "on the host" if host else ids
    assert found == (q, {"window": 3, "documents": given, "scale": None})
