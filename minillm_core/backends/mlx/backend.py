"""The MLX backend: Apple GPUs, NVIDIA GPUs with its CUDA build, and CPUs."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx

from minillm_core.backends.base import Binding
from minillm_core.backends.candidates import MLX
from minillm_core.backends.mlx import random
from minillm_core.backends.mlx.model import MLXFramework, MLXModel
from minillm_core.backends.mlx.ops import MLXOps
from minillm_core.backends.mlx.trainer import MLXTrainer
from minillm_core.backends.native import NativeBackend
from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate

SLOW = 15e9
"""FLOP/s of a float32 matrix product below which MLX uses one thread of a reference BLAS."""


@cache
def multiply_speed(size: int = 384) -> float:
    """Measure the FLOP/s of a float32 matrix product, once per process; takes some 20 ms at 5 GFLOP/s."""
    a = mx.ones((size, size))
    mx.eval(a, a @ a)
    began = time.perf_counter()
    mx.eval(a @ a)
    return 2 * size**3 / (time.perf_counter() - began)


class MLXBackend(NativeBackend):
    """The MLX backend on one device.

    Args:
        binding: the decisions, kernels included.
        candidates: the kernels to load from: the core's and the plugins'.
    """

    name = "mlx"
    _prepare, _model, _trainer = staticmethod(random.seed), MLXModel, MLXTrainer

    def __init__(self, binding: Binding, candidates: tuple[Candidate, ...] = MLX) -> None:
        device = mx.cpu if binding.device == "cpu" else mx.gpu
        try:
            mx.set_default_device(device)
        except ValueError as error:
            raise BackendError(
                f"this MLX has no GPU: {error}",
                where=f"--device {binding.device}",
                fix="--device cpu, or a Mac, or mlx[cuda13] beside an NVIDIA card: minillm doctor",
            ) from error
        name, notes = platform.processor() or platform.machine(), binding.notes
        if device == mx.gpu:
            name = str(mx.device_info().get("device_name", "GPU"))
        elif (speed := multiply_speed()) < SLOW:
            notes = (
                *notes,
                f"MLX multiplies at {speed / 1e9:.0f} GFLOP/s on this CPU: its bundled BLAS is a "
                "plain one; --backend torch, or OpenBLAS loaded before it, is 20 times faster",
            )
        super().__init__(replace(binding, device_name=name, notes=notes), candidates)

    def _framework(self, kernels: Mapping[str, Callable[..., Any]]) -> MLXFramework:
        return MLXFramework(MLXOps(kernels))
