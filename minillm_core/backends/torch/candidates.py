"""The core's kernels on torch, in order of preference. Imports no framework: a plan may ask."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from minillm_core.ops.form import LossForm
from minillm_core.ops.select import Candidate, Request

__all__ = ["CANDIDATES"]

FIRST_WITH_LINEAR_CROSS_ENTROPY = Version("2.13")
LEAST_HEAD = 16  # features that FlexAttention's products need


def _native_loss(request: Request) -> str | None:
    """F.linear_cross_entropy: eager, one target, empty form."""
    form: LossForm = request.facts.get("form", LossForm())
    targets = request.facts.get("targets", 1)
    try:
        installed = Version(version("torch"))
    except PackageNotFoundError:
        return "torch is not installed"
    if installed < FIRST_WITH_LINEAR_CROSS_ENTROPY:
        return f"torch {installed} has no F.linear_cross_entropy; 2.13 has"
    if request.compiled:
        return "does not trace under torch.compile(fullgraph=True)"
    if targets != 1:
        return f"takes one target, not {targets}"
    if not form.empty:
        return f"does not know the form's {', '.join(form.named)}"
    if request.facts.get("weights") == "position":
        return "does not take a weight per position"
    return None


def _blocks(request: Request) -> str | None:
    """FlexAttention: where there is a window, documents or both to skip blocks by."""
    window, head_dim = request.facts.get("window"), request.facts.get("head_dim", LEAST_HEAD)
    if not _masked(request):
        return "plainly causal: no blocks to skip but those that sdpa skips"
    if window == "dynamic":
        return "takes windows that are constant or staged, not one that changes from step to step"
    if head_dim < LEAST_HEAD:
        return f"takes heads of {LEAST_HEAD} features or more, not {head_dim}"
    return None


def _masked(request: Request) -> bool:
    return bool(request.facts.get("window") or request.facts.get("documents"))


def _if_masked(request: Request) -> int:
    """Blocks come first where there is a window or documents, and last elsewhere."""
    return -1 if _masked(request) else 1


def _core(op: str, name: str, reference: str, **more: Any) -> Candidate:
    return Candidate(op, name, ("torch",), f"minillm_core.backends.torch.{reference}", **more)


CANDIDATES: tuple[Candidate, ...] = (
    _core("linear", "matmul", "ops:linear", plain=True),
    _core("embedding", "gather", "ops:embedding", plain=True),
    _core("rms_norm", "fused", "kernels.norm:fused"),
    _core("rms_norm", "composed", "kernels.norm:composed", plain=True),
    _core("rotate", "table", "kernels.rotary:rotate", plain=True),
    _core("attention", "sdpa", "kernels.attention:sdpa"),
    _core("attention", "composed", "kernels.attention:composed", plain=True),
    _core(
        "attention",
        "flex",
        "kernels.blocks:flex",
        devices=("cuda",),
        accepts=_blocks,
        rank=_if_masked,
    ),
    _core("swiglu", "composed", "ops:swiglu", plain=True),
    _core("logits", "matmul", "ops:logits", plain=True),
    _core("linear_cross_entropy", "chunked", "kernels.loss:chunked"),
    _core("linear_cross_entropy", "dense", "kernels.loss:dense", plain=True),
    _core("linear_cross_entropy", "torch", "kernels.loss:native", accepts=_native_loss),
)
