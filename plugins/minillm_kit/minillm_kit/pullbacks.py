"""The gradient of every op in NumPy float64, by textbook formulas.

A pull-back takes the upstream gradients of an op's differentiable outputs and the op's arguments; it
returns the gradient of each differentiable argument. tests compare them with central differences of
:mod:`minillm_kit.reference`, with which they share only the forward formulas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minillm_core import LossForm, Rotary
from minillm_kit import reference
from minillm_kit.reference import PLAIN, NumPyArrays

Array = NDArray[Any]
Gradients = Mapping[str, Array]


def pull_back(name: str) -> Callable[..., Gradients]:
    """Return an op's pull-back: (upstream gradients, arguments by name) -> gradients by name.

    Args:
        name: a key of ``CONTRACTS``.

    Raises:
        AttributeError: there is no such op.
    """
    return getattr(sys.modules[__name__], name)


def linear(dy: Array, *, x: Array, weight: Array) -> Gradients:
    """Return dx = dy weight, dweight = dy^T x; dy (..., O)."""
    x, weight = _float64(x), _float64(weight)
    return {
        "x": dy @ weight,
        "weight": dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1]),
    }


def embedding(dy: Array, *, ids: Array, weight: Array) -> Gradients:
    """Sum dy (..., C) over the positions of each id."""
    found = np.zeros(weight.shape)
    np.add.at(found, ids, dy)
    return {"weight": found}


def rms_norm(dy: Array, *, x: Array, weight: Array | None, eps: float) -> Gradients:
    """Differentiate n = x / rms(x), y = n weight: dx = (dn - n mean(dn n)) / rms(x)."""
    x = _float64(x)
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    normed = x * scale
    dn = dy if weight is None else dy * _float64(weight)
    found = {"x": scale * (dn - normed * np.mean(dn * normed, axis=-1, keepdims=True))}
    if weight is not None:
        found["weight"] = np.sum(dy * normed, axis=tuple(range(dy.ndim - 1)))
    return found


def rotate(dq: Array, dk: Array, *, q: Array, k: Array, table: Rotary) -> Gradients:
    """Rotate dq and dk back by the same angles."""
    back = table._replace(sin=-_float64(table.sin))
    turned = reference.rotate(dq, dk, back)
    return {"q": turned[0], "k": turned[1]}


def attention(
    dy: Array,  # (B, T, H, D)
    *,
    q: Array,
    k: Array,
    v: Array,
    scale: float | None = None,
    window: float | None = None,
    documents: Array | None = None,
) -> Gradients:
    """Differentiate p = softmax(s), y = p v: ds = p (dp - sum(dp p)), dp = dy v^T."""
    q, heads = _float64(q), k.shape[2]
    group = q.shape[2] // heads
    k, v = (np.repeat(_float64(x), group, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * np.einsum("bthd,bshd->bhts", q, k)
    seen = reference.visible(q.shape[1], k.shape[1], window, documents)
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - NumPyArrays.logsumexp(scores, -1, keepdims=True))
    dp = np.einsum("bthd,bshd->bhts", dy, v)
    ds = p * (dp - np.sum(dp * p, axis=-1, keepdims=True))

    def shared(x: Array) -> Array:  # (B, S, H, D) -> (B, S, K, D)
        return x.reshape(*x.shape[:2], heads, group, x.shape[-1]).sum(3)

    return {
        "q": scale * np.einsum("bhts,bshd->bthd", ds, k),
        "k": shared(scale * np.einsum("bhts,bthd->bshd", ds, q)),
        "v": shared(np.einsum("bhts,bthd->bshd", p, dy)),
    }


def logits(dy: Array, *, hidden: Array, weight: Array, form: LossForm) -> Gradients:
    """Differentiate the form, then the product; dy (B, V)."""
    found = reference.logits(hidden, weight, form)
    return _product(form.pull_back(found, dy), hidden, weight)


def swiglu(dy: Array, *, gate: Array, up: Array) -> Gradients:
    """Apply silu'(g) = s + g s (1 - s), with s = sigmoid(g)."""
    gate, up = _float64(gate), _float64(up)
    s = NumPyArrays.sigmoid(gate)
    return {"gate": dy * up * (s + gate * s * (1 - s)), "up": dy * gate * s}


def linear_cross_entropy(
    dtotal: Array,
    *,
    hidden: Array,
    weight: Array,
    targets: Array,
    weights: Array | None = None,
    form: LossForm = PLAIN,
) -> Gradients:
    """Apply d loss / d logits = p - (1 - smoothing) onehot - smoothing / V + 2 z lse p, times its weight."""
    found = reference.logits(hidden, weight, form)  # (N, V)
    lse = NumPyArrays.logsumexp(found)  # (N,)
    by = np.ones(targets.shape) if weights is None else _float64(weights)
    by = dtotal * (by if by.ndim == 2 else by[:, None]) * (targets >= 0)  # (K, N)
    rows = by.sum(0)  # (N,)
    d = np.exp(found - lse[:, None]) * (rows * (1 + 2 * form.z * lse))[:, None]
    d -= rows[:, None] * (form.smoothing / found.shape[-1])
    for ids, amounts in zip(np.maximum(targets, 0), by, strict=True):
        d[np.arange(len(ids)), ids] -= (1 - form.smoothing) * amounts
    return _product(form.pull_back(found, d), hidden, weight)


def gram(
    dy: Array, *, x: Array, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0
) -> Gradients:
    """Return no gradients: none flows through the products of an update."""
    return {}


def token_losses(
    dy: Array, *, hidden: Array, weight: Array, targets: Array, form: LossForm = PLAIN
) -> Gradients:
    """Return no gradients: none flows through the losses."""
    return {}


def _product(d: Array, hidden: Array, weight: Array) -> Gradients:
    return {"hidden": d @ _float64(weight), "weight": d.T @ _float64(hidden)}


def _float64(x: Array) -> Array:
    return np.asarray(x, dtype=np.float64)
