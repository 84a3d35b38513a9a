"""What became of the kernels that plugins brought: none is passed over without a word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate, Choice, Request

__all__ = ["check_offers", "insisted"]


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
    chosen = {choice.op: choice for choice in choices}
    taken = {(candidate.op, candidate.name) for candidate in core}
    offers = list(offers)
    serving = {owner for owner, c in offers if c.op in chosen and chosen[c.op].kernel == c.name}
    passed: dict[str, list[_Passed]] = {}
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
        choice, reason = chosen[candidate.op], candidate.refusal(asked[candidate.op])
        if candidate.unless and reason:
            raise insisted(owner, candidate, reason, choice.kernel, others=owner in serving)
        if choice.kernel != candidate.name:
            passed.setdefault(owner, []).append(_Passed(key, reason, choice))
    for owner, kernels in passed.items():
        if owner not in serving:
            raise _useless(owner, kernels)
    return tuple(
        f"kernel {one.key} of plugin {owner} does not serve: {one.why}"
        for owner, kernels in sorted(passed.items())
        for one in sorted(kernels, key=lambda one: one.key)
    )


def insisted(
    owner: str, candidate: Candidate, reason: str, instead: str, *, others: bool
) -> BackendError:
    """A kernel that is not to be passed over cannot serve.

    Args:
        owner: the plugin.
        candidate: its kernel.
        reason: why it cannot.
        instead: the kernel that would serve without it.
        others: other kernels of the plugin serve, so that it may do without this one.
    """
    way_out = f"{owner}.{candidate.unless} leaves the op to '{instead}'; or leave the plugin out"
    alone = f"leave the plugin out: '{instead}' serves then, and none of its others would here"
    return BackendError(
        f"plugin '{owner}' is there for {candidate.op}, and cannot serve it: {reason}",
        where=f"{candidate.op}={candidate.name}",
        fix=way_out if others else alone,
    )


@dataclass(frozen=True)
class _Passed:
    """A plugin's kernel that another serves instead of."""

    key: str  # op=name
    refusal: str | None  # None: it could
    choice: Choice  # what serves

    @property
    def why(self) -> str:
        return self.refusal or f"{self.choice.kernel} does, {self.choice.reason}"


def _useless(owner: str, kernels: Sequence[_Passed]) -> BackendError:
    """None of a plugin's kernels serves, so that it would do nothing."""
    able = [one.key for one in kernels if one.refusal is None]
    served = ", ".join(f"{one.choice.op} by {one.choice.kernel}" for one in kernels)
    name = f"name one, as in --kernels {able[0]}, or " if able else ""
    return BackendError(
        f"none of the kernels that plugin '{owner}' brings can serve"
        if not able
        else f"none of the kernels that plugin '{owner}' brings serves",
        where="; ".join(f"{one.key}: {one.why}" for one in kernels),
        fix=f"{name}leave the plugin out: without it, {served}",
    )
