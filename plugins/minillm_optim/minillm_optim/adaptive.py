"""Functions common to Adam-like rules: bias-corrected running means."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["ADAMS_LR", "unbiased"]

ADAMS_LR = 1.5e-3
"""The peak learning rate of rules with updates as large as AdamW's: that of the preset small."""


def unbiased(ops: Any, mean: Any, beta: float, updates: Any) -> Any:
    """Divide a running mean that started at 0 by 1 - beta^t, its bias correction."""
    return mean / (1 - ops.exp(updates * math.log(beta))) if beta else mean
