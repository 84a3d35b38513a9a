"""How a product becomes logits, and logits a loss: a closed list, so that kernels can read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from minillm_core.ops.arrays import Array


class Cap(Protocol):
    """A bounded, increasing function of the logits."""

    def apply(self, xp: Any, logits: Array) -> Array:
        """Return the capped logits; ``xp`` has ``tanh`` and ``sigmoid`` (torch, mlx.core, reference)."""

    def slope(self, capped: Array) -> Array:
        """Return the derivative, from the capped value alone."""


@dataclass(frozen=True)
class TanhCap:
    """cap * tanh(x / cap): within (-cap, cap), slope 1 at 0."""

    cap: float

    def apply(self, xp: Any, logits: Array) -> Array:
        """Logits within (-cap, cap)."""
        return self.cap * xp.tanh(logits / self.cap)

    def slope(self, capped: Array) -> Array:
        """Return 1 - tanh^2."""
        return 1.0 - (capped / self.cap) * (capped / self.cap)


@dataclass(frozen=True)
class SigmoidCap:
    """a * sigmoid((x + b) / c): within (0, a)."""

    a: float
    b: float
    c: float

    def apply(self, xp: Any, logits: Array) -> Array:
        """Logits within (0, a)."""
        return self.a * xp.sigmoid((logits + self.b) / self.c)

    def slope(self, capped: Array) -> Array:
        """a s (1 - s) / c, with s = capped / a."""
        return capped * (1.0 - capped / self.a) / self.c


@dataclass(frozen=True)
class LossForm:
    """How a product becomes logits, and logits a loss: a closed list that kernels can read.

    logits = cap(scale * hidden weight^T); with p = softmax(logits) and lse = logsumexp(logits), a
    position's loss is -(1 - smoothing) log p[target] - smoothing mean(log p) + z * lse^2.
    """

    cap: Cap | None = None
    scale: float = 1.0
    smoothing: float = 0.0
    z: float = 0.0

    @property
    def empty(self) -> bool:
        """Plain softmax cross-entropy."""
        return self == LossForm()

    @property
    def named(self) -> tuple[str, ...]:
        """The fields that differ from plain cross-entropy."""
        plain = LossForm()
        return tuple(f for f in vars(plain) if getattr(self, f) != getattr(plain, f))

    def evaluated(self) -> LossForm:
        """Return the form that held-out text is judged by: the same logits, no smoothing, no z."""
        return replace(self, smoothing=0.0, z=0.0)

    def logits(self, xp: Any, product: Array) -> Array:
        """cap(scale * product), in float32; ``xp`` as for :meth:`Cap.apply`."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else self.cap.apply(xp, scaled)

    def loss(self, log_p: Array, mean_log_p: Array, lse: Array) -> Array:
        """Return a position's loss; ``mean_log_p`` may be None without smoothing, ``lse`` without z."""
        loss = -log_p
        if self.smoothing:
            loss = (1.0 - self.smoothing) * loss - self.smoothing * mean_log_p
        return loss + self.z * (lse * lse) if self.z else loss

    def pull_back(self, logits: Array, gradient: Array) -> Array:
        """Turn a gradient with respect to the logits into one with respect to the product."""
        if self.cap is not None:
            gradient = gradient * self.cap.slope(logits)
        return gradient if self.scale == 1.0 else gradient * self.scale
