"""SOAP-Muon: Muon whose momentum is first divided by its usual magnitude in SOAP's bases.

    m <- mu m + (1 - mu) g,  n = (1 - mu) g + mu m                Muon's momentum
    L <- beta L + (1 - beta) g g^T,   R <- beta R + (1 - beta) g^T g
    v <- beta v + (1 - beta) (P^T n Q)^2                          P, Q: orthonormal, near the eigenvectors of L, R
    u  = NewtonSchulz(P ((P^T n Q) / (sqrt(v) + epsilon)) Q^T)    then Muon's scale and decay

(N. Vyas, "SOAP-Muon"; modded-nanogpt's optimization track since 2026-05-04, from 2026-06-09 on all hidden matrices
and with bases updated every time, ``soap_muon.every=1``, as in its best results.) The bases, their updates and
initial values are SOAP's. The published code restores the norm of n after the division; orthogonalisation,
which follows, does not depend on it. Statistics are updated before the bases are used, there after it.

It replaces Muon's momentum and so conflicts with ``muon_eq``. State besides Muon's: one number per weight, and
four square matrices. Each update of the bases is a QR of each side: expensive if frequent.
"""

from __future__ import annotations

from typing import Any

from minillm_core import INHERITED, Plugin, option, stage
from minillm_optim.soap import STATISTICS, divided, followed, into

__all__ = ["SOAPMuon", "divided_in_eigenbasis"]


class SOAPMuon(Plugin, api=1):
    """Muon whose momentum is first normalised in SOAP's eigenbases."""

    beta: float = option(
        0.9, ge=0, lt=1, help="decay rate of the statistics and of the mean of squares"
    )
    every: int = option(10, ge=1, help="updates between two changes of the bases")
    damping: float = option(
        1e-3, gt=0, lt=1, help="multiple of the identity added to a statistic, relative to its norm"
    )

    def optimizer_factory(self, optimizer):
        momentum = stage(
            divided_in_eigenbasis,
            state={"momentum": "like", "v": "like"} | STATISTICS,
            needs="matrix",
            every=self.every,
            momentum=INHERITED,
            beta=self.beta,
            damping=self.damping,
        )
        optimizer.extend("muon", "momentum", momentum)


def divided_in_eigenbasis(
    ops: Any,
    update: Any,
    param: Any,
    state: dict[str, Any],
    *,
    momentum: Any,
    beta: float,
    damping: float,
    due: bool,
) -> Any:
    """Compute the matrix to orthogonalise; momentum, v (N, R, C); left (N, R, R), right (N, C, C), bases."""
    kept, p, q = followed(ops, update, state, beta, damping, due)
    mean = state["momentum"] * momentum + update * (1 - momentum)
    ahead = into(ops, update * (1 - momentum) + mean * momentum, p, q)
    v = state["v"] * beta + ops.square(ahead) * (1 - beta)
    return divided(ops, ahead, ops.sqrt(v), p, q), {"momentum": mean, "v": v} | kept
