"""PyTorch: on NVIDIA's GPUs, on a CPU, and on Apple's by ``--device mps``."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from minillm_core.backends.base import Backend, Binding
from minillm_core.backends.torch import random
from minillm_core.backends.torch.candidates import CANDIDATES
from minillm_core.backends.torch.inference import TorchModel
from minillm_core.backends.torch.module import TorchFramework
from minillm_core.backends.torch.ops import TorchOps
from minillm_core.backends.torch.trainer import TorchTrainer
from minillm_core.backends.torch.weights import materialise
from minillm_core.backends.witness import watch_kernels
from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate, load
from minillm_core.plan import Plan

__all__ = ["PEAK_FLOPS", "TorchBackend"]

PEAK_FLOPS: Mapping[str, float] = {
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
"""Part of a device's name -> dense bfloat16 FLOP/s by its maker's datasheet."""


class TorchBackend(Backend):
    """A device of torch's.

    Args:
        binding: what was decided, kernels included.
        candidates: the kernels to load from: the core's and the plugins'.
        join: multiply leaves that read the same input as one. Off: at 768 wide on an H100 it was
            0.5 % slower than separate products (docs/experiments.md).
        fused: use torch's fused AdamW.
        compiler: what compiles a function where the binding says so; takes torch.compile's options.
    """

    name = "torch"

    def __init__(
        self,
        binding: Binding,
        candidates: tuple[Candidate, ...] = CANDIDATES,
        *,
        join: bool = False,
        fused: bool = True,
        compiler: Callable[..., Any] = torch.compile,
    ) -> None:
        self.device = torch.device(binding.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise BackendError(
                f"torch {torch.__version__} sees no CUDA device",
                where=f"--device {binding.device}",
                fix="--device cpu; minillm doctor says what it would need",
            )
        self.join, self.fused, self.compiler = join, fused, compiler
        self.candidates = candidates
        self.binding = replace(binding, **_facts(self.device, binding, self.join))

    def model(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> TorchModel:
        """The plan's model, filled."""
        model, framework = self._materialise(plan, seed, max_positions)
        return TorchModel(plan, self.binding, model, framework, join=self.join)

    def trainer(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> TorchTrainer:
        """The plan's model, filled, with its optimizer."""
        random.seed(seed)
        model, framework = self._materialise(plan, seed, max_positions)
        return TorchTrainer(
            plan,
            self.binding,
            model,
            framework,
            join=self.join,
            fused=self.fused,
            compiler=self.compiler,
        )

    def _materialise(
        self, plan: Plan, seed: int, max_positions: int | None
    ) -> tuple[Any, TorchFramework]:
        if self.binding.deterministic:
            torch.use_deterministic_algorithms(True)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # where a plugin's Triton kernels are launched
        kernels = load(self.binding.kernels, self.candidates, "torch")
        framework = TorchFramework(TorchOps(kernels, device=self.device))
        watch_kernels(framework, plan, self.binding.kernels)
        model = materialise(
            plan,
            framework,
            seed,
            self.device,
            max_positions or plan.config.train.seq_len,
            checkpointing=self.binding.checkpointing,
        )
        return model, framework


def _facts(device: torch.device, binding: Binding, join: bool) -> dict[str, object]:
    notes = ["float32 products in full float32 (TF32 off)"] if device.type == "cuda" else []
    if join:
        notes.append("q, k, v and gate, up are each multiplied as one")
    name, peak = platform.processor() or platform.machine(), None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if binding.dtype != "float32":
            peak = next((f for part, f in PEAK_FLOPS.items() if part in name), None)
    return {"device_name": name, "peak_flops": peak, "notes": (*binding.notes, *notes)}
