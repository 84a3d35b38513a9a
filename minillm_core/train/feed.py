"""The batches of a run: a loader that can be put back to where a checkpoint was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minillm_core.data import Loader, StepBatch
from minillm_core.plugins.streams import Streams
from minillm_core.train.hooks import batch_hook
from minillm_core.train.job import Job

__all__ = ["Feed"]

_GRACE = 2.0
"""Seconds that the end of a run waits for an ``on_batch`` which does not return."""


class Feed(Iterator[StepBatch]):
    """One step's batch after the other, from a cursor on; a context manager.

    Args:
        job: data, plugins and sizes.
        cursor: of a checkpoint; None: from the start.
        cancelled: asked while the next batch is waited for.
    """

    def __init__(
        self,
        job: Job,
        cursor: Mapping[str, Any] | None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._job, self._cancelled = job, cancelled
        self._loader = self._open(cursor)

    def __next__(self) -> StepBatch:
        """The next step's; waits for it.

        Raises:
            Cancelled: nobody wants to wait any more.
        """
        return next(self._loader)

    def rewind(self, cursor: Mapping[str, Any], skip: int) -> dict[str, Any]:
        """Go back to ``cursor`` and pass over ``skip`` steps' batches; the cursor after them."""
        self._loader.close()
        self._loader = self._open(cursor)
        for _ in range(skip):
            cursor = next(self._loader).cursor
        return dict(cursor)

    def _open(self, cursor: Mapping[str, Any] | None) -> Loader:
        config = self._job.config
        streams = Streams(config.seed, (cursor or {}).get("random"))
        on_batch = batch_hook(
            self._job.plan.on_batch,
            self._job.plugins,
            self._job.seen,
            config.model.vocab,
            streams,
            self._job.plan.batch_fields,
        )
        return Loader(
            self._job.corpus.train,
            rows=config.train.rows,
            accumulate=config.train.accumulate,
            seq_len=config.train.seq_len,
            seed=config.data.seed,
            on_batch=on_batch,
            cursor=cursor,
            memory=(lambda: {"random": streams.data()}) if on_batch else dict,
            cancelled=self._cancelled,
        )

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loader.close(_GRACE)
