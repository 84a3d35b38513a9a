"""Requests that Liger's kernels support, and the reasons for others. Imports neither torch nor Liger."""

from __future__ import annotations

from minillm_core import LossForm, Request, TanhCap

__all__ = ["eager", "eager_rank", "first", "loss"]


def loss(request: Request) -> str | None:
    """Accept one target, and logits without a cap or with tanh."""
    form: LossForm = request.facts.get("form", LossForm())
    targets = request.facts.get("targets", 1)
    if targets != 1:
        return f"takes one target, not {targets}"
    if form.cap is not None and not isinstance(form.cap, TanhCap):
        return f"caps logits by a tanh, not by {form.cap}"
    if request.dtype == "float16":
        return "sums the weight's gradient unscaled, which leaves float16's range"
    return None


def eager(request: Request) -> str | None:
    """Accept every request; the rank depends on compilation."""
    if request.compiled:
        return "the compiled step fuses this op into its neighbours; a separate kernel would not"
    return None


def first(request: Request) -> int:
    """Rank before the core's kernels."""
    return 0


def eager_rank(request: Request) -> int:
    """Rank first in eager mode. A compiled step prefers its own: strict does not require these kernels there."""
    return 1 if request.compiled else 0
