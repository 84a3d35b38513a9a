"""The op contracts: what each op computes, its tolerance, and where gradients flow.

A kernel is a candidate for an op (select.py); minillm_kit.reference is every op in NumPy float64. Letters
in shapes: B rows, T queries, S keys (S >= T), H query heads, K key-value heads, D head size,
C width, O outputs, V vocabulary, N = B * T positions; in the loss, K is the number of targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from minillm_core.ops.arrays import Array, ArrayFunctions
from minillm_core.ops.form import LossForm


class Rotary(NamedTuple):
    """Rotary tables: cos and sin of ``position * frequency``, computed in float64."""

    cos: Array  # float32 (P, D/2)
    sin: Array  # float32 (P, D/2)
    frequencies: Array  # float32 (D/2,): radians per position; 0 leaves a pair unrotated
    positions: Array | None = None  # int32 (T,) or (B, T), each < P; None: 0 .. T-1


class Operations(ArrayFunctions, Protocol):
    """The ops that have selectable kernels, in addition to the array functions."""

    def linear(self, x: Array, weight: Array) -> Array:
        """Compute x weight^T: x (..., C), weight (O, C) -> (..., O). 2 N C O FLOPs."""

    def embedding(self, ids: Array, weight: Array) -> Array:
        """Look up weight[ids]: ids int32 (...), weight (V, C) -> (..., C)."""

    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> Array:
        """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis, float32 inside.

        x (..., C), weight (C,) or None -> x's shape and dtype.
        """

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
        """Compute softmax(scale q k^T + mask) v, causal, softmax in float32.

        q (B, T, H, D), k and v (B, S, K, D) -> (B, T, H, D). Query t is at position i = t + S - T
        and sees key j iff 0 <= i - j, and i - j < window if ``window`` is given, and documents[i] =
        documents[j] if ``documents`` is given. Query head h reads key-value head h // (H / K).
        ``scale`` defaults to D ** -0.5. documents int32 (B, S). 4 B T S H D FLOPs if no block is
        skipped.
        """

    def logits(self, hidden: Array, weight: Array, form: LossForm) -> Array:
        """Compute the head's logits, for sampling the next token of a few rows.

        hidden (..., C), weight (V, C) -> float32 (..., V).
        """

    def swiglu(self, gate: Array, up: Array) -> Array:
        """Compute silu(gate) * up: both (..., F)."""

    def gram(self, x: Array, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0) -> Array:
        """Compute alpha x x^T + beta x + gamma I, symmetric: x (N, R, C) -> (N, R, R), summed in float32.

        With a non-zero beta each x must itself be symmetric, R = C. Optimizer stages use it: no
        gradient flows through it. 2 N R^2 C FLOPs; a kernel may compute one triangle only.
        """
        ...

    def linear_cross_entropy(
        self,
        hidden: Array,
        weight: Array,
        targets: Array,
        weights: Array | None = None,
        form: LossForm = LossForm(),  # noqa: B008  (frozen)
    ) -> tuple[Array, Array, Array]:
        """Compute the cross-entropy of the head's logits, without returning the logits.

        hidden (N, C), weight (V, C) in one dtype, targets int32 (K, N), < 0 where unsupervised,
        weights float32 (K,) or (K, N) or None (ones) -> (total, sums, count), all float32:

            loss[k, n] = form's loss of position n for targets[k, n], 0 where unsupervised
            total () = sum over k and n of weights * loss: the only differentiable output
            sums (K,) = sum over n of loss, unweighted, for reports
            count () = the number of positions where targets[0] >= 0

        Weights are constants. Kernels that compute gradients in the forward pass have one upstream
        scalar: pass any factor per target or position as a weight, never multiply the result by it.
        2 N C V FLOPs forward, 4 N C V backward.
        """
        ...

    def token_losses(
        self,
        hidden: Array,
        weight: Array,
        targets: Array,
        form: LossForm = LossForm(),  # noqa: B008  (frozen)
    ) -> Array:
        """Compute the cross-entropy of each position, without gradient.

        hidden (N, C), weight (V, C) in one dtype, targets int32 (N,), < 0 where unsupervised ->
        float32 (N,): the form's loss, 0 where unsupervised. 2 N C V FLOPs.
        """
        ...


@dataclass(frozen=True)
class Contract:
    """An op's name, signature, tolerance, differentiable arguments and output shapes.

    ``tolerance``: dtype -> the largest ``norm(got - reference) / max(norm(reference), sqrt(size))``
    of any output and any gradient, with inputs and upstream gradients of order one and the
    reference computed in float64 from the same inputs. (Sums can cancel: hence ``sqrt(size)``.)
    """

    name: str
    signature: inspect.Signature
    doc: str
    differentiable: tuple[str, ...]
    tolerance: Mapping[str, float]
    shapes: Callable[
        ..., tuple[Sequence[int], ...]
    ]  # the op's arguments -> the shape of each output


_DTYPES = ("float64", "float32", "float16", "bfloat16")
_OPS: tuple[tuple[Callable[..., Any], tuple[str, ...], tuple[float, ...]], ...] = (
    (Operations.linear, ("x", "weight"), (1e-13, 2e-6, 2e-3, 1e-2)),
    (Operations.embedding, ("weight",), (1e-13, 1e-6, 2e-3, 1e-2)),
    (Operations.rms_norm, ("x", "weight"), (1e-12, 3e-6, 3e-3, 2e-2)),
    (Operations.rotate, ("q", "k"), (1e-13, 1e-6, 1e-3, 8e-3)),
    (Operations.attention, ("q", "k", "v"), (1e-12, 5e-6, 5e-3, 4e-2)),
    (Operations.logits, ("hidden", "weight"), (1e-6, 2e-6, 2e-3, 1e-2)),
    (Operations.swiglu, ("gate", "up"), (1e-13, 1e-6, 2e-3, 2e-2)),
    (Operations.gram, (), (1e-13, 2e-6, 2e-3, 1e-2)),
    (Operations.linear_cross_entropy, ("hidden", "weight"), (1e-12, 5e-6, 5e-3, 4e-2)),
    (Operations.token_losses, (), (1e-12, 5e-6, 5e-3, 4e-2)),
)
"""(op, its differentiable arguments, its tolerance for each of ``_DTYPES``)."""


_SHAPES: Mapping[str, Callable[..., tuple[Sequence[int], ...]]] = {
    "linear": lambda x, weight: ((*x.shape[:-1], weight.shape[0]),),
    "embedding": lambda ids, weight: ((*ids.shape, weight.shape[1]),),
    "rms_norm": lambda x, *_, **__: (x.shape,),
    "rotate": lambda q, k, table: (q.shape, k.shape),
    "attention": lambda q, *_, **__: (q.shape,),
    "logits": lambda hidden, weight, form: ((*hidden.shape[:-1], weight.shape[0]),),
    "swiglu": lambda gate, up: (gate.shape,),
    "gram": lambda x, *_, **__: ((*x.shape[:-1], x.shape[-2]),),
    "linear_cross_entropy": lambda hidden, weight, targets, *_, **__: ((), targets.shape[:1], ()),
    "token_losses": lambda hidden, weight, targets, *_, **__: (targets.shape,),
}
"""Op -> the shapes of its outputs, from its arguments."""


def _without_self(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=[*signature.parameters.values()][1:])


CONTRACTS: Mapping[str, Contract] = {
    op.__name__: Contract(
        name=op.__name__,
        signature=_without_self(op),
        doc=inspect.getdoc(op) or "",
        differentiable=differentiable,
        tolerance=dict(zip(_DTYPES, tolerance, strict=True)),
        shapes=_SHAPES[op.__name__],
    )
    for op, differentiable, tolerance in _OPS
}
"""Op -> contract, for the ops of the core; plugins may declare more."""
