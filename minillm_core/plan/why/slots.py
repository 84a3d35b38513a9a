"""Everything of a plan that can be asked about, as answers; kernels apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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
    """An answer for every slot, parameter and rule; where a hook was not heard out, for clashes.

    Args:
        said: what the plugins said.
        plan: what came of it; None: it was refused, and what follows from it is not known.
        refusal: why it was refused.
        plugins: the names of all of them.
    """
    certain, unheard = [], []
    for hooks, answers in _by_hooks(said, plan):
        (certain if hooks <= said.heard else unheard).extend(answers)
    known = (*certain, *unheard)
    if refusal is None or any(refusal.what == r.what for a in certain for r in a.refused):
        return tuple(certain)
    whole = {answer.slot for answer in certain}
    who = tuple(sorted(name for name in plugins if f"'{name}'" in refusal.what))
    clash = Refused(who, refusal.what, refusal.fix)
    concerned = _concerned(refusal, [answer.slot for answer in known])
    return tuple(
        replace(answer, refused=(*answer.refused, clash)) if answer.slot in concerned else answer
        for answer in known
        if answer.slot in whole or answer.slot in concerned
    )


def _by_hooks(said: Declared, plan: Plan | None) -> Iterator[tuple[set[str], Iterable[Answer]]]:
    """Answers, and the hooks that all plugins must have answered for them to be the whole truth."""
    attention = attention_answers(said.attention, said.model)
    yield {"build_attention", "build_model"}, attention
    yield {"build_model"}, model_answers(said.model)
    yield {"compute_loss"}, loss_answers(said.loss)
    yield {"build_data"}, data_answers(said.data)
    if said.optimizer is not None:
        yield {"optimizer_factory"}, optimizer_answers(said.optimizer, said.model)
    if plan is not None:
        yield set(), hook_answers(plan)


def _concerned(refusal: PlanError, slots: Collection[str]) -> Collection[str]:
    """The slots that a refusal is about: where it was, those that it names, those that lie there."""
    where = refusal.where or "?"
    at = [slot for slot in slots if slot == where]
    named = [slot for slot in slots if slot in refusal.what]
    return named or at or [slot for slot in slots if slot.startswith((f"{where}.", f"{where}["))]
