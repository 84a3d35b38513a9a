"""The check ``kernel`` of a plugin: its CPU kernels, tested on all usual cases."""

from __future__ import annotations

from minillm_core.commands import nearest
from minillm_core.inspection import CONTRACTS
from minillm_kit.check import Failed, NotApplicable, own_line
from minillm_kit.kernels.calls import calls_on
from minillm_kit.kernels.check import Row, Target, plan_check, run_check
from minillm_kit.kernels.examples import CASES
from minillm_kit.kernels.offers import Offer
from minillm_kit.kernels.problem import DTYPES
from minillm_kit.kernels.trial import PROPERTIES
from minillm_kit.subject import Subject

CAUSES = {
    "output": "the forward pass: an edge, a size that is not a power of two, a sum in a half dtype",
    "gradient": "the backward pass: a factor, a term that is left out, a sum in a half dtype",
    "runs": "the kernel's code there, or a case that its accepts= should refuse",
}


def kernel(subject: Subject) -> str:
    """Check each CPU kernel against its op's contract, in each dtype that it accepts."""
    offers = [one for owner, one in subject.plan().candidates if owner == subject.name]
    if not offers:
        raise NotApplicable("it brings no kernel")
    for one in offers:
        if one.op not in CONTRACTS:
            close = nearest(one.op, CONTRACTS)
            raise Failed(
                f"kernel '{one.name}' is for '{one.op}', but there is no such op",
                cause=f"did you mean '{close}'?" if close else f"one of {', '.join(CONTRACTS)}",
            )
    targets = [
        Target(Offer(one, subject.spec), calls_on(backend, "cpu"))
        for one in offers
        for backend in subject.backends
    ]
    rows = plan_check(targets, DTYPES, lambda case: case.effort == "usual")
    report = run_check(rows)
    for row in report.failed:
        index, failure = row.failures[0]
        candidate, case = row.target.offer.candidate, CASES[row.target.offer.candidate.op][index]
        lines = [
            f"{row.target.calls.backend} {row.dtype}, kernel {candidate.op}={candidate.name}: "
            f"{failure.found} ({case.name})",
            own_line(failure.error, subject) if failure.error else None,
            f"alone: {report.again(row, index)}",
        ]
        raise Failed(
            "\n".join(filter(None, lines)),
            cause=CAUSES.get(
                failure.property, f"{failure.property}: {PROPERTIES[failure.property]}"
            ),
        )
    served = [row for row in rows if row.cases]
    if not served:
        refused = dict.fromkeys(_called(row) + ": " + row.refused for row in rows)
        raise NotApplicable(f"none serves a CPU here: {'; '.join(refused)}")
    return "in tolerances: " + ", ".join(
        f"{_called(row)} {row.target.calls.backend} {row.dtype} {row.worst.share:.2f}"
        for row in served
    )


def _called(row: Row) -> str:
    return row.target.offer.called
