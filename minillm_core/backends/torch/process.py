"""What torch has once a process."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

__all__ = ["process_state"]


def process_state() -> dict[str, Any]:
    """Name -> value, as torch's own functions give it."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": str(torch.get_default_device()),
        "torch's seed": torch.initial_seed(),
        "torch's generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.set_grad_enabled": torch.is_grad_enabled(),
        "torch.set_num_threads": torch.get_num_threads(),
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "torch.backends.cudnn.deterministic": cudnn.deterministic,
        "torch.backends.cudnn.enabled": cudnn.enabled,
        "torch.backends.cuda.enable_flash_sdp": cuda.flash_sdp_enabled(),
        "torch.backends.cuda.enable_mem_efficient_sdp": cuda.mem_efficient_sdp_enabled(),
        "torch.backends.cuda.enable_math_sdp": cuda.math_sdp_enabled(),
    }
