"""Tests of dynamically composable attention against the paper's formula, pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import ModelShape
from minillm_core.errors import PlanError
from minillm_modded.dc_mha import DCMHA, Composed
from minillm_modded.paired_heads import PairedHeads

LENGTH, SIZE, DIM, RANK = 5, 4, 6, 2


def parts(node: Any, x: np.ndarray, heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute w1 and w2 (R, H), d (H,) of a token x (C,)."""
    h = x @ node.up.weight.T
    h = h * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    w1, w2 = ((h @ one.weight.T).reshape(RANK, heads) for one in (node.first, node.second))
    return w1 / np.sqrt((w1**2).mean(-1, keepdims=True) + 1e-5), w2, np.tanh(x @ node.gate.weight.T)


def composed(a: np.ndarray, base: np.ndarray, query: Any, key: Any) -> np.ndarray:
    """Compose the scores, or weights, a (H,) of one query and one key -> (H,)."""
    out = a + a @ base
    for w1, w2, d in (query, key):
        for r in range(RANK):
            out = out + (w1[r] @ a) * w2[r]
        out = out + d * a
    return out


def definition(q: np.ndarray, k: np.ndarray, v: np.ndarray, x: np.ndarray, core: Any) -> np.ndarray:
    """Compute q (T, H, D), k and v (T, K, D), x (T, C) -> (T, H, D)."""
    heads = q.shape[1]
    group = np.arange(heads) // (heads // k.shape[1])
    of = {
        name: [parts(getattr(core, name), one, heads) for one in x]
        for name in ("query_scores", "key_scores", "query_weights", "key_weights")
    }
    y = np.zeros_like(q)
    for i in range(len(q)):
        scores = np.stack(
            [
                composed(
                    (q[i] * k[j, group]).sum(-1) / np.sqrt(SIZE),
                    core.base_scores,
                    of["query_scores"][i],
                    of["key_scores"][j],
                )
                for j in range(i + 1)
            ]
        )  # (keys, H)
        p = np.exp(scores - scores.max(0))
        p /= p.sum(0)
        for j in range(i + 1):
            weights = composed(
                p[j], core.base_weights, of["query_weights"][i], of["key_weights"][j]
            )
            y[i] += weights[:, None] * v[j, group]
    return y


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("first", [LENGTH, 2])
def test_it_is_the_papers_whole_and_continued(
    node: Any, rng: Any, heads: int, kv_heads: int, first: int
) -> None:
    shape = ModelShape(2, DIM, heads, kv_heads, SIZE, 8, 11, LENGTH, layer=0)
    core = node(Composed, geometry=shape, rank=RANK, hidden=7, lr_mul=1.0)
    q = rng.standard_normal((2, LENGTH, heads, SIZE))
    k, v = rng.standard_normal((2, 2, LENGTH, kv_heads, SIZE))
    x = rng.standard_normal((2, LENGTH, DIM))
    pieces: list[Any] = []
    kept: list[Any] = [None, None]
    for start, end in ((0, first), (first, LENGTH)):
        if start == end:
            continue
        now = slice(start, end)
        mask = np.arange(start, end)[:, None] >= np.arange(end)
        y, *new = core(q[:, now], k[:, :end], v[:, :end], x[:, now], mask, SIZE**-0.5, *kept)
        pieces.append(y)
        kept = [
            n if o is None else np.concatenate([o, n], 1) for o, n in zip(kept, new, strict=True)
        ]
    got = np.concatenate(pieces, 1)
    for row in range(2):
        expected = definition(q[row], k[row], v[row], x[row], core)
        np.testing.assert_allclose(got[row], expected, rtol=1e-9, atol=1e-9)


def test_paired_heads_have_two_positions_of_a_token(lab: Any) -> None:
    with pytest.raises(PlanError, match="'dcmha' reads 'x' token by token"):
        lab.plan(DCMHA(), PairedHeads())
    lab.plan(DCMHA(layers=[0]), PairedHeads(layers=[1]))
