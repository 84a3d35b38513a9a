"""Rules with their stages, and every parameter: what it starts from, and which rule it follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.optim.stage import ANCHORS
from minillm_core.plan.why.answer import CORE, Answer, Held, Refused
from minillm_core.plan.why.merged import UNCLAIMED, claim_answer
from minillm_core.plan.words import words
from minillm_core.plugins.builders import ModelSlots, OptimizerSlots, ParamInfo
from minillm_core.plugins.slots import Claim

__all__ = ["optimizer_answers"]

DEFAULT_RULE = "adamw"
OWN = "the rule's own"
USUAL = {"lr_mul": 1.0, "wd_mul": 1.0, "betas": None}
"""What is set for a parameter of which neither its module nor a plugin says anything."""


def optimizer_answers(slots: OptimizerSlots, model: ModelSlots) -> Iterator[Answer]:
    """Rules, parameters; and the claims on each parameter by the names of their slots."""
    followers = Counter(_followed(slots, name) for name in slots.parameters)
    for name in sorted(slots.rules):
        count = followers[name]
        what = "1 parameter follows it" if count == 1 else f"{count} parameters follow it"
        provider = Held(slots.rules[name][0], what, "provides it")
        yield Answer(f"opt.rule[{name}]", "claim", (provider,), also=(name,))
        yield from _stages(name, slots)
    for info in slots.parameters.values():
        claims = tuple(_claims(info, slots, model))
        yield _parameter(info, claims, model)
        yield from claims


def _followed(slots: OptimizerSlots, parameter: str) -> str:
    claim = slots.assigned.get(parameter)
    return next(iter(claim.held.values())) if claim else DEFAULT_RULE


def _stages(name: str, slots: OptimizerSlots) -> Iterator[Answer]:
    """The stages of a rule, in order: the provider's, the core's, or an extension's."""
    owner, drafts = slots.rules[name]
    for anchor in ANCHORS:
        draft = drafts.get(anchor)
        why = f"a stage of the rule that {'the core' if owner == CORE else owner} provides"
        slot = f"opt.rule[{name}].{anchor}"
        try:
            extension = slots.extension(name, anchor)
        except PlanError as error:
            yield Answer(slot, "claim", (), (Refused((), error.what, error.fix),))
            continue
        if extension.held:
            instead = f"extends the rule, in the place of {words(draft)}" if draft else "extends it"
            answer = claim_answer(extension, "", slot=slot)
            held = tuple(Held(one.owner, one.what, instead) for one in answer.held)
            yield Answer(slot, "claim", held, answer.refused)
        elif draft is not None:
            yield Answer(slot, "claim", (Held(owner, words(draft), why),))


def _claims(info: ParamInfo, slots: OptimizerSlots, model: ModelSlots) -> Iterator[Answer]:
    """The claims on one parameter: initial values, rule, multipliers."""
    name = info.name
    init = model.init.get(name) or Claim(f"model.init[{name}]")
    yield claim_answer(init, _declared(info.init))
    assigned = slots.assigned.get(name) or Claim(f"opt.assign[{name}]")
    answer = claim_answer(
        assigned,
        DEFAULT_RULE,
        also=tuple(f"opt.assign[{rule}]" for rule in {*assigned.held.values()}),
    )
    yield replace(answer, usual=not assigned.held)
    for field, usual in USUAL.items():
        slot = f"opt.set[{name}].{field}"
        claim = slots.multipliers.get((name, field)) or Claim(slot)
        value = getattr(info, field, None)  # what its module declares
        default = OWN if value is None else f"{value:g}"
        yield replace(claim_answer(claim, default), usual=not claim.held and value == usual)


def _declared(init: Mapping[str, Any]) -> str:
    """Initial values as their module declares them."""
    numbers = (value for key, value in init.items() if key != "init")
    shown = ", ".join(f"{n:.4g}" if isinstance(n, float) else str(n) for n in numbers)
    return f"{str(init['init']).capitalize()}({shown})"


def _parameter(info: ParamInfo, claims: tuple[Answer, ...], model: ModelSlots) -> Answer:
    """All of it in one answer: who declares it, and each claim that is held or was refused."""
    shape = " x ".join(map(str, info.shape))
    held = [Held(info.owner, f"{shape}, {info.role}", "declares it")]
    refused = []
    for answer in claims:
        short = answer.slot.replace(f"[{info.name}]", "")
        always = not short.startswith("opt.set")
        held += [
            Held(one.owner, one.what, f"{short}: {one.why}")
            for one in answer.held
            if always or one.why != UNCLAIMED
        ]
        refused += answer.refused
    leaf = model.linear.get(info.name.removesuffix(".weight"))
    if leaf is not None:
        held += [
            Held(who, words(node), "model.linear: claims it") for who, node in leaf.held.items()
        ]
    return Answer(info.name, "parameter", tuple(held), tuple(refused))
