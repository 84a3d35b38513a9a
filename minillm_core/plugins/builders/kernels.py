"""Candidate kernels for ops, offered by plugins."""

from __future__ import annotations

from minillm_core.errors import PlanError
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.select import Candidate, lacking
from minillm_core.plugins.builders.base import Builder, offered_twice
from minillm_core.plugins.discover import missing_reference
from minillm_core.text import did_you_mean


class KernelBuilder(Builder):
    """The candidate kernels of every op, bound to one plugin."""

    _slots: dict[str, tuple[str, Candidate]]  # op=name -> plugin, candidate

    def candidate(self, candidate: Candidate) -> None:
        """Query: a request -> None (accepted) or the reason for refusing it, from the candidate's ``accepts``.

        ::

            kernels.candidate(Candidate("swiglu", "mine", ("torch",), "pkg.kernels:swiglu"))

        Raises:
            PlanError: an unknown op or device; no function at the candidate's ``reference``; or another plugin
                offers a candidate of this name for this op.
        """
        key = f"{candidate.op}={candidate.name}"
        devices = (("device", device, Candidate.devices) for device in candidate.devices)
        for kind, name, known in (("op", candidate.op, CONTRACTS), *devices):
            if name not in known:
                what = f"plugin '{self._owner}' brings a kernel for '{name}', but there is no such {kind}"
                fix = f"{did_you_mean(name, known)}{kind}s are {', '.join(known)}"
                raise PlanError(what, where=f"kernel[{candidate.op}]", fix=fix)
        reason = missing_reference(candidate.reference)
        if reason and not any(map(lacking, candidate.requires)):  # else the run reports them
            raise PlanError(
                f"the function of plugin '{self._owner}' for kernel {key} is not there: {reason}",
                where=f"kernel[{candidate.op}], {candidate.reference}",
                fix='correct its reference: "package.module:function"',
            )
        if key in self._slots:
            what, where = f"kernel {key} is offered", f"kernel[{candidate.op}]"
            raise offered_twice(what, self._slots[key][0], self._owner, where)
        self._slots[key] = (self._owner, candidate.of(self._owner))
