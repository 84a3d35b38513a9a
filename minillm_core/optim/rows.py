"""The seam of tables that are updated by rows: what a rule for the rows in between is asked.

A step holds the rows that it sees, (S, C); all others lie still, each with the number of the update at
which it was last brought up to date. What the group's rule owes to them a :class:`RowRule` computes from
that number; the step itself is the group's stages, on fewer rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from minillm_core.nn.reference import resolve
from minillm_core.optim.groups import Group
from minillm_core.optim.update import multiplier

Held = Mapping[str, Any]
"""Of some rows: ``param`` and the group's state by ``stage.entry`` (``precondition.m``), float32 (S, C);
``last``, float32 (S,), the update at which each was brought up to date."""
Shared = Mapping[str, Any]
"""State that a rule keeps for a whole table, float32."""


class RowRule(ABC):
    """What the rule of a table does to rows between the updates that see them.

    Pure, and written once for all frameworks. Of some rows it is handed what is ``held``: ``param`` and
    the group's state by ``stage.entry`` (``precondition.m``), float32 (S, C), and ``last``, float32 (S,),
    the update at which each was brought up to date; and what it keeps for the table, its ``shared``:
    entry -> shape, float32, 0 at first. The step itself is the group's stages, on the rows that are seen.

    Args:
        group: of the table alone.
    """

    shared: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """State of a table: entry -> shape, float32, 0 at first."""

    def __init__(self, group: Group) -> None:
        self.group, self.name = group, group.members[0].name
        for _, _, stage in group.rule.stages:
            _ = stage.function  # imported here: a trace cannot

    def constant(self, anchor: str, argument: str) -> Any:
        """Return a constant of a stage of the group's rule; KeyError where it has none."""
        stages = {name: stage for name, _, stage in self.group.rule.stages}
        return dict(stages[anchor].arguments)[argument]

    def rate(self, values: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return a step's learning rate, and by how much it decays weights; factors of the table included."""
        stages = {name: stage for name, _, stage in self.group.rule.stages}
        member = self.group.members[0]
        rate = values[dict(stages["write"].values)["lr"]] * multiplier(member.lr_mul, values)
        if member.wd_mul == 0:  # whatever the stage is
            return rate, rate * 0.0
        decay = self.constant("decay", "weight_decay")
        return rate, rate * (decay * multiplier(member.wd_mul, values))

    def refuses(self) -> str | None:
        """Say why the group's rule cannot be followed; None: it can."""
        return None

    @abstractmethod
    def brought(self, ops: Any, held: Held, shared: Shared, updates: Any) -> dict[str, Any]:
        """Bring rows up to date; return all that is held of them but ``last``.

        Bit by bit what they were where ``last`` is ``updates``.

        Args:
            ops: the framework's.
            held: the rows.
            shared: of the table.
            updates: 0-d float32: how many there were.
        """

    @abstractmethod
    def next_shared(
        self, ops: Any, shared: Shared, updates: Any, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what is kept for the table after one more update.

        Args:
            ops: the framework's.
            shared: of the table.
            updates: 0-d float32: how many there were, that one not included.
            values: schedule value -> 0-d float32.
        """

    @abstractmethod
    def in_turn(self, ops: Any, updates: Any) -> Any:
        """Return rows that are brought up to date whether they are seen or not, int32 (n,), distinct."""


def rules_of(plan: Any) -> dict[str, RowRule]:
    """Make the rules of a plan's tables that are updated by rows, by name."""
    groups = {group.members[0].name: group for group in plan.groups}
    return {name: resolve(one.rule)(groups[name]) for name, one in plan.by_rows.items()}


def groups_of_whole(plan: Any) -> dict[str, Group]:
    """Return the groups of all other parameters, by keys that are the same in every run."""
    return {str(i): one for i, one in enumerate(plan.groups) if one.members[0].rows is None}
