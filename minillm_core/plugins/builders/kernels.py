"""Candidates for ops, from plugins."""

from __future__ import annotations

from minillm_core.errors import PlanError
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.select import Candidate, lacking
from minillm_core.plugins.builders.base import Builder, ValueTable
from minillm_core.plugins.discover import missing_reference
from minillm_core.text import nearest


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
            PlanError: no such op; its function is not where ``reference`` says; or another plugin
                offers one of this name for this op.
        """
        key = f"{candidate.op}={candidate.name}"
        if candidate.op not in CONTRACTS:
            close = nearest(candidate.op, CONTRACTS)
            raise PlanError(
                f"plugin '{self._owner}' brings a kernel for '{candidate.op}', and there is no such op",
                where=f"kernel[{candidate.op}]",
                fix=(f"did you mean {close}? " if close else "")
                + f"ops are {', '.join(CONTRACTS)}",
            )
        reason = missing_reference(candidate.reference)
        if reason and not any(map(lacking, candidate.requires)):  # else a run says what it lacks
            raise PlanError(
                f"the function of plugin '{self._owner}' for kernel {key} is not there: {reason}",
                where=f"kernel[{candidate.op}], {candidate.reference}",
                fix='mend its reference: "package.module:function"',
            )
        if key in self._held:
            raise PlanError(
                f"kernel {key} is offered by both '{self._held[key][0]}' and '{self._owner}'",
                where=f"kernel[{candidate.op}]",
                fix=f"leave out one of them, such as '{self._owner}'",
            ).concerning(plugins=(self._held[key][0], self._owner))
        self._held[key] = (self._owner, candidate)
