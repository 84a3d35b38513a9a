"""Functions common to Adam-like rules: bias-corrected running means."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["ADAMS_LR", "unbiased"]

ADAMS_LR = 1.5e-3
"""The peak learning rate of rules with updates as large as AdamW's: that of the preset small."""


def unbiased(ops: Any, mean: Any, beta: float, updates: Any) -> Any:
    """Divide a running mean that started at 0 by 1 - beta^t, its bias correction.

    Args:
        ops: the framework's.
        mean: (N, ...).
        beta: its decay rate.
        updates: t. A rule whose beta2 is far above its beta1 counts its own updates, (N, 1, ...): in a branch of a
            run with another rule its means start at 0, and those of the run are many. Without the correction the
            root of the mean of squares is too small by more than the mean of gradients, and updates are too large.
    """
    return mean / (1 - ops.exp(updates * math.log(beta))) if beta else mean
