"""The ops: what each one computes, to which accuracy, and where gradients flow.

A kernel is a candidate for an op (select.py); reference.py is every op in NumPy float64. Letters
in shapes: B rows, T queries, S keys (S >= T), H query heads, K key-value heads, D head size,
C width, O outputs, V vocabulary, N = B * T positions; in the loss, K is the number of targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from minillm_core.ops.arrays import Array, ArrayFunctions

__all__ = [
    "CONTRACTS",
    "Cap",
    "Contract",
    "LossForm",
    "Operations",
    "Rotary",
    "SigmoidCap",
    "TanhCap",
]


class Rotary(NamedTuple):
    """Rotary angles: cos and sin are those of ``position * frequency``, computed in float64."""

    cos: Array  # float32 (P, D/2)
    sin: Array  # float32 (P, D/2)
    frequencies: Array  # float32 (D/2,): radians a position; 0 leaves a pair as it is
    positions: Array | None = None  # int32 (T,) or (B, T), each < P; None: 0 .. T-1


class Cap(Protocol):
    """A bounded, increasing function of the logits."""

    def apply(self, xp: Any, logits: Array) -> Array:
        """The capped logits; ``xp`` has ``tanh`` and ``sigmoid`` (torch, mlx.core, reference)."""
        ...

    def slope(self, capped: Array) -> Array:
        """The derivative, from the capped value alone."""
        ...


@dataclass(frozen=True)
class TanhCap:
    """cap * tanh(x / cap): within (-cap, cap), slope 1 at 0."""

    cap: float

    def apply(self, xp: Any, logits: Array) -> Array:
        """Logits within (-cap, cap)."""
        return self.cap * xp.tanh(logits / self.cap)

    def slope(self, capped: Array) -> Array:
        """1 - tanh^2."""
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
        """The form that held-out text is judged by: the same logits, no smoothing, no z."""
        return replace(self, smoothing=0.0, z=0.0)

    def logits(self, xp: Any, product: Array) -> Array:
        """cap(scale * product), in float32; ``xp`` as for :meth:`Cap.apply`."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else self.cap.apply(xp, scaled)

    def loss(self, log_p: Array, mean_log_p: Array, lse: Array) -> Array:
        """A position's loss; ``mean_log_p`` may be None without smoothing, ``lse`` without z."""
        loss = -log_p
        if self.smoothing:
            loss = (1.0 - self.smoothing) * loss - self.smoothing * mean_log_p
        return loss + self.z * (lse * lse) if self.z else loss

    def pull_back(self, logits: Array, gradient: Array) -> Array:
        """A gradient with respect to the logits -> one with respect to the product."""
        if self.cap is not None:
            gradient = gradient * self.cap.slope(logits)
        return gradient if self.scale == 1.0 else gradient * self.scale


