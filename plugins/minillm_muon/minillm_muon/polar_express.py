"""Polar Express: an optimal polynomial for every step of Muon's orthogonalisation (arXiv:2505.16932).

Newton-Schulz applies one quintic five times. Here every step has its own: among odd quintics, the one
with the smallest worst-case error on the interval that then contains the singular values.
Their composition is optimal. Convergence is not ensured for values below 10^-3 of the norm.
"""

from __future__ import annotations

from typing import Any

from minillm_core import INHERITED, Plugin, stage
from minillm_muon.muon import normalised, quintic

__all__ = ["COEFFICIENTS", "PolarExpress", "polar_express"]

COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Coefficients (a, b, c) of :func:`minillm_muon.muon.quintic`, for singular values from 10^-3 to 1.

The paper's algorithm with cushion 0.02, each polynomial but the last stretched by SAFETY, so that
rounding in bfloat16 cannot leave the interval on which the next converges: the constants of
modded-nanogpt and nanochat."""

SAFETY = 0.02


class PolarExpress(Plugin, api=1):
    """The best polynomial in each of Muon's orthogonalisation steps, instead of Newton-Schulz."""

    def optimizer_factory(self, optimizer):
        polar = stage(polar_express, needs="matrix", steps=INHERITED)
        optimizer.extend("muon", "orthogonalise", polar)


def polar_express(ops: Any, update: Any, param: Any, state: dict[str, Any], *, steps: int) -> Any:
    """Approximate U V^T of the singular value decomposition of update (N, R, C), batched over N.

    ``steps`` is ``muon.steps``; from the sixth on the last polynomial is repeated. Computed in the
    backend's ``matmul_dtype``: bfloat16 on NVIDIA GPUs, float32 on a CPU and on MLX, where
    bfloat16 would overflow.
    """
    x = normalised(ops, update, 1e-6, 1 + SAFETY)
    for index in range(steps):
        x = quintic(ops, x, *COEFFICIENTS[min(index, len(COEFFICIENTS) - 1)])
    return ops.astype(x, "float32"), state
