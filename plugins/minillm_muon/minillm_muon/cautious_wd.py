"""Cautious weight decay: only where the update also moves a weight towards 0 (arXiv:2510.12402).

    p <- p - lr (u + wd p [u p > 0])

Decay then never opposes the loss's direction, so there is no trade-off between the two, and the
stationary points are those of the loss without decay. modded-nanogpt (records 43 for Muon, 50
for Adam) and nanochat use it: every rule decays by lr wd, as without the mask; modded-nanogpt's Adam by
lr^2 wd. ``squared`` does this for a rule: its decay is multiplied by the run's schedule once more, s(t)
as a fraction of its peak,

    p <- p - lr (u + s wd p [u p > 0])

``batch_schedule``'s factor on the rates is in s too, as it is in that lr^2: the records' batches grow as well.
Where u is 0, as in the row of an unseen token, nothing decays.
"""

from __future__ import annotations

import json
from typing import Any

from minillm_core import INHERITED, PlanError, Plugin, option, scheduled, stage

__all__ = ["CautiousWD", "cautious"]


class CautiousWD(Plugin, api=1):
    """Weight decay only where it agrees in sign with the update."""

    rules: tuple[str, ...] = option(
        ("*",),
        min_length=1,
        help='update rules it applies to; "*": all; ["muon"] leaves AdamW to torch\'s fused kernel',
    )

    squared: tuple[str, ...] = option(
        (),
        help='rules among these whose decay is multiplied by the schedule twice, such as ["adamw"], named '
        'in rules as well: ["adamw", "muon"]',
    )

    def optimizer_factory(self, optimizer):
        named = {*self.rules, *self.squared} - {"*"}
        if named and "*" in (*self.rules, *self.squared):
            raise PlanError(
                f'cautious_wd.rules and cautious_wd.squared name {", ".join(sorted(named))} beside "*", '
                "which is every rule",
                where="opt.extend",
                fix=f"cautious_wd.rules={json.dumps(sorted({*named, 'adamw', 'muon'}))} beside muon: in both, "
                "rules by their names (minillm plan lists them)",
            )
        if strangers := {*self.squared} - {*self.rules}:
            raise PlanError(
                f"cautious_wd.squared names {', '.join(sorted(strangers))}, but cautious_wd.rules does not",
                where="opt.extend",
                fix=f"cautious_wd.rules={json.dumps([*self.rules, *sorted(strangers)])}",
            )
        for rule in self.rules:
            more = {"fading": scheduled(1.0)} if rule in self.squared else {}
            optimizer.extend(rule, "decay", stage(cautious, weight_decay=INHERITED, **more))


def cautious(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    weight_decay: Any,
    wd_mul: Any,
    fading: Any = 1.0,
) -> Any:
    """Add decay to the update (...) where update and param have the same sign."""
    towards_zero = ops.where(update * param > 0, param, ops.zeros_like(param))
    return update + towards_zero * (weight_decay * wd_mul * fading), state
