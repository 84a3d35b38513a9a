"""The interface of tables that are updated by rows, for the trainer on MLX: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx

from minillm_core.backends.mlx.model import Arrays
from minillm_core.backends.tables import Tables
from minillm_core.optim.groups import Member

State = Mapping[str, Arrays]
"""Table -> the state of its rows, and of the whole table."""


class MLXTables(Tables):
    """The tables, constructed from the rules by table, the plan, and the framework's ops.

    Masters are name -> float32; ``updates`` is 0-d float32: the number of updates so far.
    """

    def initial_state(self) -> dict[str, Arrays]:
        """Return the initial state."""
        return {}

    def gather_rows(
        self, masters: Arrays, state: State, updates: mx.array, given: Mapping[str, Any] | None
    ) -> Arrays:
        """Return rows of the tables, float32, up to date: those of a step, or all if ``given`` is None."""
        return {}

    def view_inputs(
        self, masters: Arrays, state: State, updates: mx.array
    ) -> Iterable[tuple[Member, mx.array, Arrays]]:
        """Yield tables that have a view, up to date, one by one: see :func:`minillm_core.optim.views.views_of`."""
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
        """Return the tables and their state after an update of the step's rows and of ``RowRule.in_turn``.

        Args:
            masters: see the class.
            state: the state of the tables.
            grads: name -> float32 gradient, of tables (S, C).
            factor: 0-d float32, multiplies every gradient.
            updates: the number of updates, without this one.
            given: the step's values, and its rows by :func:`~minillm_core.backends.tables.rows_of`.
            witness: see :func:`minillm_core.optim.update.update`.
        """
        return {}, {}

    def named(self, masters: Arrays, state: State) -> dict[str, mx.array]:
        """Return the state and the tables as they are stored, by name, for :meth:`packed`."""
        return {}

    def key(self, entry: str, name: str) -> str:
        """Return the name in a checkpoint of an entry of a table's state."""
        return f"rows.{entry}.{name}"
