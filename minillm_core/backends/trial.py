"""A kernel tried alone, on a CPU: what it gives for NumPy arrays, and its gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["rounded", "tried"]


def rounded(backend: str, x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that ``dtype`` holds exactly."""
    return _module(backend).rounded(x, dtype)


def tried(
    backend: str,
    kernel: Callable[..., Any],
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    upstream: Sequence[np.ndarray],
    dtype: str,
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Call a kernel, and differentiate the sum of its outputs times ``upstream``.

    Args:
        backend: ``torch`` or ``mlx``, which is imported.
        kernel: with its op's signature.
        arrays: argument -> its value; arrays, also within a named tuple, become the framework's.
        wanted: the arguments that are differentiated: these are given in ``dtype``.
        upstream: float32, of the shapes of the outputs that can be differentiated, the first ones.
        dtype: the compute dtype.

    Returns:
        The outputs in float64; argument -> its gradient in float64, 0 where there is none.
    """
    return _module(backend).tried(kernel, arrays, wanted, upstream, dtype)


def _module(backend: str) -> Any:
    return importlib.import_module(f"minillm_core.backends.{backend}.trial")
