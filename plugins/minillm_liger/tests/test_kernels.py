"""Tests of the calls of Liger's functions and of the use of their results, by minillm's contracts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import LossForm, Rotary, TanhCap
from minillm_core.ops.contract import CONTRACTS

torch = pytest.importorskip("torch")

from minillm_core.backends.torch import loss as core_loss  # noqa: E402  (needs torch)
from minillm_core.backends.torch import ops as core_ops  # noqa: E402

FORMS = st.builds(
    LossForm,
    cap=st.none() | st.builds(TanhCap, st.sampled_from([1.5, 15.0])),
    scale=st.sampled_from([1.0, 0.25]),
    smoothing=st.sampled_from([0.0, 0.1]),
    z=st.sampled_from([0.0, 0.01]),
)


def gradients(outputs: Any, arrays: list[Any], upstream: list[Any]) -> list[Any]:
    """Compute outputs and gradients, NumPy arrays in float64."""
    made = torch.autograd.grad(outputs, arrays, upstream)
    return [x.detach().double().numpy() for x in (*outputs, *made)]


def close(got: list[Any], exact: list[Any], tolerance: float) -> None:
    for mine, theirs in zip(got, exact, strict=True):
        off = np.linalg.norm(mine - theirs)
        assert off <= tolerance * max(np.linalg.norm(theirs), theirs.size**0.5)


def normal(seed: int, *shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    arrays = (torch.randn(shape, generator=made, dtype=dtype or torch.float32) for shape in shapes)
    return [array.requires_grad_() for array in arrays]


@st.composite
def losses(draw: Any) -> tuple[list[Any], Any, Any, LossForm]:
    """Draw ([hidden, weight], targets, weights, form)."""
    N, C, V = (draw(st.integers(1, 9)) for _ in range(3))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    targets = rng.integers(-1, V, (1, N)).astype(np.int32)
    targets[targets < 0] = draw(st.sampled_from([-1, -100]))
    shape = draw(st.sampled_from([None, (1,), (1, N)]))
    weights = None if shape is None else torch.from_numpy(rng.random(shape).astype(np.float32))
    return normal(seed, (N, C), (V, C)), torch.from_numpy(targets), weights, draw(FORMS)


@settings(max_examples=60)
@given(losses())
def test_the_loss_keeps_its_contract(kernels: Any, case: Any) -> None:
    arrays, targets, weights, form = case
    exact = [x.detach().double().requires_grad_() for x in arrays]
    results = []
    for kernel, given_ in (
        (kernels("loss").linear_cross_entropy, arrays),
        (core_loss.dense, exact),
    ):
        hidden, weight = given_
        total, sums, count = kernel(hidden, weight, targets, weights, form)
        assert not sums.requires_grad
        found = gradients([total], given_, [torch.tensor(0.375, dtype=total.dtype)])
        results.append([*found, sums.double().numpy(), count.double().numpy()])
        with torch.no_grad():
            again = kernel(hidden, weight, targets, weights, form)
        for with_, without in zip((total, sums, count), again, strict=True):
            torch.testing.assert_close(with_.detach(), without)
    ours, theirs = results
    close(ours, theirs, CONTRACTS["linear_cross_entropy"].tolerance["float32"])


def test_nothing_is_computed_for_gradients_that_nobody_asks_for(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, asked = kernels("loss"), []
    fused = module.fused_linear_cross_entropy_forward

    def note(*args: Any, **given_: Any) -> Any:
        asked.append(given_["compute_gradients"])
        return fused(*args, **given_)

    monkeypatch.setattr(module, "fused_linear_cross_entropy_forward", note)
    arrays, targets = normal(0, (3, 4), (5, 4)), torch.zeros((1, 3), dtype=torch.int32)
    with torch.no_grad():
        module.linear_cross_entropy(*arrays, targets)
    module.linear_cross_entropy(*(x.detach() for x in arrays), targets)
    module.linear_cross_entropy(*arrays, targets)
    assert asked == [False, False, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_compiled_step_takes_the_loss_as_one_operation(kernels: Any) -> None:
    """Check that there is no graph break, although the op synchronises."""
    arrays, form = normal(0, (6, 4), (5, 4)), LossForm(cap=TanhCap(15.0))
    targets = torch.tensor([[0, 1, -1, 4, 2, 2]], dtype=torch.int32)
    weights, kernel = torch.rand(1, 6), kernels("loss").linear_cross_entropy

    def step(hidden: Any, weight: Any) -> Any:
        total, _, count = kernel(hidden * 2, weight, targets, weights, form)
        return total / count

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, exact in zip(
        gradients([compiled(*arrays)], arrays, [torch.tensor(1.0)]),
        gradients([step(*arrays)], arrays, [torch.tensor(1.0)]),
        strict=True,
    ):
        np.testing.assert_allclose(got, exact, rtol=1e-6)


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(kernels: Any, weighted: bool) -> None:
    x, weight, up = normal(0, (2, 3, 8), (8,), (2, 3, 8))
    arrays = [x, weight] if weighted else [x]
    given_ = (x, weight if weighted else None, 1e-5)
    ours, theirs = (
        gradients([kernel(*given_)], arrays, [up.detach()])
        for kernel in (kernels("rms_norm").rms_norm, core_ops.rms_norm_composed)
    )
    close(ours, theirs, CONTRACTS["rms_norm"].tolerance["float32"])


@pytest.mark.parametrize("shape", [None, (5,), (2, 5)])
def test_rope(kernels: Any, shape: tuple[int, ...] | None) -> None:
    q, k, *ups = normal(0, (2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 4, 8), (2, 5, 2, 8))
    angles = torch.outer(torch.arange(9.0), 10.0 ** -torch.arange(4.0))
    at = None if shape is None else torch.randint(0, 9, shape, dtype=torch.int32)
    table = Rotary(angles.cos(), angles.sin(), torch.ones(4), at)
    before = [x.detach().clone() for x in (q, k, *ups)]
    ours, theirs = (
        gradients(list(kernel(q, k, table)), [q, k], [up.detach() for up in ups])
        for kernel in (kernels("rope").rotate, core_ops.rotate)
    )
    close(ours, theirs, CONTRACTS["rotate"].tolerance["float32"])
    for x, was in zip((q, k, *ups), before, strict=True):
        assert torch.equal(x, was), "an argument, or a gradient that others share, has changed"


def test_swiglu(kernels: Any) -> None:
    joined, up = normal(0, (2, 3, 16), (2, 3, 8))
    before = joined.detach().clone()
    ours, theirs = (
        gradients([kernel(*joined.chunk(2, -1))], [joined], [up.detach()])
        for kernel in (kernels("swiglu").swiglu, core_ops.swiglu)
    )
    close(ours, theirs, CONTRACTS["swiglu"].tolerance["float32"])
    assert torch.equal(joined, before)
