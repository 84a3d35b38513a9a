"""Muon: orthogonalised momentum (Keller Jordan et al., https://kellerjordan.github.io/posts/muon).

    m <- 0.95 m + 0.05 g
    u  = NewtonSchulz5((1 - 0.95) g + 0.95 m)            Nesterov
    p <- p - lr (sqrt(max(1, rows / cols)) u + wd p)

The update of a matrix (rows, cols) has singular values near 1: the learning rate is the
spectral norm of an update.

modded-nanogpt's momentum rises from 0.85 to 0.95 over the first steps, and falls back over the
last 50 (``muon.momentum_start``, ``muon.momentum_end``); its learning rate falls linearly over the
last part of the run (``muon.cooldown``).
"""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import PlanError, Plugin, option, piecewise, scheduled, stage

__all__ = ["Muon", "match_rms", "nesterov", "newton_schulz", "normalised", "quintic", "spectral"]

PARTNERS = {"floor": "cooldown", "momentum_rise": "momentum_start", "momentum_fall": "momentum_end"}
"""Option -> the option without which it has no effect."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of :func:`quintic`: steepest at 0, so that small singular values grow fast."""


class Muon(Plugin, api=1):
    """Orthogonalised momentum for the hidden matrices; the rest stays with AdamW."""

    lr: float = option(
        0.02,
        gt=0,
        search=(0.005, 0.01, 0.02, 0.04, 0.08),
        help="peak learning rate, as the spectral norm of an update",
    )
    cooldown: float | None = option(
        None,
        gt=0,
        le=1,
        help="last fraction of the run, in which lr falls linearly to floor x lr, after a constant "
        "rate without warm-up; none: the run's own schedule",
    )
    floor: float = option(0.0, ge=0, le=1, help="fraction of lr at the end of the cooldown")
    weight_decay: float | None = option(
        None, ge=0, help="decoupled weight decay, times the learning rate; none: train.weight_decay"
    )
    momentum: float = option(0.95, ge=0, lt=1, search=(0.85, 0.9, 0.95), help="Nesterov momentum")
    momentum_start: float | None = option(
        None, ge=0, lt=1, help="initial momentum; none: same as momentum"
    )
    momentum_rise: float = option(
        0.2, gt=0, le=1, help="fraction of the run over which momentum rises from momentum_start"
    )
    momentum_end: float | None = option(
        None, ge=0, lt=1, help="final momentum; none: same as momentum"
    )
    momentum_fall: float = option(
        0.03, gt=0, lt=1, help="last fraction of the run, over which momentum falls to momentum_end"
    )
    steps: int = option(5, ge=1, le=20, help="number of Newton-Schulz iterations")
    adjust: Literal["spectral", "match_rms"] = option(
        "spectral",
        help="factor on the update; spectral: sqrt(max(1, rows/cols)), match_rms: 0.2 "
        "sqrt(max(rows, cols)) (AdamW's size)",
    )

    def optimizer_factory(self, optimizer):
        self._check_partners()
        optimizer.rule(
            "muon",
            lr=self._lr(),
            weight_decay=self.weight_decay,
            momentum=stage(nesterov, state={"momentum": "like"}, momentum=self._momentum()),
            orthogonalise=stage(newton_schulz, needs="matrix", steps=self.steps),
            scale=stage({"spectral": spectral, "match_rms": match_rms}[self.adjust]),
        )
        optimizer.assign("muon", lambda name, p: len(p.shape) == 2 and _hidden(p.role))

    def _check_partners(self) -> None:
        """Refuse an option that is set if its partner is not.

        Raises:
            PlanError: the option would have no effect.
        """
        for name, partner in PARTNERS.items():
            value = getattr(self, name)
            if getattr(self, partner) is None and value != type(self).model_fields[name].default:
                raise PlanError(
                    f"muon.{name}={value} has no effect without muon.{partner}",
                    where="opt.rule[muon]",
                    fix=f"set muon.{partner} too, or leave muon.{name} out",
                )

    def _lr(self) -> Any:
        """Schedule the learning rate: the run's warm-up and decay; or constant, and then linear to the floor."""
        if self.cooldown is None:
            return scheduled(self.lr)
        return piecewise((1 - self.cooldown, self.lr), (1, self.lr * self.floor))

    def _momentum(self) -> Any:
        """Schedule the momentum: constant, with a rise at the start and a fall at the end if options set them."""
        start, end = self.momentum_start, self.momentum_end
        if start is None and end is None:
            return self.momentum
        if None not in (start, end) and self.momentum_rise + self.momentum_fall >= 1:
            raise PlanError(
                f"momentum_rise + momentum_fall must be below 1: they are {self.momentum_rise} and "
                f"{self.momentum_fall}",
                where="opt.rule[muon].momentum",
                fix="muon.momentum_rise=0.2 muon.momentum_fall=0.03",
            )
        rise = [] if start is None else [(0.0, start), (self.momentum_rise, self.momentum)]
        fall = [] if end is None else [(1 - self.momentum_fall, self.momentum), (1.0, end)]
        return piecewise(*rise, *fall)


