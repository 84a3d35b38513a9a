"""Metal kernels that MLX lacks, as candidates for minillm's ops.

Linear cross-entropy in chunks whose losses and gradients one kernel computes; attention with a window or
documents without (T, T) scores; rotation at given positions; Muon's symmetric products by half.
Where MLX's own kernels move as few bytes, they are preferred.
"""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import Candidate, Plugin, option
from minillm_metal import requests

__all__ = ["Metal"]

MLX = "mlx>=0.32"  # mx.depends and metal_kernel in the form used here
Wanted = Literal["auto"] | bool


class Metal(Plugin, api=1, backends=("mlx",), devices=("gpu",)):
    """Linear cross-entropy, masked attention, RoPE and Muon's symmetric products by Metal kernels."""

    loss: Wanted = option(
        "auto", help="linear cross-entropy; true: required, auto: used where it applies"
    )
    attention: Wanted = option("auto", help="attention; same values as loss")
    rope: Wanted = option("auto", help="rotary position embedding; same values as loss")
    gram: Wanted = option(
        "auto", help="symmetric products of Muon and Polar Express; same values as loss"
    )

    def kernel_provider(self, kernels: Any) -> None:
        offers = (
            ("loss", "linear_cross_entropy", "metal", "loss"),
            ("attention", "attention", "metal", "attention"),
            ("attention", "attention", "blocks", "blocks"),
            ("rope", "rotate", "metal", "rope"),
            ("gram", "gram", "metal", "gram"),
        )
        for field, op, name, module in offers:
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
                    devices=("metal",) if name == "metal" else ("metal", "cuda"),
                    accepts=getattr(requests, module),
                    rank=getattr(requests, f"{module}_rank"),
                    requires=(MLX,),
                    disable_option=f"{field}=false" if insists else "",
                    provider="minillm-metal",
                )
            )
