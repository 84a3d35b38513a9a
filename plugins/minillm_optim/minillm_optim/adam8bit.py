"""AdamW with moments stored in 8 bits between updates (arXiv:2110.02861), or in 16.

    m <- beta1 m + (1 - beta1) g             v <- beta2 v + (1 - beta2) g^2
    u  = m^ / (sqrt(v^) + epsilon)           m^, v^: divided by 1 - beta^t

are computed in float32; m and sqrt(v) are stored in one byte per number, plus four per 256 numbers, so that
AdamW's state takes 2.03 bytes per weight instead of 8. The code is not the paper's table but follows the
fourth power (``like:int8``), and the root of v is stored, whose exponent range is half as wide.
Learning rate, betas and decay are those of the run's AdamW, and so are the parameters: those without
another rule. torch's fused kernel supports float32 state only and is not used.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from minillm_core import INHERITED, Plugin, option, stage

__all__ = ["Adam8bit", "adam"]


class Adam8bit(Plugin, api=1):
    """AdamW with both moments in 8 bits, in blocks of 256 with one scale each."""

    moments: Literal["int8", "bfloat16"] = option(
        "int8", help="storage format of the moments: int8 with scales, or bfloat16"
    )

    def optimizer_factory(self, optimizer):
        kind = f"like:{self.moments}"
        same = dict.fromkeys(("beta1", "beta2", "epsilon"), INHERITED)
        optimizer.extend("adamw", "precondition", stage(adam, state={"m": kind, "r": kind}, **same))


def adam(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    updates: Any,
) -> Any:
    """Compute Adam's update, and the new m and r, the root of v, all (...)."""
    m = state["m"] * beta1 + update * (1 - beta1)
    v = ops.square(state["r"]) * beta2 + ops.square(update) * (1 - beta2)
    m_hat = m / (1 - ops.exp(updates * math.log(beta1)) if beta1 else 1.0)
    v_hat = v / (1 - ops.exp(updates * math.log(beta2)) if beta2 else 1.0)
    return m_hat / (ops.sqrt(v_hat) + epsilon), {"m": m, "r": ops.sqrt(v)}
