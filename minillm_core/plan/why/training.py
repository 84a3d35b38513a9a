"""The slots of the loss and of the data, and the hooks that are called while a run lasts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from minillm_core.ops.form import LossForm
from minillm_core.plan.plan import Plan
from minillm_core.plan.why.answer import CORE, Answer, Held
from minillm_core.plan.why.merged import NOTHING, UNCLAIMED, claim_answer
from minillm_core.plan.words import words
from minillm_core.plugins.builders import DataSlots, LossSlots

__all__ = ["data_answers", "hook_answers", "loss_answers"]

TRAINING = "adds it, in training alone"


def loss_answers(slots: LossSlots) -> Iterator[Answer]:
    """The form of the logits, the targets, the terms."""
    for name, claim in slots.form.items():
        default = getattr(LossForm(), name)
        yield claim_answer(claim, "none" if default is None else words(default))
    yield Answer(
        "loss.target[next]", "term", (Held(CORE, "weight 1", "the main target, always there"),)
    )
    for key, owner, target in slots.targets.resolve():
        held = Held(owner, f"weight {words(target.weight)}", TRAINING)
        yield Answer(f"loss.target[{key}]", "term", (held,))
    for key, owner, term in slots.terms.resolve():
        what = term.emitted if term.node is None else words(term.node)
        held = Held(owner, f"{what}, weight {words(term.weight)}", TRAINING)
        yield Answer(f"loss.term[{key}]", "term", (held,))
    if not slots.terms.held:
        yield Answer("loss.term", "term", (Held(CORE, "none", UNCLAIMED),))


def data_answers(slots: DataSlots) -> Iterator[Answer]:
    """Further fields of the batch."""
    for key, owner, field in slots.fields.resolve():
        what = ", ".join(map(str, (f"{field.dtype} (rows, T", *field.shape)))
        readers = sorted(name for name, reads in slots.reads.items() if key in reads)
        why = "its on_batch writes it" + "".join(f"; that of '{name}' reads it" for name in readers)
        yield Answer(f"data.field[{key}]", "term", (Held(owner, f"{what})", why),))
    if not slots.fields.held:
        yield Answer("data.field", "term", (Held(CORE, "none", UNCLAIMED),))


def hook_answers(plan: Plan) -> Iterator[Answer]:
    """``on_batch`` in the order of its calls; ``on_event``."""
    observers = [p.owner for p in plan.placements if p.slot == "on_event"]
    yield _called("on_batch", plan.on_batch, "who writes a field comes before who reads it")
    yield _called("on_event", observers, "is told of every event, apart from the others")


def _called(hook: str, plugins: Iterable[str], why: str) -> Answer:
    held = tuple(Held(name, hook, why) for name in plugins)
    none = Held(CORE, NOTHING, "the default: no plugin implements it")
    return Answer(hook, "chain", held or (none,))
