"""Selective recomputation (Korthikanti and others, arXiv:2205.05198): norms and SwiGLU, which are cheap to compute again.

A compiled step keeps the results of both, since the gradients of weights are products with them. They are
2 C + F of the roughly 8 C + 3 F numbers that a layer keeps per token (width C, hidden width F): 29 % for preset
``gpt2-124m``. Computed again in the backward pass, they are written once more, and no product is repeated;
``train.checkpointing`` repeats whole blocks, products included.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Candidate, Plugin, Request, option

__all__ = ["Recompute"]


class Recompute(Plugin, api=1, backends=("torch",)):
    """Results of norms and of SwiGLU are computed again in the backward pass, not kept."""

    norms: bool = option(True, help="the results of RMSNorm are computed again")
    swiglu: bool = option(True, help="the results of SwiGLU are computed again")

    def kernel_provider(self, kernels: Any) -> None:
        for field, op in (("norms", "rms_norm"), ("swiglu", "swiglu")):
            if getattr(self, field):
                kernels.candidate(
                    Candidate(
                        op,
                        "recomputed",
                        ("torch",),
                        f"minillm_triton.kernels.recompute:{op}",
                        rank=before_the_cores,
                        disable_option=f"{field}=false",
                    )
                )


def before_the_cores(request: Request) -> int:
    """Rank before the core's kernels and Liger's: this plugin is named for nothing else."""
    return -1
