"""Tables updated by rows, of which a step holds only the rows it reads: the interface and its entry points.

Entry points of the group ``minillm.tables``: the name is a backend's, the value a class with the methods of
the backend's subclass of :class:`Tables`, constructed with the rules by table, the plan, and the trainer's own
arguments.
A plan without such tables imports nothing: it uses these classes, whose methods do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minillm_core.backends.base import Batch
from minillm_core.optim.rows import rules_of
from minillm_core.plan import Plan
from minillm_core.plugins.provided import required

GROUP = "minillm.tables"


def rows_of(name: str) -> str:
    """Return the name of the entry in a step's values with the rows of a table that it holds, int32 (S,)."""
    return f"rows.of.{name}"


class Tables:
    """The tables that are updated by rows; this base class has none."""

    def rows_read(self, micro: Sequence[Batch]) -> tuple[Sequence[Batch], dict[str, np.ndarray]]:
        """Find the rows that a step reads.

        Args:
            micro: the step's micro-batches.

        Returns:
            The micro-batches, each with the positions of its ids among the step's rows, int32 (B, T);
            and the rows by table, int32 (S,), sorted and distinct.
        """
        return micro, {}

    def packed(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert a snapshot's tables to checkpoint form: up to date, plus data to restore the same bits."""
        return arrays

    def unpacked(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Invert :meth:`packed`: ``model.<name>`` is then the table as on the device."""
        return arrays


def tables_of(plan: Plan, backend: str, none: type[Tables], *of: Any) -> Any:
    """Create the tables of a plan, with the backend's arguments ``of``; ``none`` is its class for no tables.

    Raises:
        BackendError: no installed distribution provides the backend's class.
        PluginError: several do.
    """
    if not plan.by_rows:
        return none()
    made = required(GROUP, backend, f"updating tables by rows on {backend}")
    return made(rules_of(plan), plan, *of)