class Operations(ArrayFunctions, Protocol):
    """The ops that kernels compete for, beside the array functions."""

    def linear(self, x: Array, weight: Array) -> Array:
        """X weight^T: x (..., C), weight (O, C) -> (..., O). 2 N C O FLOPs."""
        ...

    def embedding(self, ids: Array, weight: Array) -> Array:
        """weight[ids]: ids int32 (...), weight (V, C) -> (..., C)."""
        ...

    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> Array:
        """X / sqrt(mean(x^2) + eps) * weight over the last axis, float32 inside.

        x (..., C), weight (C,) or None -> x's shape and dtype.
        """
        ...

    def rotate(self, q: Array, k: Array, table: Rotary) -> tuple[Array, Array]:
        """Rotate each pair (a, b) = (x[i], x[i + D/2]) to [a cos - b sin, b cos + a sin].

        q (B, T, H, D), k (B, T, K, D) -> the same shapes and dtypes, float32 inside.
        """
        ...

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float | None = None,
        window: int | Array | None = None,
        documents: Array | None = None,
    ) -> Array:
        """softmax(scale q k^T + mask) v, causal, softmax in float32.

        q (B, T, H, D), k and v (B, S, K, D) -> (B, T, H, D). Query t stands at i = t + S - T and
        sees key j iff 0 <= i - j, and i - j < window where one is given, and documents[i] =
        documents[j] where they are. Query head h reads key-value head h // (H / K). Without
        ``scale`` it is D ** -0.5. documents int32 (B, S). 4 B T S H D FLOPs where nothing is
        skipped.
        """
        ...

    def logits(self, hidden: Array, weight: Array, form: LossForm) -> Array:
        """The head's logits where they are wanted themselves, for the next token of few rows.

        hidden (B, C), weight (V, C) -> float32 (B, V).
        """
        ...

    def swiglu(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up: both (..., F)."""
        ...

    def linear_cross_entropy(
        self,
        hidden: Array,
        weight: Array,
        targets: Array,
        weights: Array | None = None,
        form: LossForm = LossForm(),
    ) -> tuple[Array, Array, Array]:
        """Cross-entropy of the head's logits, which never leave the op.

        hidden (N, C), weight (V, C) in one dtype, targets int32 (K, N), < 0 where unsupervised,
        weights float32 (K,) or (K, N) or None (ones) -> (total, sums, count), all float32:

            loss[k, n] = form's loss of position n for targets[k, n], 0 where unsupervised
            total () = sum over k and n of weights * loss: the only differentiable output
            sums (K,) = sum over n of loss, unweighted, for reports
            count () = the positions where targets[0] >= 0

        Weights are constants. Kernels that make gradients in the forward pass know one upstream
        scalar: whatever differs by target or position goes in as a weight, never on the outside.
        2 N C V FLOPs forward, 4 N C V backward.
        """
        ...


@dataclass(frozen=True)
class Contract:
    """An op's name, signature, tolerance and differentiable arguments.

    ``tolerance``: dtype -> the largest ``norm(got - reference) / max(norm(reference), sqrt(size))``
    of any output and any gradient, with inputs and upstream gradients of order one and the
    reference computed in float64 from the same inputs. (Sums cancel: hence the second size.)
    """

    name: str
    signature: inspect.Signature
    doc: str
    differentiable: tuple[str, ...]
    tolerance: Mapping[str, float]


def _contract(
    function: Callable[..., Any], differentiable: tuple[str, ...], **tolerance: float
) -> Contract:
    signature = inspect.signature(function)
    arguments = list(signature.parameters.values())[1:]
    return Contract(
        name=function.__name__,
        signature=signature.replace(parameters=arguments),
        doc=inspect.getdoc(function) or "",
        differentiable=differentiable,
        tolerance=tolerance,
    )


CONTRACTS: Mapping[str, Contract] = {
    contract.name: contract
    for contract in (
        _contract(
            Operations.linear,
            ("x", "weight"),
            **{"float64": 1e-13, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2},
        ),
        _contract(
            Operations.embedding,
            ("weight",),
            **{"float64": 1e-13, "float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2},
        ),
        _contract(
            Operations.rms_norm,
            ("x", "weight"),
            **{"float64": 1e-12, "float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2},
        ),
        _contract(
            Operations.rotate,
            ("q", "k"),
            **{"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3},
        ),
        _contract(
            Operations.attention,
            ("q", "k", "v"),
            **{"float64": 1e-12, "float32": 5e-6, "float16": 5e-3, "bfloat16": 4e-2},
        ),
        _contract(
            Operations.logits,
            ("hidden", "weight"),
            **{"float64": 1e-6, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2},
        ),
        _contract(
            Operations.swiglu,
            ("gate", "up"),
            **{"float64": 1e-13, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2},
        ),
        _contract(
            Operations.linear_cross_entropy,
            ("hidden", "weight"),
            **{"float64": 1e-12, "float32": 5e-6, "float16": 5e-3, "bfloat16": 4e-2},
        ),
    )
}
"""Op -> contract, for the ops of the core; a plugin may declare more."""
