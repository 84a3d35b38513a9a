"""MuonEq: rows, or columns, of the momentum are normalised before orthogonalisation (arXiv:2603.28254).

    u <- momentum's update, Muon's own
    u_i <- u_i / |u_i|                             rows: MuonEq-R;  columns: MuonEq-C
    u  <- Newton-Schulz, or Polar Express, of u

Orthogonalisation equalises singular values within few steps only if they are not too far apart, and rows of
very different norms spread them: so rows are normalised first, at the cost of a reduction and without
state. NorMuon normalises afterwards, by a running mean; the two can be combined. ``both`` divides rows and then
columns, the paper's MuonEq-RC.
"""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import INHERITED, Plugin, option, stage
from minillm_muon.muon import nesterov

__all__ = ["MuonEq", "equilibrated"]

LEAST = 1e-7  # minimum norm: a row without gradient stays 0

AXES = {"rows": (-1,), "columns": (-2,), "both": (-1, -2)}
"""The axes that are summed for a norm, one after the other."""


class MuonEq(Plugin, api=1):
    """Rows of Muon's momentum are made equally long before it is orthogonalised."""

    of: Literal["rows", "columns", "both"] = option(
        "rows", help="normalised vectors: rows, columns, or rows and then columns (both)"
    )

    def optimizer_factory(self, optimizer):
        momentum = stage(
            equilibrated,
            state={"momentum": "like"},
            needs="matrix",
            momentum=INHERITED,
            axes=AXES[self.of],
        )
        optimizer.extend("muon", "momentum", momentum)


def equilibrated(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    momentum: Any,
    axes: tuple[int, ...],
) -> Any:
    """Return Nesterov's look-ahead of the running mean, its rows of norm 1; update, momentum (N, R, C)."""
    made, new = nesterov(ops, update, param, state, momentum=momentum)
    for axis in axes:
        length = ops.sqrt(ops.sum(ops.square(made), axis, keepdims=True))  # (N, R, 1) or (N, 1, C)
        made = made / ops.maximum(length, LEAST)
    return made, new
