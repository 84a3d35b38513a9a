"""Head-wise Muon: each head, or pair of heads, of Q and K is orthogonalised separately.

modded-nanogpt's record of 2026-04-08 (track 1, number 80) treats the rows of each pair of neighbouring heads
as one matrix, since heads learn different things: (H D, C) is H / heads matrices (heads D, C), each with its
own polar decomposition, so that one head's gradient does not shrink another's update. Pairs match
``paired_heads``; with all heads in one group it equals Muon.

The whole rule uses these parts: Muon's scale sqrt(max(1, rows / cols)) and NorMuon's neurons are per part.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from minillm_core import PlanError, Plugin, option

__all__ = ["HeadMuon"]


HEADS = (("heads", "dim"), ("kv_heads", "dim"))
"""The axes of a matrix whose rows belong to heads, or to key-value heads."""


class HeadMuon(Plugin, api=1):
    """Muon orthogonalises each pair of heads, or each head, of Q and K by itself."""

    heads: int = option(
        2,
        ge=1,
        search=(1, 2, 4),
        help="adjacent heads per matrix; 2: pairs, 1: each head separately",
    )
    of: tuple[Literal["q", "k", "v"], ...] = option(
        ("q", "k"), min_length=1, help="projections that are split by head, such as [q, k, v]"
    )

    def optimizer_factory(self, optimizer):
        for one in dict.fromkeys(self.of):
            role, found = f"attention.{one}", optimizer.parameters.values()
            kinds = {p.axes for p in found if p.role == role and p.axes in HEADS}
            for axes in sorted(kinds) or HEADS[:1]:  # without any, the split is refused
                there = getattr(optimizer, axes[0])
                if there % self.heads:
                    raise PlanError(
                        f"head_muon.heads={self.heads} does not divide the {there} heads of '{one}'",
                        where=f"opt.split[{role}]",
                        fix="head_muon.heads=1, or leave it out of head_muon.of",
                    )
                optimizer.split("muon", partial(_projects, role, axes), there // self.heads)


def _projects(role: str, axes: tuple[str, ...], name: str, parameter: Any) -> bool:
    """Return whether a parameter has this role, and rows of this kind of heads."""
    return (parameter.role, parameter.axes) == (role, axes)
