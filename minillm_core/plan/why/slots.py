"""Everything of a plan that can be asked about, as answers; kernels apart."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from minillm_core.errors import PlanError
from minillm_core.plan.declared import Declared
from minillm_core.plan.plan import Plan
from minillm_core.plan.why.answer import Answer, Refused
from minillm_core.plan.why.attention import attention_answers
from minillm_core.plan.why.model import model_answers
from minillm_core.plan.why.optimizer import optimizer_answers
from minillm_core.plan.why.training import data_answers, hook_answers, loss_answers

__all__ = ["slot_answers"]


def slot_answers(
    said: Declared,
    plan: Plan | None = None,
    refusal: PlanError | None = None,
    plugins: Collection[str] = (),
) -> tuple[Answer, ...]:
    """An answer for every slot, parameter and rule.

    Args:
        said: what the plugins said.
        plan: what came of it; None: it was refused, and what follows from it is not known.
        refusal: why it was refused.
        plugins: the names of all of them.
    """
    answers = tuple(_answers(said, plan))
    if refusal is None or any(refusal.what == r.what for a in answers for r in a.refused):
        return answers
    who = tuple(sorted(name for name in plugins if f"'{name}'" in refusal.what))
    clash = Refused(who, refusal.what, refusal.fix)
    concerned = _concerned(refusal, [answer.slot for answer in answers])
    return tuple(
        replace(answer, refused=(*answer.refused, clash)) if answer.slot in concerned else answer
        for answer in answers
    )


def _answers(said: Declared, plan: Plan | None) -> Iterator[Answer]:
    yield from attention_answers(said.attention, said.model)
    yield from model_answers(said.model)
    yield from loss_answers(said.loss)
    yield from data_answers(said.data)
    if said.optimizer is not None:
        yield from optimizer_answers(said.optimizer, said.model)
    if plan is not None:
        yield from hook_answers(plan)


def _concerned(refusal: PlanError, slots: Collection[str]) -> Collection[str]:
    """The slots that a refusal is about: where it was, those that it names, those that lie there."""
    where = refusal.where or "?"
    at = [slot for slot in slots if slot == where]
    named = [slot for slot in slots if slot in refusal.what]
    return named or at or [slot for slot in slots if slot.startswith((f"{where}.", f"{where}["))]
