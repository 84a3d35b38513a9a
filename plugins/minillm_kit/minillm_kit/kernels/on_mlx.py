"""Calls of kernels on MLX."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from minillm_core import BackendError
from minillm_kit.kernels.calls import Kernel, Layout, Results, kind_of, listed

GUARD = 64
"""Guard elements before and after an array."""

GAP = 8
"""Elements between two rows of a sliced array."""


def make(device: str) -> MLXCalls:
    """Create the calls on a device.

    Raises:
        BackendError: MLX does not find the device.
    """
    calls = MLXCalls(device)
    try:
        calls.poison([(1,)], "float32")
    except (RuntimeError, ValueError) as error:
        raise BackendError(
            f"mlx cannot use '{device}': {str(error).splitlines()[0]}",
            where=f"--device {device}",
            fix="--device cpu; minillm doctor says what this machine can run",
        ) from error
    return calls


class MLXCalls:
    """Calls of kernels on a device of MLX; see :class:`minillm_kit.kernels.calls.Calls`."""

    backend = "mlx"

    def __init__(self, device: str) -> None:
        self.device, self.kind = device, kind_of("mlx", device)
        self._device = mx.cpu if device == "cpu" else mx.gpu

    def call(
        self,
        kernel: Kernel,
        arguments: Mapping[str, Any],
        floats: Sequence[str],
        upstream: Sequence[np.ndarray] = (),
        *,
        dtype: str,
        wanted: Sequence[str] = (),
        layout: Layout = "plain",
        unread: bool = False,
    ) -> Results:
        with mx.stream(self._device):
            kept: list[tuple[str, mx.array, mx.array]] = []  # name, array, values before the call
            given = {
                name: _put(kept, name, value, dtype if name in floats else None, layout)
                for name, value in arguments.items()
            }
            outputs, grads = _pulled_back(kernel, given, wanted, upstream)
            mx.eval(outputs, grads)
            return Results(
                [_wide(y) for y in outputs],
                [str(y.dtype).removeprefix("mlx.core.") for y in outputs],
                {name: _wide(grad) for name, grad in grads.items()},
                [name for name, now, before in kept if not _same(now, before)],
                [],  # MLX has no such information
            )

    def poison(self, shapes: Sequence[tuple[int, ...]], dtype: str) -> None:
        kinds = {getattr(mx, dtype), mx.float32}
        with mx.stream(self._device):
            mx.eval([mx.full(shape, mx.nan, kind) for shape in shapes for kind in kinds])

    def uninitialised(self) -> AbstractContextManager[None]:
        return nullcontext()  # MLX cannot allocate uninitialised memory

    def compilations(self) -> int:
        return 0  # MLX compiles within milliseconds

    def timed(
        self,
        kernel: Kernel,
        arguments: Mapping[str, Any],
        floats: Sequence[str],
        *,
        dtype: str,
        wanted: Sequence[str] = (),
    ) -> MLXTimed:
        given = {
            name: _plain(value, dtype if name in floats else None)
            for name, value in arguments.items()
        }

        learnt = 1 if "targets" in arguments else None  # of a loss only the total is differentiable

        def outputs(*chosen: mx.array) -> list[mx.array]:
            found = listed(kernel(**{**given, **dict(zip(wanted, chosen, strict=True))}), mx.array)
            return found[:learnt]

        def both() -> Any:  # outputs that backward passes do not read would not be computed
            return mx.vjp(outputs, [given[name] for name in wanted], ups)

        with mx.stream(self._device):
            ups = [mx.ones_like(y) for y in outputs(*(given[name] for name in wanted))]
            mx.eval(ups)
        return MLXTimed(both if wanted else lambda: kernel(**given), self._device)

    def product(self, n: int, dtype: str) -> MLXTimed:
        a, b = (mx.random.uniform(shape=(n, n)).astype(getattr(mx, dtype)) for _ in range(2))
        mx.eval(a, b)
        return MLXTimed(lambda: a @ b, self._device)

    def copy(self, size: int) -> MLXTimed:
        a = mx.zeros((size // 4,), mx.float32)
        mx.eval(a)
        return MLXTimed(lambda: -a, self._device)  # reads and writes the whole array

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "allocate" in str(error)


class MLXTimed:
    """A timed call on MLX, which evaluates its results."""

    def __init__(self, call: Callable[[], Any], device: Any) -> None:
        self._call, self._device = call, device

    def seconds(self, times: int) -> float:
        with mx.stream(self._device):
            mx.synchronize()
            began = time.perf_counter()
            for _ in range(times):
                mx.eval(self._call())
            return (time.perf_counter() - began) / times

    def extra_bytes(self) -> int | None:
        with mx.stream(self._device):
            mx.synchronize()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            mx.eval(self._call())
            return mx.get_peak_memory() - before


def _pulled_back(
    kernel: Kernel,
    given: Mapping[str, Any],
    wanted: Sequence[str],
    upstream: Sequence[np.ndarray],
) -> tuple[list[mx.array], dict[str, mx.array]]:
    """Return the outputs, and the gradient of each of ``wanted``."""

    def total(chosen: dict[str, Any]) -> Any:
        found = kernel(**{**given, **chosen})
        outputs = listed(found, mx.array)
        pairs = zip(outputs, upstream, strict=False)
        terms = [
            (y.astype(mx.float32) * mx.array(c)).sum()
            for y, c in pairs
            if c.shape in ((), tuple(y.shape))  # the caller rejects other shapes
        ]
        return sum(terms, mx.array(0.0)), outputs

    chosen = {name: given[name] for name in wanted}
    if not chosen:
        return total({})[1], {}
    (_, outputs), grads = mx.value_and_grad(total)(chosen)
    return outputs, grads


def _plain(value: Any, dtype: str | None) -> Any:
    if isinstance(value, np.ndarray):
        x = mx.array(value)
        x = x.astype(getattr(mx, dtype)) if dtype else x
        mx.eval(x)
        return x
    return type(value)(*(_plain(x, None) for x in value)) if hasattr(value, "_fields") else value


def _put(
    kept: list[tuple[str, mx.array, mx.array]],
    name: str,
    value: Any,
    dtype: str | None,
    layout: Layout,
) -> Any:
    if isinstance(value, np.ndarray):
        x = mx.array(value)
        x = x.astype(getattr(mx, dtype)) if dtype else x
        y = _within(x, layout if dtype else "plain")
        mx.eval(x, y)
        kept.append((name, y, x))
        return y
    if hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)
        return type(value)(*(_put(kept, f"{name}.{part}", x, None, layout) for part, x in parts))
    return value


def _within(x: mx.array, layout: Layout) -> mx.array:
    other = mx.nan if mx.issubdtype(x.dtype, mx.floating) else 0
    if x.ndim < 2 or layout == "plain":
        around = mx.full((GUARD,), other, x.dtype)
        buffer = mx.concatenate([around, x.reshape(-1), around])
        mx.eval(buffer)
        return buffer[GUARD : GUARD + x.size].reshape(x.shape)
    if layout == "sliced":
        buffer = mx.concatenate([x, mx.full((*x.shape[:-1], GAP), other, x.dtype)], axis=-1)
        mx.eval(buffer)
        return buffer[..., : x.shape[-1]]
    buffer = mx.contiguous(x.swapaxes(-1, -2))
    mx.eval(buffer)
    return buffer.swapaxes(-1, -2)


def _same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool(mx.array_equal(a, b, equal_nan=a.dtype != mx.int32).item())


def _wide(y: mx.array) -> np.ndarray:
    return np.array(y.astype(mx.float32), np.float64)
