"""Tests of differential attention against the paper's formulas, head by head and query by query."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_mix.diff_attn import DiffAttn, Difference, start_of
from minillm_modded.paired_heads import PairedHeads
from minillm_modded.xsa import XSA, Exclude

LENGTH, SIZE = 5, 4


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def definition(q: np.ndarray, k: np.ndarray, v: np.ndarray, core: Any) -> np.ndarray:
    """Attend q (T, H, D), k and v (S, K, D) -> (T, H, D), where the queries are the last."""
    length, heads, size = q.shape
    factor = np.exp(core.lambda_q1 @ core.lambda_k1) - np.exp(core.lambda_q2 @ core.lambda_k2) + 0.6
    y = np.zeros_like(q)
    for t in range(length):
        seen = len(k) - length + t + 1
        for head in range(heads // 2):
            pair = head // (heads // k.shape[1])  # of key-value heads
            one, other = (
                softmax(k[:seen, 2 * pair + i] @ q[t, 2 * head + i] / np.sqrt(size)) for i in (0, 1)
            )
            values = np.concatenate([v[:seen, 2 * pair], v[:seen, 2 * pair + 1]], -1)  # (seen, 2 D)
            out = (one - factor * other) @ values
            out = out / np.sqrt((out**2).mean() + 1e-5) * core.norm * (1 - 0.6)
            y[t, 2 * head : 2 * head + 2] = out.reshape(2, size)
    return y


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 2), (2, 2)])
@pytest.mark.parametrize("queries", [LENGTH, 2])
def test_it_is_the_papers(
    node: Any, rng: Any, seen: Any, heads: int, kv_heads: int, queries: int
) -> None:
    core = node(Difference, geometry=seen.geometry(heads, kv_heads, SIZE), start=0.6)
    q = rng.standard_normal((2, queries, heads, SIZE))
    k, v = rng.standard_normal((2, 2, LENGTH, kv_heads, SIZE))
    got = core(q, k, v, None, None, SIZE**-0.5)
    for row in range(2):
        expected = definition(q[row], k[row], v[row], core)
        np.testing.assert_allclose(got[row], expected, rtol=1e-6, atol=1e-7)


def test_the_factor_grows_with_depth() -> None:
    assert start_of(0) == pytest.approx(0.2)
    assert start_of(11) == pytest.approx(0.8 - 0.6 * np.exp(-3.3))


def test_its_products_are_counted(lab: Any) -> None:
    scores = [lab.plan(*p).estimate().part("attention.scores").flops for p in ((DiffAttn(),), ())]
    assert scores[0] == 2 * scores[1]


def test_it_asks_the_kernel(lab: Any, asked: Any) -> None:
    from minillm_modded.windows import Windows

    windows = Windows(window=4, start=4, block=4, stages=1)
    assert asked(lab.plan(DiffAttn(), windows, seq_len=16))["attention"]["window"] == "static"


def test_heads_that_a_layout_joins_make_no_pairs_either(lab: Any) -> None:
    with pytest.raises(
        PlanError, match=r"layer 0 has 1, in the layout of 'pairedheads'"
    ) as refused:
        lab.plan(DiffAttn(), PairedHeads())
    assert "leave out 'diffattn' or 'pairedheads'" in str(refused.value.fix)
    assert lab.plan(DiffAttn(), PairedHeads(), kv_heads=4)


def test_a_token_that_sees_itself_alone_has_nothing_but_its_value(
    node: Any, rng: Any, seen: Any
) -> None:
    sizes = seen.geometry(4, 4, SIZE)
    core, exclude = (
        node(Difference, geometry=sizes, start=0.6),
        node(Exclude, geometry=sizes, lr_mul=1),
    )
    core.norm, exclude.alpha = np.ones(2 * SIZE), np.full(4, 30.0)
    q, k, v = rng.standard_normal((3, 2, 1, 4, SIZE))
    y = core(q, k, v, None, None, SIZE**-0.5)
    assert np.abs(y).max() > 0.1
    np.testing.assert_allclose(exclude(y, v), 0, atol=1e-7)


def test_a_value_that_heads_share_is_not_taken_out(lab: Any) -> None:
    with pytest.raises(PlanError) as refused:
        lab.plan(DiffAttn(), XSA())
    assert "'xsa' cannot join layers.0.attention.out.project_out" in refused.value.what
    assert "leave out 'diffattn' or 'xsa'" in str(refused.value.fix)
    assert lab.plan(DiffAttn(layers=Layers([0, 2])), XSA(layers=Layers([1, 3])))
    assert lab.plan(DiffAttn(), XSA(), kv_heads=4)


@pytest.mark.parametrize("sizes", [{"heads": 1, "kv_heads": 1}, {"kv_heads": 1}])
def test_heads_that_make_no_pairs_are_refused(lab: Any, sizes: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="diff_attn pairs heads, but layer 0 has 1"):
        lab.plan(DiffAttn(), **sizes)
