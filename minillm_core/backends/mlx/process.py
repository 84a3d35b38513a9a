"""What MLX has once a process."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from minillm_core.backends.mlx.random import key

__all__ = ["process_state"]


def process_state() -> dict[str, Any]:
    """Name -> value, as MLX's own functions give it; the key is this thread's."""
    device = mx.default_device()
    return {
        "mlx's default device": str(device),
        "mlx's default stream": str(mx.default_stream(device)),
        "mlx's generator": tuple(np.array(key()).tolist()),
    }
