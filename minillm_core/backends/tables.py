"""The seam of tables of which a step holds the rows that it sees: what a trainer asks, and who answers.

Entry points of the group ``minillm.tables``: the name is a backend's, the value a class with the methods of
:class:`Tables` and of the backend's own kind of it, made of rules by table, the plan, and what the trainer
hands in. A plan that has no such tables imports nothing: these classes themselves are of such a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minillm_core.backends.base import Batch
from minillm_core.backends.ranks import brought
from minillm_core.optim.rows import rules_of
from minillm_core.plan import Plan

GROUP, FIRST_PARTY = "minillm.tables", "minillm-modded"


class Tables:
    """The tables that are updated by rows."""

    def seen(self, micro: Sequence[Batch]) -> tuple[Sequence[Batch], dict[str, np.ndarray]]:
        """Find the rows that a step sees.

        Args:
            micro: the step's micro-batches.

        Returns:
            The micro-batches, each with the places of its ids among those rows, int32 (B, T); and the
            rows by table, int32 (S,), sorted and distinct.
        """
        return micro, {}

    def packed(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Write a snapshot's tables as a checkpoint has them: up to date, and what makes them the old bits."""
        return arrays

    def unpacked(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Read what :meth:`packed` wrote: ``model.<name>`` is the table as it lies on the device."""
        return arrays


def tables_of(plan: Plan, backend: str, none: type[Tables], *of: Any) -> Any:
    """Make the tables of a plan; ``of`` is what the backend hands in, ``none`` its class of a plan without.

    Raises:
        BackendError: no installed distribution brings them.
        PluginError: several do.
    """
    if not plan.by_rows:
        return none()
    what = f"updating tables by rows on {backend}"
    return brought(GROUP, backend, what, FIRST_PARTY)(rules_of(plan), plan, *of)
