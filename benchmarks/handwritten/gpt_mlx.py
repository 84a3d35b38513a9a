"""The plain model in MLX, written by hand: one compiled step with explicit state, without minillm.

Precision: float32 master weights and moments; the step uses bfloat16 copies of the weights,
computes gradients with respect to the copies, and clips and updates in float32. q, k and v are one
product, and so are gate and up. The loss is accumulated in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from benchmarks.handwritten.shape import GPT2_124M, Shape

__all__ = ["Trainer", "initial_weights", "loss_of"]

Tree = dict[str, Any]


def initial_weights(shape: Shape, seed: int = 0) -> Tree:
    """Draw float32: normal 0.02, smaller for products added to the stream, ones for norms."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int, std: float = 0.02) -> mx.array:
        return mx.array(rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std))

    kv = shape.kv_heads * shape.head_dim
    blocks = [
        {
            "attention_norm": mx.ones(shape.dim),
            "qkv": normal(shape.dim + 2 * kv, shape.dim),
            "o": normal(shape.dim, shape.dim, shape.output_std),
            "mlp_norm": mx.ones(shape.dim),
            "gate_up": normal(2 * shape.hidden, shape.dim),
            "down": normal(shape.dim, shape.hidden, shape.output_std),
        }
        for _ in range(shape.layers)
    ]
    embedding = normal(shape.vocab, shape.dim)
    return {"embedding": embedding, "blocks": blocks, "norm": mx.ones(shape.dim)}


def attention(block: Tree, x: mx.array, shape: Shape) -> mx.array:
    """Compute causal attention: x (B, T, C) -> (B, T, C)."""
    B, T, C = x.shape
    D, kv = shape.head_dim, shape.kv_heads * shape.head_dim
    q, k, v = mx.split(x @ block["qkv"].T, [C, C + kv], axis=-1)
    q, k, v = (y.reshape(B, T, -1, D).transpose(0, 2, 1, 3) for y in (q, k, v))  # (B, H, T, D)
    rope = partial(
        mx.fast.rope, dims=D, traditional=False, base=shape.rope_base, scale=1.0, offset=0
    )
    y = mx.fast.scaled_dot_product_attention(rope(q), rope(k), v, scale=D**-0.5, mask="causal")
    return y.transpose(0, 2, 1, 3).reshape(B, T, C) @ block["o"].T


def mlp(block: Tree, x: mx.array) -> mx.array:
    """Compute SwiGLU: x (B, T, C) -> (B, T, C)."""
    gate, up = mx.split(x @ block["gate_up"].T, 2, axis=-1)
    return (gate * mx.sigmoid(gate) * up) @ block["down"].T


def loss_of(weights: Tree, ids: mx.array, labels: mx.array, shape: Shape) -> mx.array:
    """Compute mean cross-entropy of ids, labels int32 (B, T), 0-d float32; in the weights' dtype."""
    norm = partial(mx.fast.rms_norm, eps=shape.epsilon)
    x = weights["embedding"][ids]
    for block in weights["blocks"]:
        x = x + attention(block, norm(x, block["attention_norm"]), shape)
        x = x + mlp(block, norm(x, block["mlp_norm"]))
    logits = norm(x, weights["norm"]) @ weights["embedding"].T  # (B, T, V)
    if mx.default_device() == mx.cpu:
        logits = logits.astype(mx.float32)  # the CPU reduces in the dtype of the logits
    return mx.fast.cross_entropy(logits, labels).mean()


def adamw(
    weight: mx.array,
    grad: mx.array,
    m: mx.array,
    v: mx.array,
    step: mx.array,
    lr: mx.array,
    *,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """Update one weight with bias correction and decoupled decay (none on norms), float32."""
    m = betas[0] * m + (1 - betas[0]) * grad
    v = betas[1] * v + (1 - betas[1]) * mx.square(grad)
    update = (m / (1 - betas[0] ** step)) / (mx.sqrt(v / (1 - betas[1] ** step)) + epsilon)
    if weight.ndim == 2:
        update = update + weight_decay * weight
    return weight - lr * update, m, v


class Trainer:
    """A trainer of the model: AdamW, global-norm clipping.

    Args:
        shape: of the model.
        dtype: of the products; the master weights are float32.
        weights: initial weights; drawn if not given.
    """

    def __init__(
        self,
        shape: Shape = GPT2_124M,
        dtype: mx.Dtype = mx.bfloat16,
        weights: Tree | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float = 1.0,
    ) -> None:
        weights = weights or initial_weights(shape)
        zeros = partial(tree_map, mx.zeros_like)
        self.state: Tree = {
            "weights": weights,
            "m": zeros(weights),
            "v": zeros(weights),
            "step": mx.array(0.0),
        }
        rule = partial(adamw, betas=betas, epsilon=epsilon, weight_decay=weight_decay)

        def step(state: Tree, ids: mx.array, labels: mx.array, lr: mx.array) -> Any:
            copies = tree_map(lambda w: w.astype(dtype), state["weights"])
            loss, grads = mx.value_and_grad(loss_of)(copies, ids, labels, shape)
            grads = tree_map(lambda g: g.astype(mx.float32), grads)
            # The last axis first: a flat sum is inaccurate on a CPU.
            norm = mx.sqrt(sum(mx.square(g).sum(-1).sum() for _, g in tree_flatten(grads)))
            factor = mx.minimum(clip / (norm + 1e-6), 1.0)
            grads = tree_map(lambda g: g * factor, grads)
            count = state["step"] + 1
            updated = tree_map(
                lambda w, g, m, v: rule(w, g, m, v, count, lr),
                state["weights"],
                grads,
                state["m"],
                state["v"],
            )
            weights, m, v = (
                tree_map(lambda u, i=i: u[i], updated, is_leaf=lambda u: isinstance(u, tuple))
                for i in range(3)
            )
            return {"weights": weights, "m": m, "v": v, "step": count}, loss, norm

        self._step = mx.compile(step)
        mx.eval(self.state)

    def step(self, ids: np.ndarray, labels: np.ndarray, lr: float) -> tuple[mx.array, mx.array]:
        """Enqueue one step on int32 (B, T); the caller reads the loss and the gradient's norm."""
        self.state, loss, norm = self._step(
            self.state, mx.array(ids), mx.array(labels), mx.array(lr)
        )
        mx.async_eval(self.state, loss, norm)
        return loss, norm
