"""The seam of parameters that are tied to another one until a share of the run, and untied after it.

Until then both get the sum of their gradients and take the same step from the same state, so that they
stay equal bit by bit; nothing has to be copied when they part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FOLLOW = "follow:"
"""Before a parameter's name in a witness: a step has looked up whether it is still tied."""


@dataclass(frozen=True)
class Follow:
    """The claim that a parameter is tied to another one."""

    owner: str
    leader: str  # the other parameter
    until: float  # share of the run
    value: str  # schedule value: 1 as long as they are one, then 0

    def __str__(self) -> str:
        return f"{self.leader} until {self.until:.3g} of the run"


def tied(follows: Mapping[str, Follow], values: Mapping[str, float]) -> dict[str, str]:
    """Map the parameters that are another one at these schedule values to that one."""
    return {name: one.leader for name, one in follows.items() if values[one.value] > 0}


def shared(
    ops: Any, follows: Mapping[str, Follow], grads: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Give parameters that are one the sum of their gradients.

    Args:
        ops: the framework's.
        follows: parameter -> what it follows.
        grads: parameter -> float32.
        values: schedule value -> 0-d float32.

    Returns:
        The gradients, and those by which their norm is measured: each sum once.
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
