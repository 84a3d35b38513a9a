"""Tests of linear cross-entropy: every kernel against the reference, and common properties."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.backends.candidates import MLX, TORCH
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.form import LossForm, SigmoidCap, TanhCap
from minillm_core.ops.select import Candidate
from minillm_kit import reference

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

OP = "linear_cross_entropy"
WANTED = CONTRACTS[OP].differentiable
KERNELS = {f"{c.backends[0]}-{c.name}": c for c in (*TORCH, *MLX) if c.op == OP}
HALVES = ("float16", "bfloat16")  # not on MLX, whose CPU multiplies them elementwise
PLAIN = LossForm()
FORMS = [
    PLAIN,
    LossForm(cap=TanhCap(3.0)),
    LossForm(cap=SigmoidCap(23.0, 5.0, 7.5)),
    LossForm(scale=0.5),
    LossForm(smoothing=0.1),
    LossForm(z=1e-2),
    LossForm(cap=SigmoidCap(15.0, 2.0, 3.0), scale=1.7, smoothing=0.2, z=1e-3),
]


@st.composite
def losses(draw: Any, plain: bool = False) -> dict[str, Any]:
    """Draw hidden, weight, targets with unsupervised ones, weights and a form, by name.

    Args:
        draw: hypothesis's.
        plain: one target, the default form, no weight by position.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    N, C, V = (draw(st.sampled_from(s)) for s in ([1, 2, 7, 12], [1, 4, 9], [2, 5, 33]))
    K, form = (1, LossForm()) if plain else (draw(st.integers(1, 3)), draw(st.sampled_from(FORMS)))
    weights = draw(st.sampled_from([None, (K,)] if plain else [None, (K,), (K, N)]))
    return example(rng, N, C, V, K, form, weights)


def example(
    rng: Any, N: int, C: int, V: int, K: int = 1, form: LossForm = PLAIN, weights: Any = None
) -> dict[str, Any]:
    return {
        "hidden": rng.standard_normal((N, C)).astype(np.float32),
        "weight": rng.standard_normal((V, C)).astype(np.float32),
        "targets": rng.integers(-2, V, (K, N)).astype(np.int32),
        "weights": None if weights is None else rng.uniform(0, 2, weights).astype(np.float32),
        "form": form,
    }


def kernel(candidate: Candidate, rows: int | None) -> Callable[..., Any]:
    return candidate.load() if rows is None else partial(candidate.load(), rows=rows)


def oracle(side: Any, arrays: dict[str, Any]) -> Any:
    dense = KERNELS["torch-dense"].load()
    return side.torch(dense, arrays, WANTED, dtype="float64", differentiable=1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (n, d)
        for n in KERNELS
        for d in (*HALVES, "float32")
        if n.startswith("torch") or d not in HALVES
    ],
)
@settings(max_examples=25)
@given(data=st.data(), rows=st.sampled_from([1, 3, 5, 64]))
def test_kernels_keep_their_contract(
    side: Any, name: str, dtype: str, data: st.DataObject, rows: int
) -> None:
    candidate = KERNELS[name]
    arrays = data.draw(losses(plain=name in ("torch-torch", "mlx-fused")))
    arrays = arrays | {n: side.rounded(arrays[n], dtype) for n in WANTED}
    run, tolerance = getattr(side, candidate.backends[0]), CONTRACTS[OP].tolerance[dtype]
    chunks = rows if candidate.name == "chunked" else None
    got = run(kernel(candidate, chunks), arrays, WANTED, dtype=dtype, differentiable=1)
    expected, exact = reference.linear_cross_entropy(**arrays), oracle(side, arrays)
    for what, y, r in zip(("total", "sums", "count"), got.outputs, expected, strict=True):
        side.assert_close(y, np.asarray(r), tolerance, what)
    for n in WANTED:
        side.assert_close(got.grads[n], exact.grads[n], tolerance, f"gradient of {n}")


