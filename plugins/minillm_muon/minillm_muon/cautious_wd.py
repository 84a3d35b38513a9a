"""Cautious weight decay: only where the update takes a weight towards 0 as well (arXiv:2510.12402).

    p <- p - lr (u + wd p [u p > 0])

Decay then never works against the loss's own direction: it needs no trade-off with it, and the
solutions that it looks for are those of the loss without decay. modded-nanogpt (records 43 for Muon, 50
for Adam) and nanochat decay so: every rule by lr wd, as without the mask; the former's Adam by lr^2 wd, which
``squared`` says of a rule: its decay falls with the run's schedule once more, s(t) being that as a share of
its peak,

    p <- p - lr (u + s wd p [u p > 0])

Where u is 0, such as in the row of a token that was not seen, nothing decays.
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
        help='update rules; "*" is all there are, ["muon"] leaves AdamW to torch\'s fused kernel',
    )

    squared: tuple[str, ...] = option(
        (), help='rules of these whose decay falls with the schedule twice, such as ["adamw"]'
    )

    def optimizer_factory(self, optimizer):
        if strangers := {*self.squared} - {*self.rules}:
            raise PlanError(
                f"cautious_wd.squared names {', '.join(sorted(strangers))}, and cautious_wd.rules does not",
                where="opt.extend",
                fix=f"cautious_wd.rules={json.dumps([*self.rules, *sorted(strangers)])}, each by its name",
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
    """Update and param (...) -> the update, with decay added where both have one sign."""
    towards_zero = ops.where(update * param > 0, param, ops.zeros_like(param))
    return update + towards_zero * (weight_decay * wd_mul * fading), state
