"""NorMuon: neurons of an orthogonalised update take steps of one size (arXiv:2510.05491).

    v <- beta2 v + (1 - beta2) mean(u^2)          one number a neuron
    u <- |u| / |u / sqrt(v)|  u / sqrt(v)         | | is the whole matrix's norm

A neuron is a row of the matrix in the paper; here, as in modded-nanogpt and nanochat, a row or
column along the longer axis. The norm stays what orthogonalisation made of it, so that
``muon.lr`` keeps its meaning (the paper sets it to 0.2 sqrt(rows x cols): ``muon.adjust``). beta2 is
the paper's; modded-nanogpt's state of 2026-08 has 0.9.
"""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import Plugin, option, stage

__all__ = ["NorMuon", "equalise"]

LEAST = 1e-10  # of a mean of squares, and of a norm: a neuron without a gradient stays still


class NorMuon(Plugin, api=1):
    """After Muon's orthogonalisation, every neuron's update is divided by its usual size."""

    beta2: float = option(
        0.95, ge=0, lt=1, search=(0.9, 0.95, 0.98), help="of the mean of a neuron's squared updates"
    )
    neurons: Literal["longer", "rows"] = option(
        "longer", help="what a neuron is: along the matrix's longer axis, or a row, as in the paper"
    )

    def optimizer_factory(self, optimizer):
        shape = {"longer": along_the_longer, "rows": rows}[self.neurons]
        normalise = stage(
            equalise,
            state={"second": shape},
            needs="matrix",
            beta2=self.beta2,
        )
        optimizer.extend("muon", "precondition", normalise)


def rows(shape: tuple[int, int]) -> tuple[int, int]:
    """Return one number a row: (R, C) -> (R, 1)."""
    return shape[0], 1


def along_the_longer(shape: tuple[int, int]) -> tuple[int, int]:
    """Return one number along the longer side: (R, C) -> (R, 1) where R >= C, else (1, C)."""
    return (shape[0], 1) if shape[0] >= shape[1] else (1, shape[1])


def equalise(ops: Any, update: Any, param: Any, state: dict[str, Any], *, beta2: float) -> Any:
    """update (N, R, C) -> the same norm in the whole, neurons alike over time."""
    axis = -1 if state["second"].shape[-1] == 1 else -2  # summed over within a neuron
    squares = ops.mean(ops.square(update), axis, keepdims=True)  # (N, R, 1) or (N, 1, C)
    second = state["second"] * beta2 + squares * (1 - beta2)
    size = ops.sqrt(ops.maximum(second, LEAST))
    before = ops.sqrt(ops.sum(squares, (-2, -1), keepdims=True))  # the norm, over sqrt(width)
    after = ops.sqrt(ops.sum(squares / ops.square(size), (-2, -1), keepdims=True))
    return update * (before / (size * ops.maximum(after, LEAST))), {"second": second}
