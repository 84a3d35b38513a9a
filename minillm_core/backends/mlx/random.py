"""MLX's own key: nothing of the core draws from it, a plugin's native module may.

It belongs to a thread, and MLX splits it wherever random numbers are asked for without a key: a
compiled step has to take it in and give it back, or it draws the same numbers every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

NAME = "random.mlx"


def seed(number: int) -> None:
    """Seed the key by a run's seed."""
    mx.random.seed(number % 2**64)


def key() -> mx.array:
    """Return the key as it is now, uint32 (2,)."""
    state: Any = mx.random.state
    return state[0]


def restore(key: mx.array | np.ndarray) -> None:
    """Set the key; waits."""
    high, low = np.array(key).tolist()
    mx.random.seed(high << 32 | low)  # a key is its seed's two halves


def load(saved: Mapping[str, np.ndarray]) -> None:
    """Restore ``random.mlx``; where there is none, the key stays.

    Raises:
        ValueError: it is no key.
    """
    if (array := saved.get(NAME)) is not None:
        if array.shape != (2,) or array.dtype != np.uint32:
            raise ValueError(f"{NAME}: {array.dtype} {array.shape}, not uint32 (2,)")
        restore(array)


@contextmanager
def kept() -> Iterator[None]:
    """Keep the key: numbers drawn inside change none that training draws."""
    before = key()
    try:
        yield
    finally:
        restore(before)
