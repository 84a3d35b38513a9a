"""Weights & Biases: offline, in the run's folder, unless ``wandb.mode=online``.

``wandb sync OUT/wandb/latest-run`` sends an offline run later. One that was resumed has several
folders under one id; each has the run from its first step on, told again from metrics.jsonl, since a
kill takes what W&B had not written yet: the last one is all of it.

W&B's own counter never goes back and drops what is told of an earlier number. Charts are therefore
drawn over the figure ``step``, and after a spike the counter goes on while ``step`` goes back: the
steps in between are there twice, which W&B gives no way to take back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PrivateAttr

from minillm_core import Event, Plugin, Started, option
from minillm_track.log import Log, identity, inside
from minillm_track.told import flat

__all__ = ["WandB"]


class WandB(Plugin, api=1, requires=("wandb>=0.20",)):
    """Logs a run's figures, events and settings to Weights & Biases, offline unless told."""

    mode: Literal["offline", "online"] = option(
        "offline",
        again=True,
        help="online sends figures while it trains; offline writes them for wandb sync",
    )
    project: str = option("minillm", min_length=1, help="the project on W&B")
    entity: str | None = option(
        None, again=True, help="the account or team; none: the account's own"
    )

    _log: Log = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Nothing is opened before a run starts."""
        self._log = Log(self._open)

    def on_event(self, event: Event) -> None:
        self._log(event)

    def _open(self, started: Started, step: int) -> _Run:
        return _Run(self, started)


class _Run:
    """One run of wandb's: it sees no output, no code and no commit."""

    forgets = True

    def __init__(self, asked: WandB, started: Started) -> None:
        import wandb

        name = identity(started.out, "wandb")
        inside(started.out, "wandb")
        self._run = wandb.init(
            project=asked.project,
            entity=asked.entity,
            name=name,
            id=name,
            dir=started.out,
            config=flat(started.settings),
            mode=asked.mode,
            resume="allow" if asked.mode == "online" else None,  # offline has nobody to ask
            settings=wandb.Settings(
                console="off", disable_code=True, disable_git=True, silent=True
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self._ahead = 0  # of W&B's counter over the run's steps

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """All of a step together."""
        self._run.log({**figures, "step": step}, step=step + self._ahead)

    def line(self, kind: str, step: int, text: str) -> None:
        """As text in the row that is being written: a counter that ran ahead would lose figures."""
        self._run.log({"events": f"step {step}: {text}"}, commit=False)

    def back(self, step: int, to: int) -> None:
        """The counter goes on where it is."""
        self._ahead += step - to

    def close(self, code: int) -> None:
        """Write what is left."""
        self._run.finish(exit_code=code)
