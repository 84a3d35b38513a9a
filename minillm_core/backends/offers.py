"""What became of the kernels that plugins brought: none is passed over without a word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from minillm_core.backends.requests import requests_of
from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate, Choice, Request

if TYPE_CHECKING:
    from minillm_core.plan import Plan

__all__ = ["check_offers", "check_planned"]


def check_planned(plan: Plan) -> None:
    """What a plan alone says of kernels that are not to be passed over, wherever it will run.

    Raises:
        BackendError: one of them cannot serve on any device that it is for.
    """
    train = plan.config.train
    for owner, candidate in plan.candidates:
        if not candidate.unless:
            continue
        requests = requests_of(
            plan,
            backend=candidate.backends[0],
            device=candidate.devices[0],
            dtype="bfloat16" if train.dtype == "auto" else train.dtype,
            compiled=train.compile != "off",
        )
        (asked,) = (request for request in requests if request.op == candidate.op)
        if reason := candidate.accepts(asked):
            raise _insisted(owner, candidate, reason)


def check_offers(
    offers: Iterable[tuple[str, Candidate]],
    core: Sequence[Candidate],
    requests: Sequence[Request],
    choices: Sequence[Choice],
) -> tuple[str, ...]:
    """One note for each kernel of a plugin that others serve instead of.

    Args:
        offers: plugin and candidate.
        core: the core's candidates.
        requests: what the plan asks.
        choices: what was chosen.

    Raises:
        BackendError: a kernel for an op that nothing asks for or with the name of one of the
            core's; one that is not to be passed over cannot serve; or none of a plugin's does.
    """
    asked = {request.op: request for request in requests}
    chosen = {choice.op: choice.kernel for choice in choices}
    taken = {(candidate.op, candidate.name) for candidate in core}
    serving: dict[str, bool] = {}
    passed: dict[str, dict[str, str]] = {}
    for owner, candidate in offers:
        key = f"{candidate.op}={candidate.name}"
        if candidate.op not in asked:
            raise BackendError(
                f"plugin '{owner}' brings a kernel for '{candidate.op}', an op that nothing asks for",
                where=key,
                fix=f"one of {', '.join(sorted(asked))}, or leave the plugin out",
            )
        if (candidate.op, candidate.name) in taken:
            raise BackendError(
                f"plugin '{owner}' brings a kernel by the name of one of the core's",
                where=key,
                fix="its authors should give it a name of its own; or leave the plugin out",
            )
        if candidate.unless and (reason := candidate.refusal(asked[candidate.op])):
            raise _insisted(owner, candidate, reason)
        serves = chosen[candidate.op] == candidate.name
        serving[owner] = serving.get(owner, False) or serves
        if not serves:
            other = f"{chosen[candidate.op]} is preferred or was named"
            reason = candidate.refusal(asked[candidate.op]) or other
            passed.setdefault(owner, {})[key] = reason
    for owner, reasons in passed.items():
        if not serving[owner]:
            raise BackendError(
                f"none of the kernels that plugin '{owner}' brings can serve",
                where="; ".join(f"{key}: {reason}" for key, reason in reasons.items()),
                fix=f"switch them off by the plugin's options, name one (--kernels "
                f"{next(iter(reasons))}), or leave the plugin out",
            )
    return tuple(
        f"kernel {key} of plugin {owner} does not serve: {reason}"
        for owner, reasons in sorted(passed.items())
        for key, reason in sorted(reasons.items())
    )


def _insisted(owner: str, candidate: Candidate, reason: str) -> BackendError:
    return BackendError(
        f"plugin '{owner}' is there for {candidate.op}, and cannot serve it: {reason}",
        where=f"{candidate.op}={candidate.name}",
        fix=f"{owner}.{candidate.unless} leaves the op to others; or leave the plugin out",
    )