@settings(max_examples=25)
@given(arrays=losses())
def test_the_gradient_oracle_agrees_with_central_differences(
    side: Any, arrays: dict[str, Any]
) -> None:
    floats = {name: arrays.pop(name) for name in WANTED}
    exact = oracle(side, floats | arrays)
    op = reference.linear_cross_entropy
    side.assert_slopes(op, exact, floats, arrays, WANTED, differentiable=1)


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_supervised_is_zero_and_not_a_nan(side: Any, name: str) -> None:
    candidate = KERNELS[name]
    arrays = example(np.random.default_rng(0), 6, 4, 11)
    arrays["targets"] = np.full((1, 6), -1, np.int32)
    got = getattr(side, candidate.backends[0])(candidate.load(), arrays, WANTED, differentiable=1)
    for y in (*got.outputs, *got.grads.values()):
        assert np.array_equal(y, np.zeros_like(y))


@pytest.mark.parametrize("name", KERNELS)
def test_one_upstream_scalar_multiplies_both_gradients(side: Any, name: str) -> None:
    candidate = KERNELS[name]
    arrays = example(np.random.default_rng(0), 6, 4, 11)
    run, op = getattr(side, candidate.backends[0]), candidate.load()

    def tripled(**given: Any) -> Any:
        total, sums, count = op(**given)
        return total * 3.0, sums, count

    once = run(op, arrays, WANTED, differentiable=1)
    thrice = run(tripled, arrays, WANTED, differentiable=1)
    for n in WANTED:
        side.assert_close(thrice.grads[n], 3.0 * once.grads[n], 1e-6, n)


@pytest.mark.broad(1)
@pytest.mark.parametrize(
    ("form", "weights"), [(PLAIN, None), (PLAIN, (2, 10)), (FORMS[-1], (2,))], ids=str
)
@pytest.mark.parametrize("name", ["torch-dense", "torch-chunked"])
def test_torch_traces_whole(side: Any, name: str, form: LossForm, weights: Any) -> None:
    arrays = example(np.random.default_rng(0), 10, 4, 11, 2, form, weights)
    op = kernel(KERNELS[name], 4 if name.endswith("chunked") else None)
    torch._dynamo.reset()
    traced = torch.compile(op, fullgraph=True, backend="aot_eager")
    got = side.torch(traced, arrays, WANTED, differentiable=1)
    exact = oracle(side, arrays)
    for n in WANTED:
        side.assert_close(got.grads[n], exact.grads[n], 5e-6, n)
    side.assert_close(got.outputs[0], exact.outputs[0], 5e-6, "total")


@pytest.mark.slow
def test_inductor_compiles_the_chunks(side: Any) -> None:
    arrays = example(np.random.default_rng(0), 10, 4, 11, 2, FORMS[-1], (2, 10))
    torch._dynamo.reset()
    traced = torch.compile(kernel(KERNELS["torch-chunked"], 4), fullgraph=True)
    got = side.torch(traced, arrays, WANTED, differentiable=1)
    exact = oracle(side, arrays)
    for n in WANTED:
        side.assert_close(got.grads[n], exact.grads[n], 5e-6, n)


@pytest.mark.parametrize(
    "form", [FORMS[-1], *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS[:-1])], ids=str
)
@pytest.mark.parametrize("name", [pytest.param("mlx-dense", marks=pytest.mark.slow), "mlx-chunked"])
def test_mlx_compiles(side: Any, name: str, form: LossForm) -> None:
    arrays = example(np.random.default_rng(0), 10, 4, 11, 2, form, (2,))
    op = kernel(KERNELS[name], 4 if name.endswith("chunked") else None)
    got = side.mlx(op, arrays, WANTED, differentiable=1, compiled=True)
    exact = oracle(side, arrays)
    for n in WANTED:
        side.assert_close(got.grads[n], exact.grads[n], 5e-6, n)


def test_torch_holds_one_chunk_of_logits() -> None:
    """Neither pass allocates more than one chunk, or a gradient's size."""
    from torch.utils._python_dispatch import TorchDispatchMode

    N, C, V, rows = 64, 8, 512, 8
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for y in made if isinstance(made, (tuple, list)) else [made]:
                largest = max(largest, y.numel() if isinstance(y, torch.Tensor) else 0)
            return made

    hidden = torch.randn(N, C, requires_grad=True)
    weight = torch.randn(V, C, requires_grad=True)
    targets = torch.randint(0, V, (1, N), dtype=torch.int32)
    with Watch():
        kernel(KERNELS["torch-chunked"], rows)(hidden, weight, targets)[0].backward()
    assert largest <= max(rows * V, V * C, N * C)


