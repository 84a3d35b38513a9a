"""A short sample of what the model writes."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from minillm_core.backends.base import Model, lone_row
from minillm_core.text import printable

__all__ = ["pick", "sample"]


class Decoder(Protocol):
    """The part of a tokenizer that is needed."""

    size: int
    end_of_text: int

    def decode(self, ids: list[int]) -> str: ...


def pick(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """Draw an id.

    Args:
        logits: float32 (V,).
        temperature: above 0.
        random: one number is drawn from it.
    """
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    edges = np.cumsum(weights)
    return min(
        int(np.searchsorted(edges, random.random() * edges[-1], side="right")), len(edges) - 1
    )


def sample(
    trainer: Model,
    tokenizer: Decoder,
    *,
    tokens: int = 64,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """What the model writes at the beginning of a document.

    Args:
        trainer: gives the logits.
        tokenizer: decodes; ids that it does not know are never drawn.
        tokens: how many at most; the end of the document ends it earlier.
        context: most tokens that the model is shown.
        temperature: above 0; lower is safer.
        seed: of the draws, which move no other randomness.

    Returns:
        Text without terminal control sequences and without half a character at its end.
    """
    random = np.random.default_rng(seed)
    ids = [tokenizer.end_of_text]
    for _ in range(tokens):
        logits = trainer.next_logits(lone_row(np.asarray(ids[-context:], np.int32)))
        drawn = pick(logits[: tokenizer.size], temperature, random)
        if drawn == tokenizer.end_of_text:
            break
        ids.append(drawn)
    # bytes of a character whose rest was not drawn any more decode to replacement characters
    return printable(tokenizer.decode(ids[1:]).rstrip("\ufffd"))
