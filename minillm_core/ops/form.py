"""The form of the loss: logit scale, cap, label smoothing, z-loss; a closed list that kernels can implement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from minillm_core.ops.arrays import Array


class Cap(Protocol):
    """A logit soft-cap: a bounded, increasing function of the logits."""

    def apply(self, xp: Any, logits: Array) -> Array:
        """Return the capped logits; ``xp`` has ``tanh`` and ``sigmoid`` (torch, mlx.core, reference)."""

    def slope(self, capped: Array) -> Array:
        """Compute the derivative from the capped value alone."""


@dataclass(frozen=True)
class TanhCap:
    """cap * tanh(x / cap): within (-cap, cap), slope 1 at 0."""

    cap: float

    def apply(self, xp: Any, logits: Array) -> Array:
        """Return logits within (-cap, cap)."""
        return self.cap * xp.tanh(logits / self.cap)

    def slope(self, capped: Array) -> Array:
        """Compute 1 - tanh^2."""
        return 1.0 - (capped / self.cap) * (capped / self.cap)


@dataclass(frozen=True)
class SigmoidCap:
    """a * sigmoid((x + b) / c): within (0, a)."""

    a: float
    b: float
    c: float

    def apply(self, xp: Any, logits: Array) -> Array:
        """Return logits within (0, a)."""
        return self.a * xp.sigmoid((logits + self.b) / self.c)

    def slope(self, capped: Array) -> Array:
        """Compute a s (1 - s) / c, with s = capped / a."""
        return capped * (1.0 - capped / self.a) / self.c


@dataclass(frozen=True)
class LossForm:
    """The form of the loss, as a closed list of options that kernels can implement.

    logits = cap(scale * hidden weight^T); with p = softmax(logits) and lse = logsumexp(logits), a
    position's loss is -(1 - smoothing) log p[target] - smoothing mean(log p) + z * lse^2.
    """

    cap: Cap | None = None
    scale: float = 1.0
    smoothing: float = 0.0
    z: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether this is plain softmax cross-entropy."""
        return self == LossForm()

    @property
    def named(self) -> tuple[str, ...]:
        """The fields that differ from plain cross-entropy."""
        plain = LossForm()
        return tuple(f for f in vars(plain) if getattr(self, f) != getattr(plain, f))

    def evaluated(self) -> LossForm:
        """Return the form of the held-out loss: the same logits, without label smoothing and z-loss."""
        return replace(self, smoothing=0.0, z=0.0)

    def logits(self, xp: Any, product: Array) -> Array:
        """Compute cap(scale * product), in float32; ``xp`` as for :meth:`Cap.apply`."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else self.cap.apply(xp, scaled)

    def loss(self, log_p: Array, mean_log_p: Array, lse: Array) -> Array:
        """Compute a position's loss; ``mean_log_p`` may be None without smoothing, ``lse`` without z."""
        loss = -log_p
        if self.smoothing:
            loss = (1.0 - self.smoothing) * loss - self.smoothing * mean_log_p
        return loss + self.z * (lse * lse) if self.z else loss

    def pull_back(self, logits: Array, gradient: Array) -> Array:
        """Convert the gradient with respect to the logits into the gradient with respect to the product."""
        if self.cap is not None:
            gradient = gradient * self.cap.slope(logits)
        return gradient if self.scale == 1.0 else gradient * self.scale
