"""The kernels that a machine uses for a plan's ops, and why not others. Imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minillm_core import BackendError, Plan, Request
from minillm_core.inspection import CONTRACTS, Choice, Detected, attribute_errors, verdicts
from minillm_kit.kernels.offers import CHOOSING, Offer

REFERENCE = "reference"
"""In place of a kernel's name: the plain one of its op."""

State = Literal["taken", "passed over", "only where named", "plugin not named", "cannot"]


@dataclass(frozen=True)
class Listed:
    """A kernel, and its state on this machine."""

    offer: Offer
    state: State
    reason: str

    @property
    def words(self) -> str:
        """Format state and reason in a line."""
        return self.reason if self.state == "cannot" else f"{self.state}: {self.reason}"

    def data(self) -> dict[str, Any]:
        """Return the kernel as a JSON object."""
        one = self.offer.candidate
        return {
            "op": one.op,
            "kernel": one.name,
            "provider": one.provider,
            "plugin": self.offer.plugin,
            "backends": list(one.backends),
            "devices": list(one.devices),
            "requires": list(one.requires),
            "plain": one.plain,
            "within_tolerance": one.within_tolerance,
            "tolerance": dict(CONTRACTS[one.op].tolerance) if one.op in CONTRACTS else None,
            "state": self.state,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Listing:
    """The kernels of some ops, evaluated for a plan's requests on a machine."""

    requests: Mapping[str, Request]  # by op
    kernels: tuple[Listed, ...]

    def data(self) -> dict[str, Any]:
        """Return the listing as a JSON object."""
        request = next(iter(self.requests.values()))
        return {
            "backend": request.backend,
            "device": request.device,
            "dtype": request.dtype,
            "compiled": request.compiled,
            "facts": {op: _json(one.facts) for op, one in self.requests.items()},
            "kernels": [one.data() for one in self.kernels],
        }


def listing(
    plan: Plan, detected: Detected, offers: Sequence[Offer], *, every: Sequence[Offer] = ()
) -> Listing:
    """Evaluate every kernel for a plan's requests.

    Args:
        plan: the plan that makes the requests; its plugins' kernels and ``--kernels`` apply.
        detected: the machine.
        offers: the kernels to list.
        every: all kernels, those that are not listed too.

    Raises:
        ConfigError: ``--kernels`` is not a valid policy.
        BackendError: ``--kernels`` names an op that the plan does not use, or a kernel that no
            plugin brings.
        PluginCodeError: a plugin's own code raised.
    """
    with attribute_errors(plan.active, CHOOSING):
        found = verdicts(plan, detected)
    requests = {one.op: one for one in found.requests}
    _check_named(found.policy.named, requests, found.outcomes, (*offers, *every))
    active = {(one.op, one.name) for _, one in plan.candidates}
    plugins = {one.name for one in plan.active}
    listed = []
    for offer in offers:
        one = offer.candidate
        request = requests.get(one.op)
        if request is None:
            listed.append(Listed(offer, "cannot", f"this plan has no op {one.op}"))
            continue
        there = offer.plugin is None or (one.op, one.name) in active
        named = one.op in found.policy.named
        off = offer.loaded is not None and offer.loaded.name in plugins and not there
        state = _state(offer, request, found.outcomes[one.op], there=there, off=off, named=named)
        listed.append(Listed(offer, *state))
    return Listing(requests, tuple(listed))


def _check_named(
    named: Mapping[str, str],
    requests: Mapping[str, Request],
    outcomes: Mapping[str, Choice | BackendError],
    offers: Sequence[Offer],
) -> None:
    known = {(one.candidate.op, one.candidate.name) for one in offers}
    for op, name in named.items():
        if op not in requests:
            raise BackendError(
                f"no op '{op}' in this plan, so kernel '{name}' cannot serve it",
                where=f"--kernels {op}={name}",
                fix=f"one of {', '.join(sorted(requests))}",
            )
        outcome = outcomes[op]
        if isinstance(outcome, BackendError) and name != REFERENCE and (op, name) not in known:
            raise outcome


def _state(
    offer: Offer,
    request: Request,
    outcome: Choice | BackendError,
    *,
    there: bool,
    off: bool,
    named: bool,
) -> tuple[State, str]:
    one = offer.candidate
    if (reason := offer.refusal(request)) is not None:
        return "cannot", reason
    if off:
        return "passed over", "its plugin does not offer it with these options"
    if not there:
        return "plugin not named", f"--plugins {offer.plugin} would offer it"
    if isinstance(outcome, BackendError):
        return "passed over", outcome.what
    if outcome.kernel == one.name:
        return "taken", outcome.reason
    if not one.within_tolerance:
        return "only where named", outcome.refused.get(one.name, "outside the tolerance")
    return "passed over", f"{outcome.kernel} {'was named' if named else 'is preferred'}"


def _json(facts: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None))
    return {name: x if isinstance(x, plain) else str(x) for name, x in facts.items()}
