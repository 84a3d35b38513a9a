"""One kernel on a CPU, outside of any model: NumPy arrays in, outputs and gradients out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["rounded", "tried"]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that ``dtype`` holds exactly."""
    return torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)).float().numpy()


def tried(
    kernel: Callable[..., Any],
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    upstream: Sequence[np.ndarray],
    dtype: str,
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Float64 outputs, and the gradient of each of ``wanted`` by name; see :mod:`..trial`."""
    given = {name: _tensor(value) for name, value in arrays.items()}
    for name in wanted:
        given[name] = given[name].to(getattr(torch, dtype)).requires_grad_()
    outputs = kernel(**given)
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    pairs = zip(outputs, upstream, strict=False)
    total = torch.stack([(y.double() * torch.from_numpy(c)).sum() for y, c in pairs]).sum()
    total.backward()
    grads = {name: given[name].grad for name in wanted}
    return [y.detach().double().numpy() for y in outputs], {
        name: np.zeros(arrays[name].shape) if grad is None else grad.double().numpy()
        for name, grad in grads.items()
    }


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return type(value)(*map(_tensor, value)) if hasattr(value, "_fields") else value
