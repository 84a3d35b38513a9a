"""Documents of like length one after another, for data such as chats whose lengths differ widely.

Documents are shuffled and divided into buckets of so many; within a bucket they are sorted by
length, and the buckets stay in random order. Neighbours then have like lengths, so that rows hold
many short documents or few long ones.

What it costs: batches are less mixed than shuffled ones. A bucket that holds all documents is a
curriculum from short to long, and every epoch and seed then has the same one, but for documents of one length.
"""

from __future__ import annotations

import numpy as np

from minillm_core import Plugin, option

__all__ = ["LengthBuckets", "bucketed"]


class LengthBuckets(Plugin, api=1):
    """Documents of like length follow each other: sorted within buckets, which are shuffled."""

    documents: int = option(1000, ge=2, help="documents of a bucket")

    def build_data(self, data):
        data.order(bucketed, documents=self.documents)


def bucketed(lengths: np.ndarray, seed: int, epoch: int, *, documents: int) -> np.ndarray:
    """Order the documents of an epoch.

    Args:
        lengths: int64 (documents,), tokens of each.
        seed: data.seed.
        epoch: from 0.
        documents: of a bucket; the last one may have fewer.

    Returns:
        A permutation, int64 (documents,).
    """
    shuffled = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    bucket = np.arange(len(lengths)) // documents
    return shuffled[np.lexsort((lengths[shuffled], bucket))]
