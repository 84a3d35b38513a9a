"""What is refused of kernels before a device is there: by ``minillm plan``, and in pairs of plugins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minillm_core.backends.bind import CORE, requests_here
from minillm_core.backends.offers import check_offers, insisted
from minillm_core.backends.requests import requests_of
from minillm_core.config.kernels import parse_policy
from minillm_core.ops.select import Candidate, choose, choose_all

if TYPE_CHECKING:
    from minillm_core.backends.detect import Detected
    from minillm_core.plan import Plan

__all__ = ["check_planned"]


def check_planned(plan: Plan, detected: Detected | None = None) -> tuple[str, ...]:
    """What a run there would refuse, but for what is not installed here: a plan may be for elsewhere.

    Args:
        plan: the plan.
        detected: where it would run; None: anywhere, so that only kernels that are not to be
            passed over are asked, each on the device that it is for.

    Returns:
        A note for each kernel of a plugin that others would serve instead of.

    Raises:
        BackendError: an op that no kernel would serve, a kernel asked for by name that could not or
            is not known, a plugin none of whose kernels could, or a kernel not to be passed over.
    """
    for owner, candidate in plan.candidates:
        if candidate.unless:
            _check_insisted(plan, owner, candidate)
    if detected is None:
        return ()
    requests, candidates = requests_here(detected, plan)
    choices = choose_all(
        requests, [_installed(c) for c in candidates], parse_policy(plan.config.kernels)
    )
    offers = [(owner, _installed(c)) for owner, c in plan.candidates]
    return check_offers(offers, CORE[detected.backend], requests, choices)


def _check_insisted(plan: Plan, owner: str, candidate: Candidate) -> None:
    train, backend = plan.config.train, candidate.backends[0]
    requests = requests_of(
        plan,
        backend=backend,
        device=candidate.devices[0],
        dtype="bfloat16" if train.dtype == "auto" else train.dtype,
        compiled=train.compile != "off",
    )
    asked = {request.op: request for request in requests}
    if reason := candidate.accepts(asked[candidate.op]):
        others = any(
            choose(asked[one.op], (_installed(one), *CORE[backend])).kernel == one.name
            for whose, one in plan.candidates
            if whose == owner and one.op in asked and one is not candidate
        )
        instead = choose(asked[candidate.op], CORE[backend]).kernel
        raise insisted(owner, candidate, reason, instead, others=others)


def _installed(candidate: Candidate) -> Candidate:
    """The same, as if what it requires were here."""
    return replace(candidate, requires=())
