"""The head in fp8: matrix products in fp8 in the linear cross-entropy, on NVIDIA GPUs from Ada on.

Its three products, the logits and both gradients, take half the time. (modded-nanogpt, record of 2025-01-13: the
head in fp8, with fixed scales. Here each scale is a power of two computed from the array's largest value in the
same step, so that nothing must be tuned, saved or resumed.) Evaluation has bfloat16's products.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Candidate, Plugin, Request, gpu_refusal
from minillm_triton.triton import accepts_loss

__all__ = ["Fp8Head"]

MULTIPLE = 16  # of the sides of an fp8 product
SIZES = {"width": "model.dim", "vocab": "model.vocab"}  # fact -> its setting


class Fp8Head(Plugin, api=1, backends=("torch",), devices=("cuda",)):
    """Linear cross-entropy with fp8 products: outside bfloat16's tolerance, so used only if you name it."""

    def kernel_provider(self, kernels: Any) -> None:
        kernels.candidate(
            Candidate(
                "linear_cross_entropy",
                "fp8",
                ("torch",),
                "minillm_triton.kernels.loss:fp8_linear_cross_entropy",
                devices=("cuda",),
                accepts=accepts_fp8,
                rank=before_all,
                within_tolerance=False,
                requires=("triton>=3.4",),
                disable_option="-fp8_head",
                provider="minillm-triton",
            )
        )


def accepts_fp8(request: Request) -> str | None:
    """Accept those of the kernel without fp8, in bfloat16 and multiples of 16, on GPUs with such products."""
    if request.dtype != "bfloat16":
        return f"rounds from bfloat16, not from {request.dtype}"
    for fact, key in SIZES.items():
        if (size := request.facts.get(fact, 0)) % MULTIPLE:
            return f"takes multiples of {MULTIPLE} alone, not {key}={size}"
    return accepts_loss(request) or gpu_refusal(">=8.9")


def before_all(request: Request) -> int:
    """Rank before every other kernel, since the plugin was named for this one."""
    return -2
