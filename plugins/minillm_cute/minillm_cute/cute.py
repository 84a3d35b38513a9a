"""CuTe kernels for NVIDIA's Hopper as candidates for minillm's ops: FlashAttention-4's attention and QuACK's loss.

FlashAttention-4 (Dao et al.; Shah et al., arXiv:2407.08608, for Hopper) skips the keys outside a window, and
packs documents end to end, where FlexAttention masks blocks of them. QuACK's linear cross-entropy keeps
exponentials of logits instead of logits, so that no pass over a chunk is left between its three products. With a
softcap, which bounds them, minillm's own form of it by QuACK's products and cuBLAS's needs half the memory.
"""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import (
    Candidate,
    LossForm,
    Plugin,
    Request,
    SigmoidCap,
    TanhCap,
    gpu_refusal,
    option,
)

__all__ = ["Cute"]

FLASH = "flash-attn-4==4.0.0b36"
QUACK = "quack-kernels==0.6.5"
HOPPER = "==9.0"  # compute capability
# Its gradients are wrong, on Hopper, for heads that it pads to no multiple of 32 (of 16 features: tried;
# flash-attention's pull request 2896). These were compared with the reference.
HEADS = (32, 64, 128)
HIGHEST = 64.0  # softcap: the sum of a vocabulary's exponentials is finite in float32
Wanted = Literal["auto"] | bool


class Cute(Plugin, api=1, backends=("torch",), devices=("cuda",)):
    """Attention by FlashAttention-4 and linear cross-entropy by QuACK, on Hopper GPUs."""

    attention: Wanted = option(True, help="attention; true: required, auto: used where it applies")
    loss: Wanted = option("auto", help="linear cross-entropy; same values as attention")
    gram: Wanted = option(
        "auto", help="symmetric products of Muon and Polar Express; same values as attention"
    )

    def kernel_provider(self, kernels: Any) -> None:
        offers = (
            ("attention", "attention", "fa4", accepts_attention, attention_rank, FLASH),
            ("loss", "linear_cross_entropy", "quack", accepts_loss, loss_rank, QUACK),
            ("gram", "gram", "quack", accepts_gram, gram_rank, QUACK),
        )
        for field, op, name, accepts, rank, distribution in offers:
            wanted = getattr(self, field)
            if wanted is False:
                continue
            kernels.candidate(
                Candidate(
                    op,
                    name,
                    ("torch",),
                    f"minillm_cute.kernels.{field}:{op}",
                    devices=("cuda",),
                    accepts=accepts,
                    rank=required if wanted is True else rank,
                    host_masks=op == "attention",
                    requires=(distribution,),
                    disable_option=f"{field}=false" if wanted is True else "",
                    provider="minillm-cute",
                )
            )


def required(request: Request) -> int:
    """Rank before every other kernel."""
    return -3


def accepts_attention(request: Request) -> str | None:
    """Accept windows that are known on the host, and documents whose tokens are adjacent, on Hopper GPUs."""
    head_dim = request.facts.get("head_dim", HEADS[-1])
    if request.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 or float16, not in {request.dtype}"
    if head_dim not in HEADS:
        return f"takes heads of 32, 64 or 128 features, for which its gradients are right, not {head_dim}"
    if request.facts.get("window") == "dynamic":
        return "reads its window on the host, but this one is computed on the GPU"
    if not request.facts.get("adjacent", True):
        return "takes documents whose tokens are adjacent"
    return gpu_refusal(HOPPER)


def attention_rank(request: Request) -> int:
    """Rank before FlexAttention, whose rank with a window or documents is -1."""
    return -2


def accepts_loss(request: Request) -> str | None:
    """Accept one target, plain or with a softcap, on Hopper GPUs."""
    form: LossForm = request.facts.get("form", LossForm())
    targets = request.facts.get("targets", 1)
    width, vocab = (request.facts.get(fact, 128) for fact in ("width", "vocab"))
    if request.dtype != "bfloat16":
        return f"computes in bfloat16, not in {request.dtype}"
    if targets != 1:
        return f"takes one target, not {targets}"
    known = ("cap", "scale") if isinstance(form.cap, TanhCap | SigmoidCap) else ()
    if other := [name for name in form.named if name not in known]:
        return f"does not know the form's {', '.join(other)}"
    if (bound := _bound(form)) > HIGHEST:
        return f"takes softcaps of at most {HIGHEST:g}, not {bound:g}"
    if request.facts.get("weights") == "position":
        return "does not take a weight per position"
    if vocab % 128:
        return f"takes vocabularies that are multiples of 128, not {vocab}"
    if width % 8:
        return f"takes widths that are multiples of 8, not {width}"
    return gpu_refusal(HOPPER)


def _bound(form: LossForm) -> float:
    """Return the largest absolute value of a capped logit; 0 without a softcap."""
    if isinstance(form.cap, TanhCap):
        return abs(form.cap.cap)
    return abs(form.cap.a) if isinstance(form.cap, SigmoidCap) else 0.0


def accepts_gram(request: Request) -> str | None:
    """Accept any matrices, if an update rule multiplies some, on Hopper GPUs."""
    if not request.facts.get("matrices", True):
        return "no rule of the optimizer takes whole matrices, as muon does"
    return gpu_refusal(HOPPER)


def gram_rank(request: Request) -> int:
    """Rank behind minillm's Triton kernel, which may be named for this alone, and before the core's.

    Muon's update of gpt2-124m takes 3.85 ms with it and 4.38 with cuBLAS, and with that 4.09 on another day.
    """
    return 0


def loss_rank(request: Request) -> int:
    """Rank before minillm's Triton kernel, whose rank is 0: 25 ms for 65,536 positions instead of 29.

    With a softcap behind it and the core's, so that it is used only if it is named: 26.9 ms in half of the memory,
    but no whole run with it is measured yet.
    """
    form: LossForm = request.facts.get("form", LossForm())
    return 1 if form.cap else -1
