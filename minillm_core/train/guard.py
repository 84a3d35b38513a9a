"""Steps that went wrong: how many that were not finite a run bears, and when a loss is a spike.

The device leaves an update out by itself where the loss or a gradient is not finite; here it is
counted, one step late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from minillm_core.backends.base import StepResult
from minillm_core.errors import NonFinite
from minillm_core.train.budget import Position
from minillm_core.train.checkpoints import CheckpointManager
from minillm_core.train.errors import kept
from minillm_core.train.events import Event, Guarded, Rewound

WINDOW = 100
"""Steps that are looked back on."""

LIMIT = 10
"""Of these many that were not finite end the run."""

MEMORY = 64
"""Losses whose median a spike is measured against."""

FEWEST = 16  # losses that a median is worth something of

REWINDS = 10
"""Spikes after which the settings are at fault, and not the batches."""


def recent(guarded: Sequence[int], step: int) -> tuple[int, ...]:
    """Keep those of the steps ``guarded`` that are among the hundred up to ``step``."""
    return tuple(one for one in guarded if one > step - WINDOW)


def is_spike(loss: float, losses: Sequence[float], nats: float) -> bool:
    """Tell whether a loss is more than ``nats`` over the median of those before it."""
    return len(losses) >= FEWEST and loss > median(losses) + nats


@dataclass(frozen=True)
class Guard:
    """A guard that counts the steps that were not finite, and goes back where the loss has a spike."""

    checkpoints: CheckpointManager  # their events come before a run ends or goes back to one
    emit: Callable[[Event], None]  # takes every event, in order
    say: Callable[[str], None]
    spike: (
        float  # nats over the median of the last losses from which on the run goes back; 0: never
    )

    def take(
        self, position: Position, step: int, result: StepResult
    ) -> tuple[Position, Rewound] | None:
        """Take note of a step that was read.

        Args:
            position: the run's, one step ahead perhaps; its counts are kept there.
            step: which.
            result: how it went.

        Returns:
            The earlier position and the event to emit; None: the run was not rewound.

        Raises:
            NonFinite: too many steps were not finite, or had a spike.
        """
        if result.skipped or not math.isfinite(result.loss):
            self._count(position, step, result)
            return None
        return self._look(position, step, result.loss) if self.spike else None

    def end(self, position: Position) -> None:
        """Check, after the last step, that the run learnt anything.

        Raises:
            NonFinite: not one of them was finite.
        """
        if 0 < position.step == len(position.guarded):
            raise self._failed(
                f"none of the {position.step} steps was finite: nothing was learnt", position
            )

    def _count(self, position: Position, step: int, result: StepResult) -> None:
        """Count a step that was not finite; float16's own overflows, which halve a scale, apart."""
        if result.overflow:
            return
        guarded = (*recent(position.guarded, step), step)
        position.guarded = guarded
        self.emit(Guarded(step, result.loss, result.grad_norm, len(guarded)))
        if len(guarded) >= LIMIT:
            raise self._failed(
                f"{len(guarded)} of the last {WINDOW} steps were not finite: the loss of "
                f"step {step} is {result.loss}, the norm of its gradients {result.grad_norm}",
                position,
            )

    def _look(self, position: Position, step: int, loss: float) -> tuple[Position, Rewound] | None:
        """Go back where the loss has a spike."""
        if not is_spike(loss, position.losses, self.spike):
            position.losses = (*position.losses, loss)[-MEMORY:]
            return None
        if position.rewinds >= REWINDS:
            raise self._failed(
                f"the loss had a spike at step {step}, after {position.rewinds} others: {loss:.4f}",
                position,
            )
        self.checkpoints.report(position, wait=True)
        found = self.checkpoints.rewind(step, position.rewinds)
        if found is None:
            self.say(
                f"warning: the loss of step {step} is a spike ({loss:.4f}), and no checkpoint is "
                "old enough to go back to: the run goes on"
            )
            position.losses = (*position.losses, loss)[-MEMORY:]
            return None
        earlier, passed_over = found
        earlier.rewinds = position.rewinds + 1
        return earlier, Rewound(step, loss, earlier.step, passed_over)

    def _failed(self, what: str, position: Position) -> NonFinite:
        self.checkpoints.settle(position)
        return NonFinite(what, where=kept(position))
