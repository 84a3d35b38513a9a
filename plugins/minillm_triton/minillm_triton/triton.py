"""minillm's Triton kernels (Tillet et al., 2019) as candidates for its ops, on NVIDIA GPUs."""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import Candidate, Plugin, Request, option

__all__ = ["Triton"]

MOST_TARGETS = 8  # each is one more comparison per logit
Wanted = Literal["auto"] | bool


class Triton(Plugin, api=1, backends=("torch",), devices=("cuda",)):
    """Linear cross-entropy in chunks that share one buffer; Muon's symmetric products at half the work."""

    loss: Wanted = option(
        True, help="linear cross-entropy; true: required, auto: used where it applies"
    )
    gram: Wanted = option(
        "auto", help="symmetric products of Muon and Polar Express; same values as loss"
    )

    def kernel_provider(self, kernels: Any) -> None:
        offers = (
            ("loss", "linear_cross_entropy", accepts_loss, first),
            ("gram", "gram", accepts_gram, before_quack),
        )
        for field, op, accepts, rank in offers:
            wanted = getattr(self, field)
            if wanted is False:
                continue
            kernels.candidate(
                Candidate(
                    op,
                    "triton",
                    ("torch",),
                    f"minillm_triton.kernels.{field}:{op}",
                    devices=("cuda",),
                    accepts=accepts,
                    rank=rank,
                    requires=("triton>=3.4",),
                    disable_option=f"{field}=false" if wanted is True else "",
                    provider="minillm-triton",
                )
            )


def accepts_loss(request: Request) -> str | None:
    """Accept every form, and up to eight targets."""
    targets = request.facts.get("targets", 1)
    if targets > MOST_TARGETS:
        return f"compares each logit with {MOST_TARGETS} targets at most, not {targets}"
    if request.dtype == "float16":
        return (
            "would store the gradient of the logits in float16, where it can overflow or underflow"
        )
    return None


def accepts_gram(request: Request) -> str | None:
    """Accept any matrices, if an update rule multiplies some."""
    if not request.facts.get("matrices", True):
        return "no rule of the optimizer takes whole matrices, as muon does"
    return None


def before_quack(request: Request) -> int:
    """Rank before QuACK's kernel in minillm-cute: with ``triton.loss=false``, ``triton`` is named for this alone."""
    return -1


def first(request: Request) -> int:
    """Rank before the core's kernels."""
    return 0
