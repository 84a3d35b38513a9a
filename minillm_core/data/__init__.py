"""Text to batches: the training data, in a reproducible and resumable order.

    corpus = open_corpus(config.data, vocab, seq_len, cache=cache, say=print)
    with Loader(corpus.train, rows=8, accumulate=1, seq_len=256, seed=config.data.seed) as loader:
        for step in loader:                        # StepBatch, without end
            step.micro, step.supervised            # int32 (rows, T) arrays; labels >= 0 in all
            step.cursor                            # JSON; Loader(..., cursor=) resumes from here
    ValidationBatches(corpus.val, rows=8, seq_len=256, tokens=65_536, seed=None)

    sources, formats, shards    files: discovery, decompression, parsing
    tokenizer, bpe, cutting     byte-level BPE, trained or loaded; very long words
    tokenise, store             files to ids, in the token cache on disk
    corpus                      the training and the validation part
    blocks                      documents that are tokenised while training reads the first ones
    documents                   ids on disk, and their seeded order
    stream                      an endless stream of them, rows cut from it, and rows of a mixture
    batch                       the dataloaders

The order of the documents depends only on data.seed and the epoch. All errors of the data are a
:class:`~minillm_core.errors.DataError`, raised before the first batch.
"""

from __future__ import annotations

from minillm_core.data.batch import Batch, Cancelled, Loader, OnBatch, StepBatch, ValidationBatches
from minillm_core.data.corpus import Corpus, open_corpus, open_documents
from minillm_core.data.documents import Cursor, Documents
from minillm_core.data.shards import write_shard
from minillm_core.data.tokenizer import END_OF_TEXT, Tokenizer, bytes_per_token

__all__ = [
    "END_OF_TEXT",
    "Batch",
    "Cancelled",
    "Corpus",
    "Cursor",
    "Documents",
    "Loader",
    "OnBatch",
    "StepBatch",
    "Tokenizer",
    "ValidationBatches",
    "bytes_per_token",
    "open_corpus",
    "open_documents",
    "write_shard",
]
