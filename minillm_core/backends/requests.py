"""What a plan asks of each op, once it is known where it will run."""

from __future__ import annotations

from typing import Any

from minillm_core.nn.attention import AttentionSpec
from minillm_core.nn.value import Setting
from minillm_core.ops.select import Request
from minillm_core.plan import Plan

__all__ = ["requests_of"]


def requests_of(
    plan: Plan, *, backend: str, device: str, dtype: str, compiled: bool
) -> tuple[Request, ...]:
    """One request an op, with the facts of the layer that asks the most.

    Args:
        plan: the plan.
        backend: torch, mlx or numpy.
        device: its kind: cpu, cuda, mps, metal.
        dtype: compute dtype.
        compiled: whether the step is.
    """
    facts: dict[str, dict[str, Any]] = {
        "linear": {},
        "embedding": {},
        "rms_norm": {},
        "rotate": {"positions": _positions(plan)},
        "attention": _attention(plan),
        "swiglu": {},
        "logits": {},  # of generation
        "linear_cross_entropy": _loss(plan),
    }
    return tuple(Request(op, backend, device, dtype, compiled, its) for op, its in facts.items())


def _specs(plan: Plan) -> list[AttentionSpec]:
    return [b.attention for b in plan.spec.blocks if isinstance(b.attention, AttentionSpec)]


def _positions(plan: Plan) -> str | None:
    return "batch" if any(spec.rope.positions for spec in _specs(plan)) else None


def _attention(plan: Plan) -> dict[str, Any]:
    geometry, specs = plan.spec.geometry, _specs(plan)
    windows = {_window(plan, spec.window) for spec in specs if spec.window is not None}
    return {
        "window": min(windows, default=None),  # dynamic, where a layer has one
        "documents": any(spec.documents is not None for spec in specs),
        "grouped": geometry.kv_heads != geometry.heads,
        "head_dim": geometry.head_dim,
        "length": geometry.positions,
    }


def _window(plan: Plan, window: Setting) -> str:
    """A staged window is as static as a constant: each stage has a step of its own."""
    return "static" if window.value is None or window.value in plan.staged else "dynamic"


def _loss(plan: Plan) -> dict[str, Any]:
    loss, train = plan.spec.loss, plan.config.train
    weights = "target" if loss.targets else None
    return {
        "targets": 1 + len(loss.targets),
        "form": loss.form,
        "weights": "position" if plan.on_batch else weights,  # on_batch may add them to a batch
        "rows": train.rows * train.seq_len,
        "width": plan.config.model.dim,
        "vocab": plan.config.model.vocab,
    }
