"""Tests of learned keys and values against softmax attention to a longer row, query by query."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_mix.prefix_kv import PrefixedAttention, PrefixKV
from minillm_modded.windows import Windows

LENGTH, SIZE = 5, 4


def definition(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Attend q (T, H, D), k and v (S, K, D), keys and values (P, K, D) -> (T, H, D)."""
    y, group = np.zeros_like(q), q.shape[1] // k.shape[1]
    for t in range(len(q)):
        here = len(k) - len(q) + t + 1
        for head in range(q.shape[1]):
            seen = [
                np.concatenate([a, b[:here]])[:, head // group] for a, b in ((keys, k), (values, v))
            ]
            weights = np.exp(seen[0] @ q[t, head] * 0.3)
            y[t, head] = weights @ seen[1] / weights.sum()
    return y


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("queries", [LENGTH, 2])
def test_it_is_attention_to_a_row_with_more_tokens_in_front(
    node: Any, rng: Any, seen: Any, heads: int, kv_heads: int, queries: int
) -> None:
    sizes = seen.geometry(heads, kv_heads, SIZE)
    core = node(PrefixedAttention, geometry=sizes, tokens=3, std=0.5, lr_mul=1.0)
    q = rng.standard_normal((2, queries, heads, SIZE))
    k, v = rng.standard_normal((2, 2, LENGTH, kv_heads, SIZE))
    got = core(q, k, v, seen.mask(queries, LENGTH), 0.3)
    for row in range(2):
        expected = definition(q[row], k[row], v[row], core.prefix_k, core.prefix_v)
        np.testing.assert_allclose(got[row], expected, rtol=1e-6, atol=1e-7)


def test_the_cache_holds_the_row_alone_and_slides_with_a_window(lab: Any, decoded: Any) -> None:
    plan = lab.plan(PrefixKV(tokens=3, std=0.5), Windows(start=4, window=4, block=4), seq_len=12)
    steps = decoded(plan, lab.model(plan).net, lab.batch(rows=1), 1e-6)
    for at, kept in enumerate(steps):
        k, v, _ = kept["layers.0.attention"]
        assert k.shape[1] == v.shape[1] == min(at + 1, 4 - 1)


def test_it_is_in_the_chosen_layers_alone(lab: Any) -> None:
    plan = lab.plan(PrefixKV(tokens=3, layers=Layers([0, -1])))
    ours = {name: p.shape for name, p in plan.parameters.items() if p.owner != "core"}
    assert {name.split(".")[1] for name in ours} == {"0", "3"}
    assert {*ours.values()} == {(3, 2, 8)}
