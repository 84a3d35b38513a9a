"""The PyTorch backend: NVIDIA GPUs, CPUs, and Apple GPUs with ``--device mps``."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from minillm_core.backends.base import Binding
from minillm_core.backends.candidates import TORCH
from minillm_core.backends.native import NativeBackend
from minillm_core.backends.torch.compiling import imported, importing, selective
from minillm_core.backends.torch.model import TorchFramework, TorchModel
from minillm_core.backends.torch.ops import TorchOps
from minillm_core.backends.torch.trainer import TorchTrainer, seed_generators
from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate

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
"""Part of a device's name -> dense bfloat16 FLOP/s, from the datasheet."""


class TorchBackend(NativeBackend):
    """The PyTorch backend on one device.

    Args:
        binding: the decisions, kernels included.
        candidates: the kernels to load from: the core's and the plugins'.
        fused: use torch's fused AdamW.
        compiler: compiles functions if ``binding.compile`` is set; takes torch.compile's options;
            torch.compile by default.
    """

    name = "torch"

    def __init__(
        self,
        binding: Binding,
        candidates: tuple[Candidate, ...] = TORCH,
        *,
        fused: bool = True,
        compiler: Callable[..., Any] | None = None,
    ) -> None:
        self.device = torch.device(binding.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            what = f"torch {torch.__version__} sees no CUDA device"
            fix = "--device cpu; minillm doctor shows what is missing"
            raise BackendError(what, where=f"--device {binding.device}", fix=fix)
        name, peak, notes = platform.processor() or platform.machine(), None, binding.notes
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            notes = (*notes, "float32 products in full float32 (TF32 off)")
            if binding.dtype != "float32":
                peak = next((f for part, f in PEAK_FLOPS.items() if part in name), None)
        super().__init__(
            replace(binding, device_name=name, peak_flops=peak, notes=notes), candidates, compiler
        )
        compiler = imported(compiler or torch.compile)
        compiler = selective(compiler) if binding.checkpointing == "selective" else compiler
        self._model = partial(TorchModel, compiler=compiler)
        self._trainer = partial(TorchTrainer, fused=fused, compiler=compiler)

    def _prepare(self, seed: int) -> None:
        seed_generators(seed)
        if self.binding.compile:
            importing()

    def _framework(self, kernels: Mapping[str, Callable[..., Any]]) -> TorchFramework:
        if self.binding.deterministic:
            torch.use_deterministic_algorithms(True)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # where a plugin's Triton kernels are launched
        return TorchFramework(TorchOps(kernels, device=self.device))
