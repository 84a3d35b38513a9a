"""Prefix tokens: the longest prefix of the next token is predicted too (modded-nanogpt, record 88, by jvarho).

    loss = CE(next) + w CE(prefix of next),     prefix: the longest token whose bytes start those of next

" thinking" starts with " think", so a prediction of " think" is partly right. A tokenizer hides this
similarity; the added loss term rewards it. The prefix is shorter than the token; tokens of a single
byte and special tokens have none. No further token of the text is read, and one head and one hidden
state serve both targets.

The weight is 0.25 for a third of the run and falls to 0 in the second third; the last third is
compiled without the term. Prefixes are computed from the tokenizer, so that a run on shards must
set ``data.tokenizer``. Together with ``mtp`` both add targets, as in the records. Evaluation and
generation do not use it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from pydantic import model_validator

from minillm_core import DataError, Plugin, option, piecewise

__all__ = ["PrefixTokens", "prefixes"]

FIELD = "prefix_token"


class PrefixTokens(Plugin, api=1, unweighted=True):
    """Prediction of the longest token that is a prefix of the next one, with a weight that falls to 0."""

    weight: float = option(
        0.25, gt=0, help="initial loss weight of the prefix; the next token has weight 1"
    )
    hold: float = option(
        1 / 3, ge=0, lt=1, help="fraction of the run after which the weight starts to fall"
    )
    end: float = option(2 / 3, gt=0, le=1, help="fraction of the run at which the weight reaches 0")

    @model_validator(mode="after")
    def _holds_before_it_ends(self) -> PrefixTokens:
        if self.hold >= self.end:
            raise ValueError("hold is less than end: the weight falls between them")
        return self

    def build_data(self, data):
        data.field(FIELD, "int32")

    def compute_loss(self, loss):
        falls = piecewise((self.hold, self.weight), (self.end, 0.0))
        loss.target(falls, field=FIELD, until=self.end)

    def on_batch(self, batch, phase, pieces):
        labels = batch["labels"]
        if phase != "train":
            return {**batch, FIELD: np.full_like(labels, -1)}
        if not pieces:
            raise DataError(
                "prefix_tokens needs the bytes of tokens, but the run has no tokenizer",
                where="data.tokenizer",
                fix="data.tokenizer=FILE, the one that the shards were written with",
            )
        return {**batch, FIELD: np.where(labels >= 0, prefixes(pieces)[labels], -1)}


@lru_cache(maxsize=2)
def prefixes(pieces: tuple[bytes, ...]) -> np.ndarray:
    """Return int32 (V,): the id of the longest token whose bytes are a proper prefix of each id's; -1: none.

    Args:
        pieces: the bytes of each id, empty for special ones. Among ids with equal bytes the lowest is used.
    """
    ids: dict[bytes, int] = {}
    for index, piece in enumerate(pieces):
        ids.setdefault(piece, index)
    ids.pop(b"", None)
    found = np.full(len(pieces), -1, np.int32)
    for index, piece in enumerate(pieces):
        ends = range(len(piece) - 1, 0, -1)
        found[index] = next((ids[piece[:end]] for end in ends if piece[:end] in ids), -1)
    found.flags.writeable = False
    return found
