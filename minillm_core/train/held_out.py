"""The held-out part of a run's data, as plugins leave it: what its model is validated on."""

from __future__ import annotations

from collections.abc import Callable

from minillm_core.data import OnBatch, bytes_per_token, validation_batches
from minillm_core.plugins.streams import Streams
from minillm_core.train.evaluate import Validation
from minillm_core.train.hooks import batch_hook
from minillm_core.train.job import Job

__all__ = ["hook_outside_training", "validation"]


def validation(
    job: Job,
    tokens: int,
    *,
    cancelled: Callable[[], bool],
    progress: Callable[[int, int], None] = lambda predictions, of: None,
) -> Validation:
    """What a job's trainer is evaluated with.

    Args:
        job: held-out documents, plugins and sizes.
        tokens: predictions of one evaluation.
        cancelled: asked before every batch.
        progress: is told before every batch how many predictions there were so far, and will be.
    """
    config, tokenizer = job.config, job.corpus.tokenizer
    batches = validation_batches(
        job.corpus.val,
        rows=config.train.rows,
        seq_len=config.train.seq_len,
        tokens=tokens,
        seed=None,  # it is in seeded order already
        on_batch=hook_outside_training(job),
    )
    return Validation(
        job.trainer,
        batches,
        bytes_per_token(tokenizer, config.model.vocab) if tokenizer else None,
        cancelled=cancelled,
        progress=lambda done: progress(done, batches.predictions),
    )


def hook_outside_training(job: Job) -> OnBatch | None:
    """The plugins' hook for other phases than train, whose streams begin anew with every batch."""
    config = job.config
    return batch_hook(
        job.plan.on_batch,
        job.plugins,
        job.seen,
        config.model.vocab,
        Streams(config.seed),
        job.plan.batch_fields,
    )
