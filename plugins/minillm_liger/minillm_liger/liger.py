"""Liger's Triton kernels (Hsu et al., arXiv:2410.10989) as candidates for minillm's ops.

The loss does not materialise the logits: it computes head, softmax and both gradients chunk by chunk,
0.1 GiB where 65,536 positions of 50,304 logits take 6. The other three save launches and memory in eager mode;
a compiled step fuses those ops itself, and the kernels' verdicts state this.
"""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import Candidate, Plugin, option
from minillm_liger import requests

__all__ = ["Liger"]

LIGER = "liger-kernel>=0.8.5,<0.9"  # the signatures of its functions change
Wanted = Literal["auto"] | bool


class Liger(Plugin, api=1, backends=("torch",), devices=("cuda",)):
    """Fused linear cross-entropy, RMSNorm, RoPE and SwiGLU by Liger's Triton kernels."""

    loss: Wanted = option(
        True, help="linear cross-entropy; true: required, auto: used where it applies"
    )
    rms_norm: Wanted = option("auto", help="RMSNorm; same values as loss")
    rope: Wanted = option("auto", help="rotary position embedding; same values as loss")
    swiglu: Wanted = option("auto", help="SwiGLU; same values as loss")

    def kernel_provider(self, kernels: Any) -> None:
        offers = (
            ("loss", "linear_cross_entropy", requests.loss, requests.first),
            ("rms_norm", "rms_norm", requests.eager, requests.eager_rank),
            ("rope", "rotate", requests.eager, requests.eager_rank),
            ("swiglu", "swiglu", requests.eager, requests.eager_rank),
        )
        for field, op, accepts, rank in offers:
            wanted = getattr(self, field)
            if wanted is False:
                continue
            kernels.candidate(
                Candidate(
                    op,
                    "liger",
                    ("torch",),
                    f"minillm_liger.kernels.{field}:{op}",
                    devices=("cuda",),
                    accepts=accepts,
                    rank=rank,
                    requires=(LIGER,),
                    disable_option=f"{field}=false" if wanted is True else "",
                    provider="minillm-liger",
                )
            )