def _hidden(role: str) -> bool:
    """Select matrices inside the blocks, including adapters: not embeddings, the head or gates."""
    return role.split(".")[0] in ("attention", "mlp", "lora")


def nesterov(ops: Any, update: Any, param: Any, state: dict[str, Any], *, momentum: Any) -> Any:
    """Return Nesterov's look-ahead of the running mean of update (N, R, C)."""
    mean = state["momentum"] * momentum + update * (1 - momentum)
    return update * (1 - momentum) + mean * momentum, {"momentum": mean}


def newton_schulz(ops: Any, update: Any, param: Any, state: dict[str, Any], *, steps: int) -> Any:
    """Approximate U V^T of the singular value decomposition of update (N, R, C), batched over N.

    Computed in the backend's ``matmul_dtype``: bfloat16 on NVIDIA GPUs as published, float32 on a CPU and
    on MLX.
    """
    x = normalised(ops, update, 1e-7)
    for _ in range(steps):
        x = quintic(ops, x, *COEFFICIENTS)
    return ops.astype(x, "float32"), state


def normalised(ops: Any, update: Any, floor: float, size: float = 1.0) -> Any:
    """Divide each matrix of update (N, R, C) by ``size`` times its norm, plus ``floor``; in ``matmul_dtype``."""
    norm = ops.sqrt(ops.sum(ops.square(update), (-2, -1), keepdims=True))
    return ops.astype(update / (norm * size + floor), ops.matmul_dtype)


def quintic(ops: Any, x: Any, a: float, b: float, c: float) -> Any:
    """Compute a s + b s^3 + c s^5 for every singular value s of x (N, R, C); singular vectors stay the same.

    That is p x with p = a I + b A + c A^2 and A = x x^T; for a tall x (R > C), x p with A = x^T x. The
    published form, a x + (b A + c A^2) x, reads and writes x once more, and in bfloat16 its error is larger:
    it rounds before the sum.
    """
    tall = x.shape[-2] > x.shape[-1]
    gram = ops.gram(ops.matrix_transpose(x) if tall else x)  # (N, r, r), r = min(R, C)
    p = ops.gram(gram, c, b, a)  # (N, r, r)
    return x @ p if tall else p @ x


def spectral(ops: Any, update: Any, param: Any, state: dict[str, Any]) -> Any:
    """Multiply by sqrt(max(1, rows / cols)): a tall matrix then moves its outputs as far as a square one."""
    rows, cols = update.shape[-2:]
    return update * max(1.0, rows / cols) ** 0.5, state


def match_rms(ops: Any, update: Any, param: Any, state: dict[str, Any]) -> Any:
    """Multiply by 0.2 sqrt(max(rows, cols)): elements then have AdamW's magnitude (arXiv:2502.16982)."""
    return update * (0.2 * max(update.shape[-2:]) ** 0.5), state
