"""Tables that are updated by rows, as a trainer on MLX asks of them: pure functions of masters and state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from minillm_core.backends.mlx.model import Arrays
from minillm_core.backends.tables import Tables
from minillm_core.optim.groups import Member

State = Mapping[str, Arrays]
"""Table -> the state of its rows, and what is kept for the whole."""


def rows_of(name: str) -> str:
    """Name the entry of a step's values with the rows of a table that it holds, int32 (S,)."""
    return f"rows.of.{name}"


class MLXTables(Tables):
    """The tables; made of rules by table, the plan, and the framework's ops.

    Masters are name -> float32; ``updates`` is 0-d float32: how many there were.
    """

    def at_first(self) -> dict[str, Arrays]:
        """Return the state of a run's start."""
        return {}

    def taken(
        self, masters: Arrays, state: State, updates: mx.array, given: Mapping[str, Any] | None
    ) -> Arrays:
        """Return rows of the tables, float32, up to date: those of a step, or all where given is None."""
        return {}

    def viewed(
        self, masters: Arrays, state: State, updates: mx.array
    ) -> Iterable[tuple[Member, mx.array, Arrays]]:
        """Bring tables up to date that have a view, one by one: see :func:`minillm_core.optim.views.views_of`."""
        return ()

    def step(
        self,
        masters: Arrays,
        state: State,
        grads: Mapping[str, Any],
        factor: mx.array,
        updates: mx.array,
        given: Mapping[str, Any],
        witness: Callable[[str], None],
    ) -> tuple[Arrays, dict[str, Arrays]]:
        """Return the tables and their state after an update of the step's rows, and of those next in turn.

        Args:
            masters: see the class.
            state: of the tables.
            grads: name -> float32, of tables (S, C).
            factor: 0-d float32, multiplies every gradient.
            updates: this one not included.
            given: values of the step, and its rows by :func:`rows_of`.
            witness: see :func:`minillm_core.optim.update.update`.
        """
        return {}, {}

    def named(self, masters: Arrays, state: State) -> dict[str, mx.array]:
        """Name the state, and the tables as they are, as :meth:`packed` takes them."""
        return {}

    def restored(self, saved: Mapping[str, np.ndarray], old: State) -> dict[str, Arrays]:
        """Read the state of a checkpoint, shaped as the old one.

        Raises:
            KeyError: an entry is missing.
            ValueError: a shape differs.
        """
        return {}
