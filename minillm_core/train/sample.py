"""A short sample of what the model writes."""

from __future__ import annotations

from minillm_core.backends.base import Model
from minillm_core.data import OnBatch
from minillm_core.train.generate import Vocabulary, Writer
from minillm_core.train.sampling import Sampling

__all__ = ["sample"]


def sample(
    model: Model,
    vocabulary: Vocabulary,
    *,
    tokens: int = 64,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
    on_batch: OnBatch | None = None,
) -> str:
    """What the model writes at the beginning of a document.

    Args:
        model: gives the logits.
        vocabulary: decodes; ids that it does not know are never drawn.
        tokens: how many at most; the end of the document ends it earlier.
        context: most tokens that the model is shown.
        temperature: lower is safer.
        seed: of the draws, which move no other randomness.
        on_batch: the plugins'.

    Returns:
        Text without terminal control sequences and without half a character at its end.
    """
    writer = Writer(model, vocabulary, context, on_batch)  # so short a text is worth no cache
    written = writer.go_on("", Sampling(temperature), tokens=tokens, seed=seed, cached=False)
    return "".join(writer.text(written))
