"""AdamW (arXiv:1711.05101) as stages: moments with bias correction, decoupled weight decay, write.

Weight decay is added to the update, and the learning rate scales both at the end:
p <- p - lr (m^ / (sqrt(v^) + eps) + wd p).
"""

from __future__ import annotations

import math
from typing import Any


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
) -> tuple[Any, dict[str, Any]]:
    """Compute m^ / (sqrt(v^) + eps) of the gradient; moments in float32, ``updates`` counted from 1."""
    m = state["m"] * beta1 + update * (1 - beta1)
    v = state["v"] * beta2 + ops.square(update) * (1 - beta2)
    m_hat = m / (1 - ops.exp(updates * math.log(beta1)) if beta1 else 1.0)
    v_hat = v / (1 - ops.exp(updates * math.log(beta2)) if beta2 else 1.0)
    return m_hat / (ops.sqrt(v_hat) + epsilon), {"m": m, "v": v}


def decay(
    ops: Any, update: Any, param: Any, state: dict[str, Any], *, weight_decay: float, wd_mul: Any
) -> tuple[Any, dict[str, Any]]:
    """Add decoupled weight decay to the update."""
    return update + param * (weight_decay * wd_mul), state


def write(
    ops: Any, update: Any, param: Any, state: dict[str, Any], *, lr: Any, lr_mul: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the new parameter: the old one minus the learning rate times the update."""
    return param - update * (lr * lr_mul), state
