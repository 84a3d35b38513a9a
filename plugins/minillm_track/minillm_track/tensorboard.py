"""TensorBoard event files in the run's folder; ``tensorboard --logdir runs`` shows all runs.

When a run returns to a checkpoint, on resume or after a spike, a marker in the file makes TensorBoard
hide the entries of later steps: no step is shown twice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from pydantic import PrivateAttr, field_validator

from minillm_core import Event, Plugin, Started, option
from minillm_track.entries import flat
from minillm_track.log import Log, inside

__all__ = ["TensorBoard"]


class TensorBoard(Plugin, api=1, requires=("tensorboard>=2.16",)):
    """Writes a run's figures, events and settings for TensorBoard."""

    folder: str = option("tensorboard", min_length=1, help="output folder, within the run's folder")
    flush_seconds: float = option(
        10.0, gt=0, help="seconds between two flushes to disk: the most that a kill loses"
    )

    _log: Log = PrivateAttr()

    @field_validator("folder")
    @classmethod
    def _within(cls, folder: str) -> str:
        path = PurePath(folder)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError("it leaves the run's folder, where a run writes nothing")
        return folder

    def model_post_init(self, context: Any) -> None:
        """Create the log; files are opened when a run starts."""
        self._log = Log(self._open)

    def on_event(self, event: Event) -> None:
        self._log(event)

    def _open(self, started: Started, step: int) -> _Files:
        return _Files(inside(started.out, self.folder), started, step, self.flush_seconds)


class _Files:
    """The event files of one run. tensorboard is imported here; tensorflow and torch are not."""

    forgets = False

    def __init__(self, folder: Path, started: Started, step: int, flush_seconds: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Entry
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._entry, self._session = Entry, SessionLog
        self._scalar, self._text = scalar_pb, text_pb
        self._writer = EventFileWriter(str(folder), flush_secs=flush_seconds)
        self._from(step)
        self._add(step, summary=hparams_pb(flat(started.settings)))

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        for name, value in figures.items():
            self._add(step, summary=self._scalar(name, value))

    def line(self, kind: str, step: int, text: str) -> None:
        """Write a text under a tag per kind: within a tag TensorBoard drops steps that are out of order."""
        self._add(step, summary=self._text(f"events/{kind}", text))

    def back(self, step: int, to: int) -> None:
        """Hide the entries of later steps."""
        self._from(to)

    def close(self, code: int) -> None:
        """Flush and close the files."""
        self._writer.close()

    def _from(self, step: int) -> None:
        """Write a session start, at which TensorBoard drops the entries of later steps."""
        self._add(step + 1, session_log=self._session(status=self._session.START))

    def _add(self, step: int, **entry: Any) -> None:
        self._writer.add_event(self._entry(wall_time=time.time(), step=step, **entry))
