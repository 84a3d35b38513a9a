"""Temporary weight tying: a parameter equals another one (its leader) until a fraction of the run.

Until then both get the sum of their gradients and take the same step from the same optimizer state, so
that they stay bitwise equal; nothing has to be copied when they are untied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FOLLOW = "follow:"
"""Prefix of an evidence key, before a parameter's name: a step has checked whether it is still tied."""


@dataclass(frozen=True)
class Follow:
    """The claim that a parameter is tied to another one."""

    owner: str
    leader: str  # the other parameter
    until: float  # fraction of the run
    value: str  # schedule value: 1 while they are tied, then 0

    def __str__(self) -> str:
        return f"{self.leader} until {self.until:.3g} of the run"


def tied(follows: Mapping[str, Follow], values: Mapping[str, float]) -> dict[str, str]:
    """Return the parameters that are tied at these schedule values, each with its leader."""
    return {name: one.leader for name, one in follows.items() if values[one.value] > 0}


def sum_tied(
    ops: Any, follows: Mapping[str, Follow], grads: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Replace the gradients of tied parameters by their sum.

    Args:
        ops: the framework's array functions.
        follows: parameter -> its tie.
        grads: parameter -> float32 gradient.
        values: schedule value -> 0-d float32.

    Returns:
        Parameter -> gradient; and the gradients for the norm, which contain each sum once.
    """
    made, counted = dict(grads), dict(grads)
    for name, one in follows.items():
        made[one.leader] = ops.where(
            values[one.value] > 0, made[one.leader] + grads[name], made[one.leader]
        )
    for name, one in follows.items():
        together = values[one.value] > 0
        made[name] = ops.where(together, made[one.leader], grads[name])
        counted[name] = ops.where(together, 0.0, grads[name])
        counted[one.leader] = made[one.leader]
    return made, [*counted.values()]