def test_torch_makes_no_gradient_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm_core.backends.torch import loss

    def refuse(*args: Any) -> None:
        raise AssertionError("a gradient was made")

    monkeypatch.setattr(loss, "_logit_gradient", refuse)
    arrays = example(np.random.default_rng(0), 600, 4, 11, 2, FORMS[-1], (2,))
    given = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    given["hidden"].requires_grad_()
    with torch.no_grad():
        got = loss.chunked(**given)
    for y, r in zip(got, reference.linear_cross_entropy(**arrays), strict=True):
        np.testing.assert_allclose(y.numpy(), r, rtol=1e-5)


def test_mlx_holds_few_chunks_of_logits() -> None:
    """The chunks are chained: otherwise MLX computes all products first and holds them all."""
    N, C, V = 1024, 8, 4096
    hidden, weight = mx.random.normal((N, C)), mx.random.normal((V, C))
    targets = mx.zeros((1, N), mx.int32)

    def peak(op: Callable[..., Any]) -> int:
        step = mx.value_and_grad(lambda h, w: op(h, w, targets)[0], argnums=(0, 1))
        mx.eval(hidden, weight, targets)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(step(hidden, weight))
        return mx.get_peak_memory() - before

    chunked = peak(kernel(KERNELS["mlx-chunked"], 64))
    assert chunked < 0.3 * peak(KERNELS["mlx-dense"].load())


TOKEN_LOSSES = {c.backends[0]: c.load() for c in (*TORCH, *MLX) if c.op == "token_losses"}


@pytest.mark.parametrize("rows", [1, 3, 64])
@settings(max_examples=15)
@given(drawn=losses())
def test_the_losses_of_tokens_are_those_that_the_op_sums(rows: int, drawn: dict[str, Any]) -> None:
    """Each is the sum over one position, in chunks of any size; unsupervised ones are 0."""
    drawn = {**drawn, "targets": drawn["targets"][:1], "weights": None}
    expected = np.array(
        [
            reference.linear_cross_entropy(
                drawn["hidden"][n : n + 1], drawn["weight"], drawn["targets"][:, n : n + 1],
                None, drawn["form"],
            )[1][0]
            for n in range(len(drawn["hidden"]))
        ]
    )  # fmt: skip
    given = drawn["hidden"], drawn["weight"], drawn["targets"][0]
    assert np.allclose(reference.token_losses(*given, drawn["form"]), expected, atol=1e-12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minillm_core.backends.torch.loss.CPU_ROWS", rows)
        patch.setattr("minillm_core.backends.mlx.loss.CHUNK_BYTES", rows * 4 * len(given[1]))
        got = TOKEN_LOSSES["torch"](*map(torch.from_numpy, given), drawn["form"])
        on_mlx = TOKEN_LOSSES["mlx"](*map(mx.array, given), drawn["form"])
    for found in (got.numpy(), np.array(on_mlx)):
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert (found[given[2] < 0] == 0).all()


def test_no_gradient_flows_through_the_losses_of_tokens() -> None:
    drawn = example(np.random.default_rng(0), 5, 4, 7)
    arrays = drawn["hidden"], drawn["weight"]
    hidden, weight = (torch.from_numpy(x).requires_grad_() for x in arrays)
    targets = drawn["targets"][0]
    assert not TOKEN_LOSSES["torch"](hidden, weight, torch.from_numpy(targets)).requires_grad

    def total(hidden: Any, weight: Any) -> Any:
        return TOKEN_LOSSES["mlx"](hidden, weight, mx.array(targets)).sum() + 0 * hidden.sum()

    for grad in mx.grad(total, argnums=(0, 1))(*map(mx.array, arrays)):
        assert not np.array(grad).any()
