"""trackio: a local database and dashboard (``trackio show``) that sends nothing over the network.

(Unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set, which trackio itself reads.) A resumed run keeps
its name. trackio cannot revoke steps and writes twice a second, so a kill loses some of them: on
resume the run is deleted from this machine's database and logged again from metrics.jsonl. After a
spike the repeated steps appear twice.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from pydantic import PrivateAttr

from minillm_core import Event, Plugin, Started, option
from minillm_track.entries import flat
from minillm_track.log import Log, identity

__all__ = ["Trackio"]


class Trackio(Plugin, api=1, requires=("trackio>=0.20",)):
    """Logs a run's figures, events and settings to trackio, on this machine."""

    project: str = option("minillm", min_length=1, help="project that groups the runs")

    _log: Log = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Create the log; the tracker's run is opened when a run starts."""
        self._log = Log(self._open)

    def on_event(self, event: Event) -> None:
        self._log(event)

    def _open(self, started: Started, step: int) -> _Run:
        return _Run(self.project, started)


class _Run:
    """A run of trackio; its messages go to stderr, as all of minillm's do."""

    forgets = True

    def __init__(self, project: str, started: Started) -> None:
        import trackio

        self._markdown, self._finish = trackio.Markdown, trackio.finish
        name = identity(started.out, "trackio")
        with redirect_stdout(sys.stderr):
            _remove(trackio.Api(), project, name)
            self._run = trackio.init(
                project=project,
                name=name,
                config=flat(started.settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the metrics of a step together."""
        self._run.log(dict(figures), step=step)

    def line(self, kind: str, step: int, text: str) -> None:
        """Log the line as a note."""
        self._run.log({"events": self._markdown(text)}, step=step)

    def back(self, step: int, to: int) -> None:
        """Do nothing: trackio cannot revoke steps."""

    def close(self, code: int) -> None:
        """Flush and close the run."""
        with redirect_stdout(sys.stderr):
            self._finish()  # the run's own method would run again at exit, and print


def _remove(api: Any, project: str, name: str) -> None:
    """Delete a run, so that it can be logged again from its first step."""
    try:
        runs = list(api.runs(project))
    except ValueError:  # the project does not exist yet
        return
    for run in runs:
        if run.name == name:
            run.delete()
