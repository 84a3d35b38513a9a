"""Cautious weight decay: only where the update takes a weight towards 0 as well (arXiv:2510.12402).

    p <- p - lr (u + wd p [u p > 0])

Decay then never works against the loss's own direction: it needs no trade-off with it, and the
solutions that it looks for are those of the loss without decay. modded-nanogpt and nanochat decay
so; the former's Adam by lr^2 wd, here every rule by lr wd, as without the mask. Where u is 0, such as
in the row of a token that was not seen, nothing decays.
"""

from __future__ import annotations

from typing import Any

from minillm_core import INHERITED, Plugin, option, stage

__all__ = ["CautiousWD", "cautious"]


class CautiousWD(Plugin, api=1):
    """Weight decay only where it agrees in sign with the update."""

    rules: tuple[str, ...] = option(
        ("*",),
        min_length=1,
        help='update rules; "*" is all there are, ["muon"] leaves AdamW to torch\'s fused kernel',
    )

    def optimizer_factory(self, optimizer):
        for rule in self.rules:
            optimizer.extend(rule, "decay", stage(cautious, weight_decay=INHERITED))


def cautious(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    weight_decay: Any,
    wd_mul: Any,
) -> Any:
    """Update and param (...) -> the update, with decay added where both have one sign."""
    towards_zero = ops.where(update * param > 0, param, ops.zeros_like(param))
    return update + towards_zero * (weight_decay * wd_mul), state
