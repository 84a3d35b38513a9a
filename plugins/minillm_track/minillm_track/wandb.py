"""Weights & Biases: offline, in the run's folder, unless ``wandb.mode=online``.

``wandb sync OUT/wandb/latest-run`` uploads an offline run later. A resumed run has several folders
under one id; each is logged from the first step, from metrics.jsonl, since a kill loses the entries
that W&B has not written yet: the last folder is complete.

W&B's step counter never decreases, and it drops entries with an earlier step. Charts therefore use the
logged metric ``step`` as x-axis; after a spike the counter continues while ``step`` goes back, so the
repeated steps appear twice. W&B cannot revoke them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PrivateAttr

from minillm_core import Event, Plugin, Started, option
from minillm_track.entries import flat
from minillm_track.log import Log, identity, inside

__all__ = ["WandB"]

_REFUSED = re.compile(r"[:;,#?/'%\\]")
"""Characters that W&B refuses in a run's id."""


class WandB(Plugin, api=1, requires=("wandb>=0.20",)):
    """Logs a run's figures, events and settings to Weights & Biases, offline by default."""

    mode: Literal["offline", "online"] = option(
        "offline",
        again=True,
        help="online: upload metrics while training; offline: store them for wandb sync",
    )
    project: str = option("minillm", min_length=1, help="project on W&B")
    entity: str | None = option(
        None, again=True, help="account or team; none: the account's default"
    )

    _log: Log = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Create the log; the tracker's run is opened when a run starts."""
        self._log = Log(self._open)

    def on_event(self, event: Event) -> None:
        self._log(event)

    def _open(self, started: Started, step: int) -> _Run:
        return _Run(self, started)


class _Run:
    """A wandb run that records no console output, code or commit."""

    forgets = True

    def __init__(self, options: WandB, started: Started) -> None:
        import wandb

        name = identity(started.out, "wandb")
        inside(started.out, "wandb")
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=name,
            id=_REFUSED.sub("-", name),
            dir=started.out,
            config=flat(started.settings),
            mode=options.mode,
            resume="allow" if options.mode == "online" else None,  # offline has no server to ask
            settings=wandb.Settings(
                console="off", disable_code=True, disable_git=True, silent=True
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self._row = self._run.step  # W&B's counter: that of the row not sent yet, 0 in a new run
        self._ahead = 0  # W&B's counter minus the run's step: what rewinds took back
        self._lines: list[str] = []  # of the row not sent yet

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the metrics of a step together."""
        number = step + self._ahead
        if number != self._row:
            self._lines.clear()  # also below: W&B had that row, with its lines, before the resume
            self._row = max(self._row, number)
        self._run.log({**figures, "step": step}, step=number)

    def line(self, kind: str, step: int, text: str) -> None:
        """Log text in the pending row: a new row would advance the counter and lose metrics."""
        self._lines.append(f"step {step}: {text}")
        self._run.log({"events": "\n".join(self._lines)}, commit=False)  # replaces the key's value

    def back(self, step: int, to: int) -> None:
        """Keep the counter, and increase its offset over the run's steps."""
        self._ahead += step - to

    def close(self, code: int) -> None:
        """Flush and close the run."""
        self._run.finish(exit_code=code)
