"""Parameter groups: parameters that one update rule updates together, stacked if it needs matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minillm_core.nn.reference import Function
from minillm_core.optim.follow import Follow
from minillm_core.optim.narrow import Storage
from minillm_core.optim.stage import Rule


@dataclass(frozen=True)
class ByRows:
    """The claim that a table is updated only in the rows that a step reads."""

    owner: str
    field: str  # the batch field with the ids of rows, int32 (B, T)
    rule: str  # module:class of the RowRule for the other rows
    buckets: int  # how many sizes the number of rows is rounded up to

    def __str__(self) -> str:
        return f"rows of '{self.field}' alone, in {self.buckets} sizes"


@dataclass(frozen=True)
class Member:
    """One parameter in a group."""

    name: str
    shape: tuple[int, ...]
    lr_mul: float | str  # a number, or the name of a schedule value
    wd_mul: float | str
    overrides: tuple[tuple[str, Any], ...] = ()  # stage argument -> number, only here
    rows: ByRows | None = None  # None: every row is updated in every step
    view: Function | None = None  # computes the weights for evaluation; None: the parameter itself
    blocks: int = 1  # number of matrices stacked in its rows
    follows: Follow | None = None  # the parameter that it is tied to at first; None: untied


@dataclass(frozen=True)
class Group:
    """A parameter group: members under one rule, stacked to (N, *shape), or a single unstacked member."""

    rule: Rule  # with the members' overrides in its arguments
    members: tuple[Member, ...]

    @property
    def blocks(self) -> int:
        """The number of matrices in each member."""
        return self.members[0].blocks

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a member as the stages see it: the whole parameter, or one of its blocks."""
        whole = self.members[0].shape
        return whole if self.blocks == 1 else (whole[0] // self.blocks, *whole[1:])

    def state_arrays(self) -> dict[str, dict[str, Storage]]:
        """Return the optimizer state: anchor -> entry -> shape (N, ...) and dtype; unstacked rules have no N.

        With members in blocks the shape is (N, blocks, ...).
        """
        n = (len(self.members),) if self.rule.stacked else ()
        n += (self.blocks,) if self.blocks > 1 else ()
        found = {
            anchor: {
                entry: one._replace(shape=(*n, *one.shape))
                for entry, one in stage.state_arrays(self.shape).items()
            }
            for anchor, _, stage in self.rule.stages
        }
        return {anchor: entries for anchor, entries in found.items() if entries}

    def data(self) -> dict[str, Any]:
        """Return the group as JSON."""
        members = [
            {"name": m.name, "lr_mul": m.lr_mul, "wd_mul": m.wd_mul, "overrides": dict(m.overrides)}
            | ({"rows": dict(vars(m.rows))} if m.rows else {})
            | ({"view": m.view._asdict()} if m.view else {})
            | ({"blocks": m.blocks} if m.blocks > 1 else {})
            | ({"follows": dict(vars(m.follows))} if m.follows else {})
            for m in self.members
        ]
        return {"rule": self.rule.name, "shape": [*self.members[0].shape], "members": members}


def groups_of(assigned: Mapping[str, tuple[Rule, Member]]) -> tuple[Group, ...]:
    """Build the groups from parameter -> (rule, member), in the order of the parameters' names."""
    buckets: dict[Any, list[tuple[Rule, Member]]] = {}
    for name in sorted(assigned):
        rule, member = assigned[name]
        alone = () if rule.stacked else (name,)
        key = (rule.name, member.shape, member.blocks, member.overrides, alone)
        buckets.setdefault(key, []).append((rule, member))
    groups = []
    for entries in buckets.values():
        rule, first = entries[0]
        numbers = dict(first.overrides)
        stages = []
        for anchor, owner, stage in rule.stages:
            arguments = tuple((k, numbers.get(k, v)) for k, v in stage.arguments)
            stages.append((anchor, owner, replace(stage, arguments=arguments)))
        overridden = replace(rule, stages=tuple(stages))
        groups.append(Group(overridden, tuple(member for _, member in entries)))
    return tuple(groups)
