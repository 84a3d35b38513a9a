"""Tests of the array functions: all three backends have all of them, with equal results."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.ops import arrays
from minillm_core.ops.arrays import ARRAY_FUNCTIONS, ArrayFunctions
from minillm_core.ops.contract import CONTRACTS
from minillm_kit import NumPyOps

mx = pytest.importorskip("mlx.core")
torch = pytest.importorskip("torch")

from minillm_core.backends.mlx.ops import MLXOps  # noqa: E402
from minillm_core.backends.torch.ops import TorchOps  # noqa: E402

SIDES = {"torch": (TorchOps(), torch.from_numpy), "mlx": (MLXOps(), mx.array)}
ORACLE = NumPyOps()


def host(x: Any) -> np.ndarray:
    return x.numpy() if isinstance(x, torch.Tensor) else np.array(x)


def same(
    call: Callable[[Any, Callable[[np.ndarray], Any]], Any],
    rtol: float = 1e-6,
    atol: float = 1e-6,
) -> None:
    """Compare ``call(ops, convert)`` on every framework with NumPy float64."""
    expected = call(ORACLE, lambda x: x)
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    for name, (ops, convert) in SIDES.items():
        got = call(ops, convert)
        got = got if isinstance(got, (list, tuple)) else [got]
        for y, r in zip(got, expected, strict=True):
            assert host(y).shape == np.shape(r), name
            np.testing.assert_allclose(host(y), r, rtol=rtol, atol=atol, err_msg=name)


@st.composite
def floats(draw: Any, ndim: int = 3) -> np.ndarray:
    shape = draw(st.tuples(*[st.integers(1, 5)] * ndim))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("ops", [ORACLE, *(ops for ops, _ in SIDES.values())], ids=lambda o: o.name)
def test_everything_is_there(ops: Any) -> None:
    for name in (*ARRAY_FUNCTIONS, *CONTRACTS):
        assert callable(getattr(ops, name)), name
    for name in ("sum", "mean", "max", "logsumexp", "zeros", "astype", "split", "like"):
        own = inspect.signature(getattr(ops, name)).parameters
        declared = list(inspect.signature(getattr(ArrayFunctions, name)).parameters)[1:]
        assert list(own) == declared, name


@pytest.mark.parametrize(
    "name",
    [
        "exp",
        "square",
        "abs",
        "sign",
        "sin",
        "cos",
        "tril",
        "tanh",
        "sigmoid",
        "silu",
        "relu",
        "zeros_like",
        "ones_like",
        "stop_gradient",
    ],
)
@given(x=floats())
def test_elementwise(name: str, x: np.ndarray) -> None:
    same(lambda ops, of: getattr(ops, name)(of(x)))


@given(x=floats())
def test_elementwise_of_positive_numbers(x: np.ndarray) -> None:
    same(lambda ops, of: (ops.log(of(abs(x) + 0.1)), ops.sqrt(of(abs(x)))), rtol=1e-5)


@given(x=floats())
def test_choices(x: np.ndarray) -> None:
    y = x[::-1].copy()
    same(
        lambda ops, of: (
            ops.maximum(of(x), of(y)),
            ops.maximum(of(x), 0.5),
            ops.minimum(of(x), of(y)),
        )
    )
    same(lambda ops, of: (ops.minimum(of(x), 0.5), ops.where(of(x) > 0, of(x), of(y))))
    same(lambda ops, of: (ops.where(of(x) > 0, of(x), 0.0), ops.full_like(of(x), 2.5)))


def test_halves_are_rounded_to_the_even_number() -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49, -3.51], np.float32)
    same(lambda ops, of: (ops.round(of(x)), ops.clip(of(x), -1.0, 2.0)))


@given(x=floats(), axis=st.integers(-3, 2), diagonal=st.integers(-2, 2))
def test_running_sums_and_triangles(x: np.ndarray, axis: int, diagonal: int) -> None:
    same(lambda ops, of: (ops.cumsum(of(x), axis), ops.tril(of(x), diagonal)), rtol=1e-5)


@given(x=floats(4))
def test_a_scan_is_a_loop_along_the_second_axis(x: np.ndarray) -> None:
    def decayed(ops: Any, of: Any) -> tuple[Any, Any]:
        def step(carry: Any, slices: Any) -> Any:
            one, two = slices
            carry = carry * 0.5 + one
            return carry, carry * ops.expand_dims(two, -1)

        arrays = (of(x), of(x[..., 0].copy()))
        return ops.scan(step, of(np.zeros_like(x[:, 0])), arrays)

    same(decayed, rtol=1e-5)


def test_new_functions_have_the_same_gradients() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)

    def total(ops: Any, x: Any) -> Any:
        mixed = ops.abs(x) * ops.sin(x) + ops.cumsum(x, 0) * ops.cos(x) + ops.clip(x, -0.5, 0.5)
        mixed = mixed + ops.tril(x * x, -1) + ops.round(3 * x) * x + ops.sign(x) * x
        carry, found = ops.scan(lambda c, s: (c * 0.5 + s[0], c * s[0]), x[:, 0], (x,))
        return ops.sum(mixed) + ops.sum(found) + ops.sum(carry)

    leaf = torch.from_numpy(x).requires_grad_()
    total(SIDES["torch"][0], leaf).backward()
    slopes = mx.grad(lambda x: total(SIDES["mlx"][0], x))(mx.array(x))
    assert leaf.grad is not None
    np.testing.assert_allclose(np.array(slopes), leaf.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_a_cast_follows_another_array() -> None:
    for ops, convert in SIDES.values():
        half = ops.astype(convert(np.ones(3, np.float32)), "bfloat16")
        assert ops.astype_like(convert(np.ones(3, np.float32)), half).dtype == half.dtype
        many = ops.cumsum(ops.astype(convert(np.ones(600, np.float32)), "bfloat16"), 0)
        assert float(ops.astype(many[-1], "float32")) == 600.0  # bfloat16 would stay at 256


@given(x=floats())
def test_orders(x: np.ndarray) -> None:
    for axis in (-1, 0):
        same(lambda ops, of, axis=axis: ops.argsort(of(x), axis))
    found = ORACLE.argsort(x)
    assert found.dtype == np.int32
    assert (np.diff(np.take_along_axis(x, found, -1)) >= 0).all()


@given(x=floats())
def test_shapes(x: np.ndarray) -> None:
    a, b, c = x.shape
    same(lambda ops, of: (ops.reshape(of(x), (a * b, -1)), ops.permute_dims(of(x), (2, 0, 1))))
    same(lambda ops, of: (ops.matrix_transpose(of(x)), ops.expand_dims(of(x), -2)))
    same(lambda ops, of: ops.broadcast_to(of(x[:, :, :1]), (a, b, 7)))
    same(lambda ops, of: (ops.concat([of(x), of(x)], 1), ops.stack([of(x), of(x)], -1)))
    same(lambda ops, of: (ops.zeros((a, b)), ops.ones((b,)), ops.arange(c)))
    same(
        lambda ops, of: (ops.constant([1.0, 2.0], (2, 1)), ops.scalar(0.5), ops.like(of(x), of(x)))
    )


@pytest.mark.parametrize("shape", [(4, 4), (2, 6, 3), (1, 1)])
def test_qr_is_orthonormal_columns_and_a_triangle(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def of_one_sign(ops: Any, of: Any) -> Any:
        q, r = ops.qr(of(x))
        return (ops.square(q), ops.square(r), q @ r)

    same(of_one_sign)
    q, r = ORACLE.qr(x)
    np.testing.assert_allclose(np.swapaxes(q, -1, -2) @ q, np.eye(shape[-1]) + 0 * r, atol=1e-6)
    np.testing.assert_array_equal(np.tril(r, -1), 0 * r)


@given(x=floats(), axis=st.integers(-3, 2), data=st.data())
def test_split_and_take(x: np.ndarray, axis: int, data: st.DataObject) -> None:
    n = x.shape[axis]
    cut = data.draw(st.integers(0, n))
    parts = data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    if 0 < cut < n:  # MLX does not split off empty arrays
        same(lambda ops, of: list(ops.split(of(x), (cut, n - cut), axis)))
    same(lambda ops, of: list(ops.split(of(x), parts, axis)))
    rows = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4)), np.int32)
    same(lambda ops, of: (ops.take(of(x), of(rows), axis), ops.take(of(x), of(rows[0:1])[0], axis)))
    once = np.unique(rows)
    same(lambda ops, of: ops.take_rows(of(np.moveaxis(x, axis, 0).copy()), of(once)))
    along = np.random.default_rng(0).integers(0, x.shape[-1], (*x.shape[:-1], 2)).astype(np.int32)
    same(lambda ops, of: ops.take_along_axis(of(x), of(along), -1))


axes = st.sampled_from([None, 0, -1, 1, (0, 1), (-1, 0), (2, 0, 1)])


@given(x=floats(), axis=axes, keepdims=st.booleans())
def test_reductions(x: np.ndarray, axis: Any, keepdims: bool) -> None:
    # a sum whose terms cancel is as accurate as one of their magnitudes
    close = {"rtol": 1e-5, "atol": max(1e-6, float(np.abs(x).sum()) * 2.0**-24)}
    for name in ("sum", "mean", "max"):
        same(lambda ops, of, f=name: getattr(ops, f)(of(x), axis, keepdims=keepdims), **close)
    if isinstance(axis, int):
        same(lambda ops, of: ops.logsumexp(of(x * 50), axis, keepdims=keepdims))


@pytest.mark.parametrize(
    "shape", [(4096, 4096), (16, 50_304), (4_096 * 4_096 + 5,), (3, 5_000, 700)]
)
def test_full_reductions_are_accurate_to_float32(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).random(shape, np.float32)  # one sign: errors do not cancel
    expected = x.sum(dtype=np.float64)
    for name, (ops, convert) in SIDES.items():
        assert float(ops.sum(convert(x))) == pytest.approx(expected, rel=2e-6), name
        assert float(ops.mean(convert(x))) == pytest.approx(expected / x.size, rel=2e-6), name


def test_sums_in_half_precision_are_rounded_once() -> None:
    x = np.ones((300, 300), np.float32)
    for ops, convert in SIDES.values():
        total = ops.sum(ops.astype(convert(x), "bfloat16"))
        assert "bfloat16" in str(total.dtype)
        assert float(ops.astype(total, "float32")) == 90_112.0  # the bfloat16 closest to 90,000
        mean = ops.mean(ops.astype(convert(100 * x), "float16"))  # whose sum is infinite
        assert ("float16" in str(mean.dtype), float(ops.astype(mean, "float32"))) == (True, 100.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_dtypes_by_name(dtype: str) -> None:
    for ops, convert in SIDES.values():
        assert dtype in str(ops.astype(convert(np.ones(3, np.float32)), dtype).dtype)
        assert dtype in str(ops.zeros((2,), dtype).dtype)
    floating = "float" in dtype
    assert ORACLE.astype(np.ones(3, np.float32), dtype).dtype == (np.float64 if floating else dtype)


def test_a_value_takes_the_dtype_of_what_it_multiplies() -> None:
    for ops, convert in SIDES.values():
        x = ops.astype(convert(np.ones(3, np.float32)), "bfloat16")
        assert (x * ops.like(ops.scalar(0.1), x)).dtype == x.dtype
        assert ops.like(0.5, x) == 0.5


def test_gradients_stop_and_relu_has_none_at_zero() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    (TorchOps.relu(x) + TorchOps.stop_gradient(x)).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0]
    slope = mx.grad(lambda x: (MLXOps.relu(x) + MLXOps.stop_gradient(x)).sum())
    assert slope(mx.array([0.0, 1.0])).tolist() == [0.0, 1.0]


@settings(max_examples=1)
@given(x=floats())
def test_torch_traces_the_array_functions_whole(x: np.ndarray) -> None:
    ops, _ = SIDES["torch"]

    def body(x: Any) -> Any:
        a, b = ops.split(ops.concat([x, x], -1), 2)
        return (
            ops.sum(a * ops.arange(x.shape[-1], "float32"), (0, 1)) + ops.max(b) + ops.zeros((1,))
        )

    given = torch.from_numpy(x)
    traced = torch.compile(body, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(given), body(given))


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(arrays).failed == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sigmoyd", r"no op 'sigmoyd'.*did you mean self\.ops\.sigmoid\?"),
        ("atention", r"did you mean self\.ops\.attention\?"),
        ("zzz", r"there is .*sigmoid.*swiglu.*tanh"),
    ],
)
def test_an_unknown_op_is_answered_with_those_there_are(name: str, said: str) -> None:
    for ops in (ORACLE, *(ops for ops, _ in SIDES.values())):
        assert not hasattr(ops, name)
        with pytest.raises(AttributeError, match=said):
            getattr(ops, name)


@pytest.mark.parametrize("size", [4_097, 50_304])
def test_a_long_logsumexp_is_accurate_to_float32(size: int) -> None:
    """MLX on a CPU adds exponentials sequentially: an error of 1.5e-4 of 20 for a vocabulary of 50,304."""
    x = 4 * np.random.default_rng(0).standard_normal((5, size)).astype(np.float32)
    top = x.max(-1, keepdims=True).astype(np.float64)
    expected = top + np.log(np.exp(x - top).sum(-1, keepdims=True))
    for name, (ops, convert) in SIDES.items():
        for axis, values in ((-1, x), (0, np.ascontiguousarray(x.T))):
            found = np.array(ops.logsumexp(convert(values), axis).tolist())
            np.testing.assert_allclose(found, expected[:, 0], rtol=1e-6, err_msg=name)
