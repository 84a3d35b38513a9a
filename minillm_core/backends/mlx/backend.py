"""MLX: on Apple's GPUs, on NVIDIA's by its CUDA build, and on a CPU."""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from typing import Any

import mlx.core as mx

from minillm_core.backends.base import Backend, Binding
from minillm_core.backends.mlx import random
from minillm_core.backends.mlx.candidates import CANDIDATES
from minillm_core.backends.mlx.inference import MLXModel
from minillm_core.backends.mlx.module import MLXFramework
from minillm_core.backends.mlx.ops import MLXOps
from minillm_core.backends.mlx.trainer import MLXTrainer
from minillm_core.backends.mlx.weights import materialise
from minillm_core.backends.witness import watch_kernels
from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate, load
from minillm_core.plan import Plan

__all__ = ["MLXBackend"]


SLOW = 15e9
"""FLOP/s of a float32 product: below it, one thread of a reference BLAS is at work."""


def multiply_speed(size: int = 384) -> float:
    """FLOP/s of a float32 matrix product on the default device; takes some 20 ms at 5 GFLOP/s."""
    a = mx.ones((size, size))
    mx.eval(a, a @ a)
    began = time.perf_counter()
    mx.eval(a @ a)
    return 2 * size**3 / (time.perf_counter() - began)


class MLXBackend(Backend):
    """A device of MLX's.

    Args:
        binding: what was decided, kernels included.
        candidates: the kernels to load from: the core's and the plugins'.
        join: multiply leaves that read the same input as one. Off: it gained nothing on an H100
            (docs/experiments.md).
    """

    name = "mlx"

    def __init__(
        self,
        binding: Binding,
        candidates: tuple[Candidate, ...] = CANDIDATES,
        *,
        join: bool = False,
    ) -> None:
        device = mx.cpu if binding.device == "cpu" else mx.gpu
        try:
            mx.set_default_device(device)
        except ValueError as error:
            raise BackendError(
                f"this MLX has no GPU: {error}",
                where=f"--device {binding.device}",
                fix="--device cpu, or a Mac, or mlx[cuda13] beside an NVIDIA card: minillm doctor",
            ) from error
        self.join = join
        self.candidates = candidates
        notes = ["q, k, v and gate, up are each multiplied as one"] if self.join else []
        name = platform.processor() or platform.machine()
        if device == mx.gpu:
            name = str(mx.device_info().get("device_name", "GPU"))
        if device == mx.cpu and (speed := multiply_speed()) < SLOW:
            notes.append(
                f"MLX multiplies at {speed / 1e9:.0f} GFLOP/s on this CPU: its bundled BLAS is a "
                "plain one; --backend torch, or OpenBLAS loaded before it, is 20 times faster"
            )
        self.binding = replace(binding, device_name=name, notes=(*binding.notes, *notes))

    def model(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> MLXModel:
        """The plan's model, filled."""
        model, framework = self._materialise(plan, seed, max_positions)
        return MLXModel(plan, self.binding, model, framework, join=self.join)

    def trainer(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> MLXTrainer:
        """The plan's model, filled, with its optimizer."""
        random.seed(seed)
        model, framework = self._materialise(plan, seed, max_positions)
        return MLXTrainer(plan, self.binding, model, framework, join=self.join)

    def _materialise(
        self, plan: Plan, seed: int, max_positions: int | None
    ) -> tuple[Any, MLXFramework]:
        kernels = load(self.binding.kernels, self.candidates, "mlx")
        framework = MLXFramework(MLXOps(kernels))
        watch_kernels(framework, plan, self.binding.kernels)
        positions = max_positions or plan.config.train.seq_len
        model = materialise(
            plan, framework, seed, positions, checkpointing=self.binding.checkpointing
        )
        return model, framework
