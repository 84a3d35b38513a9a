"""The parts of the checks that need MLX: calling a kernel on a CPU, and the process's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np


def process_state() -> dict[str, Any]:
    """Return MLX's per-process defaults and random state: name -> value; the key is this thread's."""
    device, random = mx.default_device(), cast(Any, mx.random.state)
    return {
        "mlx's default device": str(device),
        "mlx's default stream": str(mx.default_stream(device)),
        "mlx's generator": tuple(np.array(random[0]).tolist()),
    }


def contents(arrays: Iterable[Any]) -> tuple[int, ...]:
    """Return a hash of each array's elements, outside compiled graphs: MLX counts no writes in place."""
    found = (a for a in arrays if isinstance(a, mx.array))
    return tuple(hash(np.array(a.astype(mx.float32)).tobytes()) for a in found)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to float32 values that ``dtype`` represents exactly."""
    return np.array(mx.array(x.astype(np.float32)).astype(getattr(mx, dtype)).astype(mx.float32))


def tried(
    kernel: Callable[..., Any],
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    upstream: Sequence[np.ndarray],
    dtype: str,
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return float64 outputs and the gradient of each of ``wanted``; as :func:`minillm_kit.on_torch.tried`."""
    given = {name: _array(value) for name, value in arrays.items()}

    def total(chosen: dict[str, Any]) -> Any:
        found = kernel(**{**given, **chosen})
        outputs = list(found) if isinstance(found, tuple | list) else [found]
        pairs = zip(outputs, upstream, strict=False)
        return sum((y.astype(mx.float32) * mx.array(c)).sum() for y, c in pairs), outputs

    chosen = {name: given[name].astype(getattr(mx, dtype)) for name in wanted}
    with mx.stream(mx.cpu):
        (_, outputs), grads = mx.value_and_grad(total)(chosen)
        return [_wide(y) for y in outputs], {name: _wide(grad) for name, grad in grads.items()}


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return mx.array(value)
    return type(value)(*map(_array, value)) if hasattr(value, "_fields") else value


def _wide(y: mx.array) -> np.ndarray:
    return np.array(y.astype(mx.float32), np.float64)
