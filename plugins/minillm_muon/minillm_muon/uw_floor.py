"""The u/w floor: an update's norm is at least a fraction of the weights' norm, in place of weight decay.

    u <- u max(1, floor |w| / |u|)              | | is a matrix's Frobenius norm, or a row's
    p <- p - lr u

modded-nanogpt's optimization track (its results of 2026-05-01 and 2026-06-19: 0.35 and, by rows, 0.3825): as
weights grow, their updates grow with them, and a matrix keeps rotating by lr floor radians per step, where weight
decay would have to limit its norm. It extends Muon after its scale, as the last stage before the write: a rule
with it has no weight decay (a note says so), and a floor of 0 is a rule without decay. By rows, only rows whose
own update is too small are scaled up, which also changes the update's direction; the published run then restores
the matrix's norm, which is not done here.

``cautious_wd`` fills the same slot: name the other rules there (``cautious_wd.rules=["adamw"]``).
"""

from __future__ import annotations

from typing import Any

from minillm_core import Plugin, option, stage

__all__ = ["UWFloor", "floored"]

LEAST = 1e-8  # minimum of norms: an update of 0 stays 0


class UWFloor(Plugin, api=1):
    """Updates have at least a fraction of the weights' norm, in place of weight decay."""

    floor: float = option(
        0.35,
        ge=0,
        search=(0.2, 0.35, 0.5),
        help="minimum norm of an update, as a fraction of the weights' norm",
    )
    rows: bool = option(
        False, help="apply the floor to each row of a matrix, instead of the whole matrix"
    )
    rules: tuple[str, ...] = option(
        ("muon",), min_length=1, help='update rules it applies to; "*": all'
    )

    def optimizer_factory(self, optimizer):
        for rule in self.rules:
            least = stage(floored, needs="matrix", floor=self.floor, rows=self.rows)
            optimizer.extend(rule, "decay", least)
        those = "every rule" if "*" in self.rules else ", ".join(self.rules)
        optimizer.note(
            f"replaces weight decay in {those}: train.weight_decay, weight_decay of the rule's "
            "plugin and role_lr.decay have no effect there"
        )


def floored(
    ops: Any, update: Any, param: Any, state: dict[str, Any], *, floor: float, rows: bool
) -> Any:
    """Scale up the update if its norm is below its fraction of param's; update, param (N, ..., C)."""
    axes = -1 if rows else tuple(range(1, update.ndim))

    def length(x: Any) -> Any:
        return ops.maximum(ops.sqrt(ops.sum(ops.square(x), axes, keepdims=True)), LEAST)

    return update * ops.maximum(length(param) * floor / length(update), 1.0), state
