"""Going back at a spike of the loss: PaLM's remedy (arXiv:2204.02311, section 5.1)."""

from __future__ import annotations

from pathlib import Path

from minillm_core.backends.base import Trainer
from minillm_core.checkpoint import Checkpoint, discard, layout, verify
from minillm_core.train.feed import Feed
from minillm_core.train.position import Position
from minillm_core.train.resume import load

__all__ = ["Rewind"]


class Rewind:
    """Puts a run back to a checkpoint, and passes over the batches that came then.

    Args:
        out: the run's folder.
        trainer: is put back.
        feed: is put back.
        back: steps at least between the checkpoint and the spike.
        skip: steps' batches to pass over, for each time that it goes back to a checkpoint.
    """

    def __init__(self, out: Path, trainer: Trainer, feed: Feed, *, back: int, skip: int) -> None:
        self._out, self._trainer, self._feed = out, trainer, feed
        self._back, self._skip = back, skip

    def __call__(self, step: int, rewinds: int) -> tuple[Position, int] | None:
        """Go back from the spike at ``step``.

        Later checkpoints are removed: they lead to the spike again. Going back to the same one
        again passes over as many batches more, since the same batches would lead there too.

        Args:
            step: of the spike.
            rewinds: how often the run went back before.

        Returns:
            Where the run is now and how many steps' batches it passed over; None, and nothing has
            changed, where no checkpoint that verifies is old enough.
        """
        for saved, path in layout.folders(self._out):
            if saved <= step - self._back and not verify(path):
                position = load(Checkpoint(path, saved), self._trainer)
                discard(self._out, after=saved)
                skip = self._skip * (1 + rewinds - position.rewinds)
                position.cursor = self._feed.rewind(position.cursor, skip)
                return position, skip
        return None
