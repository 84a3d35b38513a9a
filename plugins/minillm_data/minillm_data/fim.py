"""Fill in the middle (FIM; Bavarian et al. 2022, arXiv 2207.14255): train on documents with the middle last.

A document is cut at two random positions into a prefix, a middle and a suffix, and rearranged
into one of

    PSM    <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> middle
    SPM    <|fim_prefix|> <|fim_suffix|> suffix <|fim_middle|> prefix middle

for an ordinary left-to-right model. A document's initial end-of-text id and the special tokens after
it stay in front. The cuts are between tokens and drawn anew in every epoch. The part of a document in
a row counts as a document ("context level" in the paper, which finds it better than cutting before
packing). Evaluation and generation use unmodified text.

Cost: three tokens per document; as many tokens are cut at the row's end. To fill in a middle, prompt
with the special tokens and the surrounding text; a base model trained without FIM does not know them.
"""

from __future__ import annotations

import numpy as np

from minillm_core import Plugin, option, random_stream
from minillm_data.relaid import Layout, as_it_is, relaid, stretches

__all__ = ["Fim"]

NAMES = ("fim_prefix", "fim_middle", "fim_suffix")


class Fim(Plugin, api=1, unweighted=True):
    """Fill in the middle: the middle of some documents is moved to their end."""

    rate: float = option(0.5, gt=0, le=1, help="fraction of documents that are rearranged")
    spm: float = option(
        0.5, ge=0, le=1, help="fraction of these in the order suffix, prefix, middle (SPM)"
    )
    prefix: str = option("<|fim_prefix|>", help="text of the special token before the prefix")
    middle: str = option("<|fim_middle|>", help="text of the special token before the middle")
    suffix: str = option("<|fim_suffix|>", help="text of the special token before the suffix")
    add: bool = option(False, help="add these special tokens to a given tokenizer that lacks them")

    def build_data(self, data):
        texts = (self.prefix, self.middle, self.suffix)
        for name, text in zip(NAMES, texts, strict=True):
            data.special(name, text, add=self.add)
        data.rewrites()

    def on_batch(self, batch, phase, specials):
        if phase != "train":
            return batch
        rng, rows = random_stream(), []
        fields = (batch[name] for name in ("ids", "labels", "documents"))
        for ids, labels, documents in zip(*fields, strict=True):
            over = labels == specials["end_of_text"]  # a document ends where the next one begins
            places = stretches(documents)
            rows.append([self._laid(ids, over, *ends, specials, rng) for ends in places])
        return relaid(batch, rows)

    def _laid(self, ids, over, first, end, specials, rng):
        """Draw whether and where to cut the segment ``ids[first:end]``; return its layout."""
        chosen, swapped, *cuts = rng.random(4)
        control = np.isin(ids[first:end], [*specials.values()])
        front = first + (int(np.argmin(control)) if not control.all() else end - first)
        if chosen >= self.rate or front >= end:
            return as_it_is(first, end)
        before, after = sorted(front + int(cut * (end - front + 1)) for cut in cuts)
        prefix, middle, suffix = (
            np.arange(*ends) for ends in ((front, before), (before, after), (after, end))
        )
        pre, mid, suf = (np.array([-1 - specials[name]]) for name in NAMES)
        if swapped < self.spm:
            parts = (pre, suf, suffix, mid, prefix, middle)
        else:
            parts = (pre, prefix, suf, suffix, mid, middle)
        take = np.concatenate([np.arange(first, front), *parts])
        return Layout(take, np.ones(len(take), bool), ends=bool(over[end - 1]))
