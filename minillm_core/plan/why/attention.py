"""The slots of attention, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from minillm_core.plan.why.answer import CORE, Answer, Held, Refused
from minillm_core.plan.why.merged import NOTHING, chain_answers, claim_answer, term_answer
from minillm_core.plan.words import function_words
from minillm_core.plugins.builders import AttentionSlots, ModelSlots
from minillm_core.plugins.slots import way_out

__all__ = ["attention_answers"]


def attention_answers(layers: Iterable[AttentionSlots], model: ModelSlots) -> Iterator[Answer]:
    """Every slot of every layer, also of one whose whole attention is replaced."""
    for layer, slots in enumerate(layers):
        whole = model.attention[layer].held
        for answer in _slots(slots):
            yield _replaced(answer, slots, min(whole)) if whole else answer


def _slots(slots: AttentionSlots) -> Iterator[Answer]:
    dim, base = slots.geometry.head_dim, slots.base
    yield from chain_answers(slots.qk)
    formula = f"base^(-2i/{dim}), i < {dim // 2}, base {base:,g}"
    yield claim_answer(slots.frequencies, formula, in_words=function_words)
    yield claim_answer(slots.scaling, "the frequencies as they are", in_words=function_words)
    yield claim_answer(slots.positions, "0, 1, 2 ... along the row")
    yield term_answer(slots.v, "v alone")
    yield claim_answer(slots.layout, "heads and positions as they are projected")
    yield claim_answer(slots.window, "every key up to the query's own")
    yield claim_answer(slots.documents, "every document of the row")
    yield claim_answer(slots.scale, f"{dim}^-1/2 = {dim**-0.5:.4g}")
    yield from chain_answers(slots.out)


def _replaced(answer: Answer, slots: AttentionSlots, owner: str) -> Answer:
    """The same slot in a layer whose whole attention ``owner`` replaces: there is none."""
    layer = slots.geometry.layer
    what = f"'{owner}' replaces the whole attention of layer {layer}"
    others = sorted({held.owner for held in answer.held} - {CORE, owner})
    clashes = (
        Refused(
            tuple(sorted((owner, other))),
            f"{what}, and '{other}' wants a slot of it",
            way_out(owner, other, slots.layered),
        )
        for other in others
    )
    gone = Held(owner, NOTHING, f"replaces the whole attention of layer {layer}")
    return Answer(answer.slot, answer.kind, (gone,), (*answer.refused, *clashes))
