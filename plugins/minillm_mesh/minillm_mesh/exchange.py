"""The communication of context parallelism: all-gather of keys and values, or all-to-all of heads; pure.

Each of N processes has S / N columns of each row. In an attention of H query heads and K key-value heads of
width D, each process sends

    keys     all-gather of k and v            (N - 1) / N  x  2 K D S elements per row
    heads    all-to-all of q, k, v, then y    (N - 1) / N  x  (2 H + 2 K) D S / N

and the same amount in the backward pass, with a reduce-scatter or all-to-alls. So heads send less where
H + K < N K: never on two processes; on three or more without grouped queries (H = K); on six or more where
four query heads share a key-value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minillm_core import ConfigError, MinillmError, Plan, PlanError
from minillm_core.inspection import decoder

KEYS, HEADS = "keys", "heads"


@dataclass(frozen=True)
class Method:
    """The exchange method of a plan's attention."""

    way: str  # KEYS, HEADS
    note: str = ""  # why not heads, although these would send less


def numbers(way: str, heads: int, kv_heads: int, size: int) -> float:
    """Count the elements sent per attention and column of the whole row, divided by head_dim."""
    return 2 * kv_heads if way == KEYS else 2 * (heads + kv_heads) / size


def chosen(plan: Plan, size: int) -> Method:
    """Choose between keys and heads, by ``mesh.context_exchange``.

    Args:
        plan: the plan.
        size: N.

    Raises:
        PlanError: mesh.context_exchange=heads, and a plugin's function of attention may read all heads.
        ConfigError: mesh.context_exchange=heads, and N does not divide the heads of a layer.
    """
    asked, g = plan.config.mesh.context_exchange, plan.spec.geometry
    why = _hindrance(plan, size) if asked != KEYS and size > 1 else None
    if asked == HEADS and why is not None:
        raise why
    keys, heads = (numbers(way, g.heads, g.kv_heads, size) for way in (KEYS, HEADS))
    if asked == HEADS or (asked == "auto" and heads < keys and why is None):
        return Method(HEADS)
    if asked == KEYS or heads >= keys:
        return Method(KEYS)
    assert why is not None
    return Method(
        KEYS, f"mesh.context_exchange=keys, where heads would send {heads / keys:.2f} x: {why.what}"
    )


def _hindrance(plan: Plan, size: int) -> MinillmError | None:
    """Return the error that prevents an exchange of heads; None: they can be exchanged."""
    model: Any = decoder(plan.spec)
    fix, where = "mesh.context_exchange=keys", "mesh.context_exchange=heads"
    if (tensor := plan.config.mesh.tensor) > 1:
        return ConfigError(
            "each process already has only some of the heads",
            where=f"{where}, mesh.tensor={tensor}",
            fix=fix,
        )
    for layer, spec in plan.spec.attentions.items():
        attention = model.layers[layer].attention
        if spec.core is not None:
            return PlanError(
                f"plugin '{spec.core.owner}' has a function of attention of its own, which may read all heads",
                where=f"{where}, layers.{layer}.attention",
                fix=fix,
            )
        joins = 1 if attention.layout is None else attention.layout.joins
        for kind, leaf in (("query", attention.q), ("key and value", attention.k)):
            count = leaf.out_features // attention.head_dim // joins
            if count % size:
                joined = f", each of {joins}" if joins > 1 else ""
                return ConfigError(
                    f"{size} processes cannot divide the {kind} heads of layer {layer}: {count}{joined}",
                    where=f"{where}, mesh.context={size}",
                    fix=fix,
                )
    return None


__all__ = ["HEADS", "KEYS", "Method", "chosen", "numbers"]
