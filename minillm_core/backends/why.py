"""Which kernel serves each op and why, and the reasons of those refused, as answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from minillm_core.backends.bind import CORE, requests_here
from minillm_core.backends.offers import check_offers
from minillm_core.backends.requests import requests_of
from minillm_core.errors import BackendError
from minillm_core.ops.select import Candidate, Choice, Policy, Request, choose, parse_policy
from minillm_core.plan.why import Answer, Held, Refused

if TYPE_CHECKING:
    from minillm_core.backends.detect import Detected
    from minillm_core.plan import Plan

__all__ = ["kernel_answers"]

NOWHERE = {"backend": "numpy", "device": "cpu", "dtype": "float32", "compiled": False}


def kernel_answers(plan: Plan, detected: Detected | None) -> tuple[Answer, ...]:
    """An answer an op, ``kernel[op]``.

    Args:
        plan: what asks the ops.
        detected: where it would run; None: no backend is installed here, so nothing is chosen.

    Raises:
        ConfigError: ``kernels`` is no policy.
    """
    if detected is None:
        unknown = Held("core", "not chosen", "no backend is installed here")
        return tuple(_answer(r.op, (unknown,)) for r in requests_of(plan, **NOWHERE))
    policy = parse_policy(plan.config.kernels)
    requests, candidates = requests_here(detected, plan)
    owners = {(c.op, c.name): owner for owner, c in plan.candidates}
    answers: list[Answer] = []
    choices: list[Choice] = []
    for request in requests:
        offers = [c for c in candidates if c.op == request.op and detected.backend in c.backends]
        try:
            choices.append(choose(request, candidates, policy))
        except BackendError as error:
            what = f"{error.what} ({error.where})"
            clash = Refused(tuple(sorted(c.name for c in offers)), what, error.fix)
            answers.append(_answer(request.op, (), (clash,)))
            continue
        choice = choices[-1]
        owner = owners.get((request.op, choice.kernel), "core")
        held = Held(owner, choice.kernel, choice.reason)
        others = tuple(_others(choice, offers, request, policy))
        answers.append(_answer(request.op, (held,), others))
    if len(choices) == len(requests):
        return tuple(_with_offers(answers, plan, requests, choices, detected.backend))
    return tuple(answers)


def _answer(op: str, held: tuple[Held, ...], refused: tuple[Refused, ...] = ()) -> Answer:
    return Answer(f"kernel[{op}]", "query", held, refused, also=(op, f"kernels[{op}]"))


def _others(
    choice: Choice, offers: Sequence[Candidate], request: Request, policy: Policy
) -> Iterator[Refused]:
    """Candidates that do not serve, each with its reason."""
    why = "another was named" if request.op in policy.named else f"{choice.kernel} is preferred"
    for candidate in offers:
        if candidate.name in choice.refused:
            reason = choice.refused[candidate.name]
            yield Refused((candidate.name,), reason, how="cannot serve")
        elif candidate.name != choice.kernel:
            yield Refused((candidate.name,), f"it could: {why}", how="passed over")


def _with_offers(
    answers: Sequence[Answer],
    plan: Plan,
    requests: Sequence[Request],
    choices: Sequence[Choice],
    backend: str,
) -> Iterator[Answer]:
    """With what a run would refuse of plugins' kernels: none of them serves, for one."""
    try:
        check_offers(plan.candidates, CORE[backend], requests, choices)
    except BackendError as error:
        where = error.where or ""
        refused = Refused(
            tuple(sorted({owner for owner, _ in plan.candidates})),
            f"{error.what} ({where})",
            error.fix,
        )
        for answer in answers:
            op = answer.slot.removeprefix("kernel[").rstrip("]")
            clash = (refused,) if f"{op}=" in where else ()
            yield replace(answer, refused=(*answer.refused, *clash))
    else:
        yield from answers
