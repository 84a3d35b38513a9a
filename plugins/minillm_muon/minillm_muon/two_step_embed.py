"""Two-step embedding: embedding and head are updated every other step (modded-nanogpt, record 39).

    in steps 1, 3, 5 ...    s <- s + g
    in steps 2, 4, 6 ...    AdamW's update by s + g, then s <- 0

so that they learn from batches of twice the tokens while Muon's matrices learn from each: an embedding row
occurs in few tokens, and its update moves the most memory. The record's Adam changed its betas to 0.7 and 0.95,
from 0.8 before (``role_lr.betas``), and its batch to two thirds.

Learning rate, betas, epsilon and decay are those of the run's AdamW, which counts its own updates, half as many.
Each step's gradient is clipped by that step's global norm; a step skipped for NaN or infinity adds
nothing. The state has one more number per weight: s.
"""

from __future__ import annotations

import math
from typing import Any

from minillm_core import Plugin, option, scheduled, stage

__all__ = ["TwoStepEmbed", "adam_of_two", "write_second"]


class TwoStepEmbed(Plugin, api=1):
    """Embedding and head are updated every second step, with the gradients of two steps."""

    roles: tuple[str, ...] = option(
        ("embedding.token", "head"),
        min_length=1,
        help='roles of the parameters it applies to; "embedding" includes plugins\' tables',
    )

    def optimizer_factory(self, optimizer):
        rate, (beta1, beta2) = scheduled(optimizer.lr), optimizer.betas
        adam = stage(
            adam_of_two,
            state={"sum": "like", "m": "like", "v": "like", "count": "scalar"},
            every=2,
            beta1=beta1,
            beta2=beta2,
            epsilon=optimizer.epsilon,
        )
        write = stage(write_second, every=2, lr=rate)
        optimizer.rule("two_step", lr=rate, precondition=adam, write=write)
        optimizer.assign("two_step", lambda _, p: _among(p.role, self.roles))


def _among(role: str, roles: tuple[str, ...]) -> bool:
    """Return whether a role is one of these, or below one."""
    return any(f"{role}.".startswith(f"{one}.") for one in roles)


def adam_of_two(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    due: bool,
) -> Any:
    """Compute Adam's update by two gradients; if due, store the first; update, sum, m, v (...), count (1, ...)."""
    total = state["sum"] + update
    if due:  # stages with ``every`` are due in the first step of each pair
        return update, state | {"sum": total}
    count = state["count"] + 1.0
    m = state["m"] * beta1 + total * (1 - beta1)
    v = state["v"] * beta2 + ops.square(total) * (1 - beta2)
    m_hat = m / (1 - ops.exp(count * math.log(beta1)) if beta1 else 1.0)
    v_hat = v / (1 - ops.exp(count * math.log(beta2)) if beta2 else 1.0)
    made = m_hat / (ops.sqrt(v_hat) + epsilon)
    return made, {"sum": ops.zeros_like(total), "m": m, "v": v, "count": count}


def write_second(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    lr: Any,
    lr_mul: Any,
    due: bool,
) -> Any:
    """Return the parameter (...), moved in the second step of each pair."""
    return (param if due else param - update * (lr * lr_mul)), state
