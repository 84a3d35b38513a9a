"""Arrays whose numbers are read or drawn when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Deferred:
    """An array that is not in memory: ``one[first:last]`` makes some of its rows, ``np.asarray(one)`` all of it.

    Args:
        shape: its shape.
        dtype: of its numbers.
        rows: makes rows, (n, *shape[1:]), of the first of them and n; () has one row, of shape (1,).
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        rows: Callable[[int, int], np.ndarray],
    ) -> None:
        self.shape, self.dtype, self.rows = tuple(shape), dtype, rows

    def __getitem__(self, which: slice) -> np.ndarray:
        """Make the rows of a slice without a step."""
        first, last, _ = which.indices(self.shape[0])
        return self.rows(first, max(0, last - first))

    def __len__(self) -> int:
        """Count its rows."""
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Make all of it."""
        return self.rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)
