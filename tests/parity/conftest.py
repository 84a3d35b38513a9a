"""An op on each framework, from NumPy arrays to NumPy outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
torch = pytest.importorskip("torch")

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Ran:
    """Outputs in order, and the gradient of each differentiable argument; all float64."""

    outputs: list[np.ndarray]
    grads: dict[str, np.ndarray]


def cotangents(outputs: Sequence[Any]) -> list[np.ndarray]:
    """The same upstream gradients for every framework: not 0, and exact in every dtype."""
    draw = np.random.default_rng(7)
    odd = (2 * draw.integers(-8, 8, tuple(y.shape)) + 1 for y in outputs)
    return [np.asarray(n / 16, np.float32) for n in odd]


def on_torch(
    op: Callable[..., Any],
    arrays: Arrays,
    wanted: Sequence[str],
    *,
    dtype: str = "float32",
    differentiable: int | None = None,
) -> Ran:
    """``op(**arrays)`` on torch: floats of ``wanted`` in ``dtype``, the others as they come.

    Args:
        op: the kernel.
        arrays: its arguments by name; NumPy arrays become tensors, the rest stays.
        wanted: the arguments whose gradient is taken.
        dtype: compute dtype.
        differentiable: how many of the outputs, from the first, are; None: all.
    """
    given = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    given = {k: rotary(v, torch.from_numpy) if k == "table" else v for k, v in given.items()}
    for name in wanted:
        given[name] = given[name].to(getattr(torch, dtype)).requires_grad_()
    outputs = listed(op(**given))
    chosen = outputs[:differentiable]
    pairs = zip(chosen, cotangents(chosen), strict=True)
    sum((y.double() * torch.from_numpy(c)).sum() for y, c in pairs).backward()
    return Ran(
        [y.detach().double().numpy() for y in outputs],
        {name: given[name].grad.double().numpy() for name in wanted},
    )


def on_mlx(
    op: Callable[..., Any],
    arrays: Arrays,
    wanted: Sequence[str],
    *,
    dtype: str = "float32",
    differentiable: int | None = None,
    compiled: bool = False,
) -> Ran:
    """The same on MLX, by value_and_grad, on request within mx.compile."""
    given = {k: mx.array(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    given = {k: rotary(v, mx.array) if k == "table" else v for k, v in given.items()}

    def loss(chosen: dict[str, Any]) -> Any:
        outputs = listed(op(**{**given, **chosen}))
        first = outputs[:differentiable]
        pairs = zip(first, cotangents(first), strict=True)
        return sum((y.astype(mx.float32) * mx.array(c)).sum() for y, c in pairs), outputs

    step = mx.value_and_grad(loss)
    step = mx.compile(step) if compiled else step
    (_, outputs), grads = step({name: given[name].astype(getattr(mx, dtype)) for name in wanted})
    return Ran(
        [np.array(y.astype(mx.float32), np.float64) for y in outputs],
        {name: np.array(grads[name].astype(mx.float32), np.float64) for name in wanted},
    )


def rotary(table: Any, convert: Callable[[np.ndarray], Any]) -> Any:
    return type(table)(*(None if x is None else convert(x) for x in table))


def listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that ``dtype`` holds exactly."""
    return torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)).float().numpy()


def assert_close(got: np.ndarray, reference: np.ndarray, tolerance: float, what: str) -> None:
    """As the contract says it; a NaN is never close."""
    assert got.shape == reference.shape, what
    size = max(np.linalg.norm(reference), reference.size**0.5)
    error = np.linalg.norm(got - reference) / max(size, 1.0)
    assert error <= tolerance, f"{what}: {error:.2e} > {tolerance:.0e}"


def assert_slopes(
    op: Callable[..., Any],
    exact: Ran,
    floats: Arrays,
    others: Arrays,
    wanted: Sequence[str],
    *,
    differentiable: int | None = None,
) -> None:
    """Gradients against central differences of ``op`` in float64: h = 1e-4, random directions."""
    rng, h = np.random.default_rng(3), 1e-4
    upstream = cotangents(exact.outputs[:differentiable])

    def value(**moved: np.ndarray) -> float:
        outputs = listed(op(**{**floats, **others, **moved}))[:differentiable]
        return sum(float(np.sum(y * c)) for y, c in zip(outputs, upstream, strict=True))

    for name in wanted:
        direction = rng.standard_normal(floats[name].shape)
        direction *= h / max(1.0, float(np.abs(direction).max()))
        base = floats[name].astype(np.float64)
        slope = value(**{name: base + direction}) - value(**{name: base - direction})
        expected = 2.0 * float(np.sum(exact.grads[name] * direction))
        size = 2.0 * np.linalg.norm(exact.grads[name]) * np.linalg.norm(direction)
        assert abs(slope - expected) <= 1e-4 * size + 1e-12, name


@pytest.fixture(scope="session")
def side() -> Any:
    """The functions above, since tests do not import one another."""

    class Side:
        torch = staticmethod(on_torch)
        mlx = staticmethod(on_mlx)
        rounded = staticmethod(rounded)
        assert_close = staticmethod(assert_close)
        assert_slopes = staticmethod(assert_slopes)

    return Side
