"""Early stopping: a run ends when its held-out loss has stopped falling (Prechelt, 1998).

The run ends, as a completed one, when none of ``patience`` consecutive evaluations has a loss that is
lower than the lowest before them by more than ``least``. ``checkpoint.best=true`` keeps the best
checkpoint.
"""

from __future__ import annotations

from minillm_core import Plugin, Verdict, option


class EarlyStop(Plugin, api=1):
    """Ends a run whose held-out loss has stopped falling."""

    patience: int = option(
        3, ge=1, help="number of consecutive evaluations without a new lowest loss"
    )
    least: float = option(0.0, ge=0, help="minimum improvement, in nats, for a new lowest loss")

    def on_evaluated(self, evaluated, history):
        best, since = float("inf"), 0
        for one in (*history, evaluated):
            since += 1
            if one.val_loss < best - self.least:
                best, since = one.val_loss, 0
        stop = (
            f"no lower loss than {best:.4f} in {since} evaluations"
            if since >= self.patience
            else ""
        )
        return Verdict({"best": best, "since": since}, stop)
