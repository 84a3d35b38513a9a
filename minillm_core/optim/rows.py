"""Sparse updates of tables by rows: the interface of a rule that catches up on skipped updates.

A step updates only the rows that it reads, (S, C). Every other row stays unchanged, with the number of
the update at which it was last brought up to date; from that number a :class:`RowRule` computes the
updates that the row missed. The step itself runs the group's stages, on fewer rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from minillm_core.nn.reference import resolve
from minillm_core.optim.groups import Group
from minillm_core.optim.update import multiplier

Held = Mapping[str, Any]
"""Arrays of some rows: ``param`` and the group's state by ``stage.entry`` (``precondition.m``), float32 (S, C);
``last``, float32 (S,), the update at which each row was last brought up to date."""
Shared = Mapping[str, Any]
"""State that a rule keeps once for a whole table, float32."""


class RowRule(ABC):
    """A rule that applies the updates that rows of a table missed in the steps that did not read them.

    Pure, and written once for all frameworks. Its methods take ``held``, the arrays of some rows:
    ``param`` and the group's state by ``stage.entry`` (``precondition.m``), float32 (S, C), and ``last``,
    float32 (S,), the update at which each row was last brought up to date; and ``shared``, the state of
    the whole table, float32, 0 at first. The step itself runs the group's stages, on the rows it reads.

    Args:
        group: the parameter group, of the table alone.
    """

    shared: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """The state of a whole table: entry -> shape; float32, 0 at first."""

    def __init__(self, group: Group) -> None:
        self.group, self.name = group, group.members[0].name
        for _, _, stage in group.rule.stages:
            _ = stage.function  # imported now: an import fails in a trace

    def constant(self, anchor: str, argument: str) -> Any:
        """Return a constant of a stage of the group's rule; KeyError if there is none."""
        stages = {name: stage for name, _, stage in self.group.rule.stages}
        return dict(stages[anchor].arguments)[argument]

    def rate(self, values: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return a step's learning rate and learning rate times weight decay, with the table's factors."""
        stages = {name: stage for name, _, stage in self.group.rule.stages}
        member = self.group.members[0]
        rate = values[dict(stages["write"].values)["lr"]] * multiplier(member.lr_mul, values)
        if member.wd_mul == 0:  # also if the decay stage has no such constant
            return rate, rate * 0.0
        decay = self.constant("decay", "weight_decay")
        return rate, rate * (decay * multiplier(member.wd_mul, values))

    def refuses(self) -> str | None:
        """Return why this class does not support the group's rule; None: it does."""
        return None

    @abstractmethod
    def brought(self, ops: Any, held: Held, shared: Shared, updates: Any) -> dict[str, Any]:
        """Bring rows up to date; return their arrays, without ``last``.

        Rows whose ``last`` equals ``updates`` are returned bitwise unchanged.

        Args:
            ops: the framework's array functions.
            held: the rows.
            shared: the state of the table.
            updates: 0-d float32: the number of updates so far.
        """

    @abstractmethod
    def next_shared(
        self, ops: Any, shared: Shared, updates: Any, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Compute the state of the table after one more update.

        Args:
            ops: the framework's array functions.
            shared: the state of the table.
            updates: 0-d float32: the number of updates so far, without this one.
            values: schedule value -> 0-d float32.
        """

    @abstractmethod
    def in_turn(self, ops: Any, updates: Any) -> Any:
        """Return rows to bring up to date in this step even if it does not read them, int32 (n,), distinct."""


def rules_of(plan: Any) -> dict[str, RowRule]:
    """Build the RowRule of each table that a plan updates by rows, by the table's name."""
    groups = {group.members[0].name: group for group in plan.groups}
    return {name: resolve(one.rule)(groups[name]) for name, one in plan.by_rows.items()}


def groups_of_whole(plan: Any) -> dict[str, Group]:
    """Return the groups without tables updated by rows, by keys that are the same in every run."""
    return {str(i): one for i, one in enumerate(plan.groups) if one.members[0].rows is None}
