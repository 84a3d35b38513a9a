"""Which requests Liger's kernels serve, and why not the others. Imports neither torch nor Liger."""

from __future__ import annotations

from minillm_core import LossForm, Request, TanhCap

__all__ = ["eager", "eager_rank", "first", "loss"]


def loss(request: Request) -> str | None:
    """Accept one target; logits as they are or under a tanh."""
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
    """Rank the kernel first where nothing else fuses the op."""
    if request.compiled:
        return "the compiled step fuses this op into its neighbours; a kernel apart would not"
    return None


def first(request: Request) -> int:
    """Before the core's kernels."""
    return 0


def eager_rank(request: Request) -> int:
    """First in eager mode. A compiled step prefers its own: strict does not ask for these there."""
    return 1 if request.compiled else 0
