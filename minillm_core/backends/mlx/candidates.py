"""The core's kernels on MLX, in order of preference. Imports no framework: a plan may ask."""

from __future__ import annotations

from typing import Any

from minillm_core.ops.form import LossForm
from minillm_core.ops.select import Candidate, Request

__all__ = ["CANDIDATES"]

LARGE = 2**31  # bytes of logits in the compute dtype, from which chunks are worth their launches
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def _fused_loss(request: Request) -> str | None:
    """mx.fast.cross_entropy: one target, empty form."""
    form: LossForm = request.facts.get("form", LossForm())
    targets = request.facts.get("targets", 1)
    if request.device == "cpu" and request.dtype != "float32":
        return f"sums in {request.dtype} on a CPU"
    if targets != 1:
        return f"takes one target, not {targets}"
    if not form.empty:
        return f"does not know the form's {', '.join(form.named)}"
    return None


def _if_large(request: Request) -> int:
    """Chunks come first where the logits are large, last where a few chunks would hold them."""
    rows, vocab = (request.facts.get(fact, 0) for fact in ("rows", "vocab"))
    return -1 if rows * vocab * ITEMSIZE[request.dtype] > LARGE else 1


def _fast_rope(request: Request) -> str | None:
    """mx.fast.rope: positions 0 .. T-1, angles as products in float32."""
    positions = request.facts.get("positions")
    if positions is not None:
        return f"counts positions from 0, and here each {positions} has its own"
    if request.dtype == "float32":
        return "its angles are outside float32's tolerance"
    return None


def _core(op: str, name: str, reference: str, **more: Any) -> Candidate:
    return Candidate(op, name, ("mlx",), f"minillm_core.backends.mlx.{reference}", **more)


CANDIDATES: tuple[Candidate, ...] = (
    _core("linear", "matmul", "ops:linear", plain=True),
    _core("embedding", "gather", "ops:embedding", plain=True),
    _core("rms_norm", "fused", "kernels.norm:fused"),
    _core("rms_norm", "composed", "kernels.norm:composed", plain=True),
    _core(
        "rotate",
        "fast",
        "kernels.rotary:fast",
        devices=("metal", "cuda"),  # on a CPU it is composed as well
        accepts=_fast_rope,
    ),
    _core("rotate", "table", "kernels.rotary:from_table", plain=True),
    _core("attention", "sdpa", "kernels.attention:sdpa"),
    _core("attention", "composed", "kernels.attention:composed", plain=True),
    _core("swiglu", "composed", "ops:swiglu", plain=True),
    _core("logits", "matmul", "ops:logits", plain=True),
    _core("linear_cross_entropy", "chunked", "kernels.loss:chunked", rank=_if_large),
    _core("linear_cross_entropy", "fused", "kernels.loss:fused", accepts=_fused_loss),
    _core("linear_cross_entropy", "dense", "kernels.loss:dense", plain=True),
)
