"""Arrays whose values are read or drawn on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Deferred:
    """An array that is not in memory: ``one[first:last]`` computes some rows, ``np.asarray(one)`` the whole array.

    ``rows(first, n)`` returns n rows, (n, *shape[1:]); a scalar is returned as (1,).
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: Callable[[int, int], np.ndarray]

    def __getitem__(self, which: slice) -> np.ndarray:
        """Return the rows of a slice without a step."""
        first, last, _ = which.indices(self.shape[0])
        return self.rows(first, max(0, last - first))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the whole array."""
        return self.rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)
