"""The merge kinds as answers: a claim, a chain, a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.plan.why.answer import CORE, Answer, Held, Refused
from minillm_core.plan.words import words
from minillm_core.plugins.slots import Chain, Claim, Link, Terms

__all__ = ["NOTHING", "UNCLAIMED", "chain_answers", "claim_answer", "term_answer"]

NOTHING = "nothing"
UNCLAIMED = "the default: no plugin claims it"


def claim_answer(
    claim: Claim[Any],
    default: str,
    *,
    slot: str | None = None,
    also: tuple[str, ...] = (),
    in_words: Callable[[Any], str] = words,
) -> Answer:
    """Who claimed it, or what the core does there.

    Args:
        claim: the slot.
        default: what the core does.
        slot: its name, where that is not the claim's own.
        also: further names of it.
        in_words: a claimed value for people to read.
    """
    contenders = sorted(claim.held)
    held = [Held(owner, in_words(claim.held[owner]), "claims it") for owner in contenders]
    refused: tuple[Refused, ...] = ()
    try:
        claim.resolve()
    except PlanError as error:
        refused = (Refused(tuple(contenders), error.what, error.fix),)
    core = Held(CORE, default, UNCLAIMED)
    return Answer(slot or claim.where, "claim", tuple(held) or (core,), refused, also)


def chain_answers(chain: Chain) -> Iterator[Answer]:
    """An answer an anchor, its nodes in the order in which they run."""
    error: PlanError | None = None
    try:
        order = [node.name for _, node in chain.resolve()]
    except PlanError as caught:
        error, order = caught, sorted({link.node.name for link in chain.links})
    for anchor in chain.anchors:
        slot = f"{chain.where}.{anchor}"
        here = [link for link in chain.links if link.anchor == anchor]
        here.sort(key=lambda link: order.index(link.node.name))
        held = [Held(li.node.owner, words(li.node), _standing(li, here)) for li in here]
        core = Held(CORE, NOTHING, "the default: no plugin joins here")
        refused = [
            Refused((owner,), reason, how="closed")
            for owner, reason in chain.closed.get(anchor, [])
        ]
        if error is not None and here and error.where in (chain.where, slot):
            closers = {owner for owner, _ in chain.closed.get(anchor, [])}
            who = tuple(sorted({link.node.owner for link in here} | closers))
            refused.append(Refused(who, error.what, error.fix))
        yield Answer(slot, "chain", tuple(held) or (core,), tuple(refused))


def _standing(link: Link, here: list[Link]) -> str:
    """Why a node stands where it does among those at its anchor."""
    present = {other.node.name for other in here} - {link.node.name}
    reasons = [f"before '{name}', as it says" for name in link.before if name in present]
    reasons += [f"after '{name}', as it says" for name in link.after if name in present]
    for other in here:
        if link.node.name in other.after:
            reasons.append(f"before '{other.node.name}', as that says")
        if link.node.name in other.before:
            reasons.append(f"after '{other.node.name}', as that says")
    return f"joins at {link.anchor}" + "".join(f"; {reason}" for reason in reasons)


def term_answer(terms: Terms[Any], default: str) -> Answer:
    """Every entry of a sum; sums have no order of their own."""
    held = [
        Held(owner, f"{key}: {words(value)}" if str(key) != owner else words(value), "adds it")
        for key, owner, value in terms.resolve()
    ]
    core = Held(CORE, default, "the default: no plugin adds anything")
    return Answer(terms.where, "term", tuple(held) or (core,))
