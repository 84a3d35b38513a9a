"""A run's checkpoints, written in the background; what became of each is told as an event."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minillm_core.backends.base import Trainer
from minillm_core.checkpoint import Result, Writer
from minillm_core.errors import MinillmError, NonFinite
from minillm_core.train.events import Event, Saved, Unsaved
from minillm_core.train.position import Position

__all__ = ["Saves"]


class Saves:
    """Begins saves, and tells of those that ended.

    Args:
        out: the run's folder.
        trainer: what is saved.
        writer: writes it.
        constants: scalars that every checkpoint of the run holds.
        say: prints a line.
        go_on: one that cannot be written does not end the run.
    """

    def __init__(
        self,
        out: Path,
        trainer: Trainer,
        writer: Writer,
        constants: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        go_on: bool = False,
    ) -> None:
        self._out, self._trainer, self._writer = out, trainer, writer
        self._constants, self._say, self._go_on = dict(constants), say, go_on

    def begin(self, position: Position) -> None:
        """Take a snapshot and have it written; waits for the save before it."""
        scalars = {**position.data(), **self._constants}
        snapshot = self._trainer.snapshot()
        if snapshot.note:
            self._say(f"step {position.step}: {snapshot.note}")
        self._writer.submit(position.step, snapshot, scalars)

    def finished(self) -> Iterator[Event]:
        """What has become of the saves since the last call; does not wait.

        Raises:
            Exception: one could not be written, and the run is not to go on.
        """
        yield from map(self._event, self._writer.finished())

    def wait(self) -> Iterator[Event]:
        """The same, once all are done."""
        yield from map(self._event, self._writer.wait())

    def _event(self, result: Result) -> Event:
        if result.path is not None:
            if result.error is not None:  # it is saved; what is left over costs room alone
                self._say(f"warning: {result.error}")
            return Saved(result.step, str(result.path.relative_to(self._out)), result.seconds)
        error = result.error or MinillmError(f"the checkpoint of step {result.step} is lost")
        if self._go_on and not isinstance(error, NonFinite):
            return Unsaved(result.step, str(error))
        raise error
