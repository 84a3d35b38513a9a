"""Length bucketing: group documents of similar length, for data such as chats whose lengths vary widely.

Documents are shuffled and divided into buckets of ``documents`` each; a bucket is sorted by length,
and the buckets stay in random order. Neighbours then have similar lengths, so that rows hold many
short documents or few long ones.

Cost: batches are less mixed than shuffled ones. A single bucket of all documents is a curriculum from
short to long, the same in every epoch and for every seed, except among documents of equal length.
"""

from __future__ import annotations

import numpy as np

from minillm_core import Plugin, option

__all__ = ["LengthBuckets", "bucketed"]


class LengthBuckets(Plugin, api=1):
    """Documents of similar length side by side: sorted within buckets, which are shuffled."""

    documents: int = option(1000, ge=2, help="documents per bucket")

    def build_data(self, data):
        data.order(bucketed, documents=self.documents)


def bucketed(lengths: np.ndarray, seed: int, epoch: int, *, documents: int) -> np.ndarray:
    """Compute the order of an epoch's documents.

    Args:
        lengths: int64 (documents,), tokens of each document.
        seed: data.seed.
        epoch: the epoch, from 0.
        documents: documents per bucket; the last bucket may have fewer.

    Returns:
        A permutation, int64 (documents,).
    """
    shuffled = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    bucket = np.arange(len(lengths)) // documents
    return shuffled[np.lexsort((lengths[shuffled], bucket))]
