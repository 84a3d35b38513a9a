"""Metal kernels that MLX lacks, as candidates for minillm's ops.

Linear cross-entropy in chunks whose losses and gradients one kernel computes; attention with a window or
documents without (T, T) scores; rotation at given positions; RMSNorm's backward pass; Muon's symmetric products
by half. Where MLX's own kernels move as few bytes, they are preferred. Those without products of matrices
also run as CUDA, with MLX on an NVIDIA GPU.
"""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import Candidate, Plugin, option
from minillm_metal import requests

__all__ = ["Metal"]

MLX = "mlx>=0.32"  # mx.depends and metal_kernel in the form used here
METAL = ("metal",)  # these multiply 8 x 8 matrices, which CUDA has no instruction for
GPUS = ("metal", "cuda")
Wanted = Literal["auto"] | bool


class Metal(Plugin, api=1, backends=("mlx",), devices=("gpu",)):
    """Linear cross-entropy, masked attention, RoPE, RMSNorm and Muon's symmetric products by Metal kernels."""

    loss: Wanted = option(
        "auto", help="linear cross-entropy; true: required, auto: used where it applies"
    )
    attention: Wanted = option("auto", help="attention; same values as loss")
    rope: Wanted = option("auto", help="rotary position embedding; same values as loss")
    norm: Wanted = option("auto", help="RMSNorm's backward pass; same values as loss")
    gram: Wanted = option(
        "auto", help="symmetric products of Muon and Polar Express; same values as loss"
    )

    def kernel_provider(self, kernels: Any) -> None:
        offers = (
            ("loss", "linear_cross_entropy", "metal", "loss", GPUS),
            ("attention", "attention", "metal", "attention", METAL),
            ("attention", "attention", "blocks", "blocks", GPUS),
            ("rope", "rotate", "metal", "rope", GPUS),
            ("norm", "rms_norm", "metal", "norm", GPUS),
            ("gram", "gram", "metal", "gram", METAL),
        )
        for field, op, name, module, devices in offers:
            wanted = getattr(self, field)
            if wanted is False:
                continue
            insists = wanted is True and name == "metal"
            kernels.candidate(
                Candidate(
                    op,
                    name,
                    ("mlx",),
                    f"minillm_metal.kernels.{module}:{op}",
                    devices=devices,
                    accepts=getattr(requests, module),
                    rank=requests.required if insists else getattr(requests, f"{module}_rank"),
                    requires=(MLX,),
                    disable_option=f"{field}=false" if insists else "",
                    provider="minillm-metal",
                )
            )
