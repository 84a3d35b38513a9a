"""Candidates for ops, from plugins."""

from __future__ import annotations

from minillm_core.errors import PlanError
from minillm_core.ops.select import Candidate
from minillm_core.plugins.builders.base import Builder, ValueTable

__all__ = ["KernelBuilder"]


class KernelBuilder(Builder):
    """The candidates of every op, as one plugin sees them."""

    def __init__(
        self, owner: str, values: ValueTable, held: dict[str, tuple[str, Candidate]]
    ) -> None:
        super().__init__(owner, values)
        self._held = held

    def candidate(self, candidate: Candidate) -> None:
        """Query: a request -> None (yes), or the reason why not, from ``accepts`` of the candidate.

        ::

            kernels.candidate(Candidate("swiglu", "mine", ("torch",), "pkg.kernels:swiglu"))

        Raises:
            PlanError: another plugin offers one of this name for this op.
        """
        key = f"{candidate.op}={candidate.name}"
        if key in self._held:
            raise PlanError(
                f"kernel {key} is offered by both '{self._held[key][0]}' and '{self._owner}'",
                where=f"kernel[{candidate.op}]",
                fix=f"leave out one of them, such as '{self._owner}'",
            )
        self._held[key] = (self._owner, candidate)
