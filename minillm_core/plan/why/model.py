"""The slots of the model outside attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minillm_core.plan.why.answer import CORE, Answer, Held
from minillm_core.plan.why.merged import (
    UNCLAIMED,
    chain_answers,
    claim_answer,
)
from minillm_core.plan.words import words
from minillm_core.plugins.builders import ModelSlots
from minillm_core.plugins.slots import Terms

__all__ = ["model_answers"]

JOINS = {"mid": ("sublayer",), "out": ("sublayer",)}
"""What joins the stream at a site of a layer, besides what carries on."""


def model_answers(slots: ModelSlots) -> Iterator[Answer]:
    """Embedding, streams, taps, sublayers, norms, residual sites, products; not initial values."""
    g = slots.geometry
    kv = "" if g.kv_heads == g.heads else f" ({g.kv_heads} key-value)"
    yield from chain_answers(slots.embed)
    yield from _named(slots.streams)
    yield from _named(slots.tap_names)
    for i in range(g.layers):
        attention = f"attention {g.heads} x {g.head_dim}{kv}"
        yield claim_answer(slots.attention[i], attention, also=(f"layers.{i}.attention",))
        yield claim_answer(slots.mlp[i], f"SwiGLU {g.hidden}", also=(f"layers.{i}.mlp",))
    for site, norm in slots.norm.items():
        yield claim_answer(norm, "RMSNorm", also=(site,))
    for site in slots.residual:
        yield from _sources(site, slots)
    for leaf, claim in sorted(slots.linear.items()):
        yield claim_answer(claim, "x W^T", also=(leaf,))


def _named(terms: Terms[Any]) -> Iterator[Answer]:
    """An answer a name; or that there is none."""
    for key, owner, value in terms.resolve():
        yield Answer(f"{terms.where}[{key}]", "term", (Held(owner, words(value), "adds it"),))
    if not terms.held:
        yield Answer(terms.where, "term", (Held(CORE, "none", UNCLAIMED),))


def _sources(site: str, slots: ModelSlots) -> Iterator[Answer]:
    """An answer a source: carry, what joins there, and what plugins add."""
    terms = slots.residual[site]
    held = {
        str(key): Held(owner, words(coefficient), "claims it")
        for key, owner, coefficient in terms.resolve()
    }
    joins = JOINS.get(site.rpartition(".")[2], ())
    for source in dict.fromkeys(("carry", *joins, *held)):
        one = held.get(source, Held(CORE, "1", UNCLAIMED))
        yield Answer(f"{terms.where}[{source}]", "claim", (one,), also=(f"{site}[{source}]",))
