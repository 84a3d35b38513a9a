"""NorMuon: an orthogonalised update normalised per neuron (arXiv:2510.05491).

    v <- beta2 v + (1 - beta2) mean(u^2)          one number per neuron
    u <- |u| / |u / sqrt(v)|  u / sqrt(v)         | | is the norm of the whole matrix

A neuron is a row of the matrix in the paper; here, as in modded-nanogpt and nanochat, a row or
column along the longer axis. The norm after orthogonalisation is kept, so that
``muon.lr`` keeps its meaning (the paper sets it to 0.2 sqrt(rows x cols): ``muon.adjust``). beta2 is
the paper's; modded-nanogpt's version of 2026-08 has 0.9.
"""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import Plugin, option, stage

__all__ = ["NorMuon", "equalise"]

LEAST = 1e-10  # minimum of a mean of squares and of a norm: without gradient a neuron is unchanged


class NorMuon(Plugin, api=1):
    """After Muon's orthogonalisation, every neuron's update is divided by its usual size."""

    beta2: float = option(
        0.95,
        ge=0,
        lt=1,
        search=(0.9, 0.95, 0.98),
        help="decay rate of the mean of a neuron's squared updates",
    )
    neurons: Literal["longer", "rows"] = option(
        "longer",
        help="definition of a neuron: a vector along the matrix's longer axis, or a row, as in the "
        "paper",
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
    """Return one entry per row: (R, C) -> (R, 1)."""
    return shape[0], 1


def along_the_longer(shape: tuple[int, int]) -> tuple[int, int]:
    """Return one entry per element of the longer axis: (R, C) -> (R, 1) if R >= C, else (1, C)."""
    return (shape[0], 1) if shape[0] >= shape[1] else (1, shape[1])


def equalise(ops: Any, update: Any, param: Any, state: dict[str, Any], *, beta2: float) -> Any:
    """Normalise update (N, R, C) per neuron by its running mean, keeping the total norm."""
    axis = -1 if state["second"].shape[-1] == 1 else -2  # summed over within a neuron
    squares = ops.mean(ops.square(update), axis, keepdims=True)  # (N, R, 1) or (N, 1, C)
    second = state["second"] * beta2 + squares * (1 - beta2)
    size = ops.sqrt(ops.maximum(second, LEAST))
    before = ops.sqrt(ops.sum(squares, (-2, -1), keepdims=True))  # the norm, over sqrt(width)
    after = ops.sqrt(ops.sum(squares / ops.square(size), (-2, -1), keepdims=True))
    return update * (before / (size * ops.maximum(after, LEAST))), {"second": second}
