"""What became of the kernels that plugins brought: none is passed over without a word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate, Choice, Request

__all__ = ["check_offers"]


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
            core's; or none of a plugin's kernels serves.
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
