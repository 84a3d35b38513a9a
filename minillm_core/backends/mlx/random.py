"""MLX's global random key: the core does not draw from it, a plugin's native module may.

The key belongs to a thread, and MLX splits it on every random call without a key: it has to be an input
and an output of a compiled step, or the step draws the same numbers every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

NAME = "random.mlx"


def seed(number: int) -> None:
    """Seed the key with a run's seed."""
    mx.random.seed(number % 2**64)


def key() -> mx.array:
    """Return the current key, uint32 (2,)."""
    state: Any = mx.random.state
    return state[0]


def restore(key: mx.array | np.ndarray) -> None:
    """Set the key; waits."""
    high, low = np.array(key).tolist()
    mx.random.seed(high << 32 | low)  # a key is its seed's two halves


def load(saved: Mapping[str, np.ndarray]) -> None:
    """Restore the key from ``random.mlx``; keep it unchanged if that is missing.

    Raises:
        ValueError: the array is not a key.
    """
    if (array := saved.get(NAME)) is not None:
        if array.shape != (2,) or array.dtype != np.uint32:
            raise ValueError(f"{NAME}: {array.dtype} {array.shape}, not uint32 (2,)")
        restore(array)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the key on exit, so that numbers drawn inside do not affect training."""
    before = key()
    try:
        yield
    finally:
        restore(before)
