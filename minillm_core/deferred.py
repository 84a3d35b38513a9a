"""Arrays whose numbers are read or drawn when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Deferred:
    """An array that is not in memory: ``one[first:last]`` makes some of its rows, ``np.asarray(one)`` all of it.

    ``rows`` makes them, (n, *shape[1:]), of the number of the first and n; a scalar is made as (1,).
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: Callable[[int, int], np.ndarray]

    def __getitem__(self, which: slice) -> np.ndarray:
        """Make the rows of a slice without a step."""
        first, last, _ = which.indices(self.shape[0])
        return self.rows(first, max(0, last - first))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Make all of it."""
        return self.rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)
