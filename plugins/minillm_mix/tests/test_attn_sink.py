"""Tests of sinks against a softmax with an additional logit, query by query."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_mix.attn_sink import AttnSink, Sinks
from minillm_modded.paired_heads import PairedHeads
from minillm_modded.windows import Windows

LENGTH, SIZE = 5, 4


def definition(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """Attend q (T, H, D), k and v (S, K, D), sinks (H,) -> (T, H, D), where the queries are the last."""
    y, group = np.zeros_like(q), q.shape[1] // k.shape[1]
    for t in range(len(q)):
        here = len(k) - len(q) + t
        for head, sink in enumerate(sinks):
            keys, values = k[: here + 1, head // group], v[: here + 1, head // group]
            weights = np.exp(keys @ q[t, head] * 0.3)
            y[t, head] = weights @ values / (np.exp(sink) + weights.sum())
    return y


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("queries", [LENGTH, 2])
def test_a_sink_takes_its_share(
    node: Any, rng: Any, seen: Any, heads: int, kv_heads: int, queries: int
) -> None:
    sizes = seen.geometry(heads, kv_heads, SIZE)
    for learned in (True, False):
        core = node(Sinks, geometry=sizes, start=0.0, learned=learned, lr_mul=1.0)
        q = rng.standard_normal((2, queries, heads, SIZE))
        k, v = rng.standard_normal((2, 2, LENGTH, kv_heads, SIZE))
        got = core(q, k, v, seen.mask(queries, LENGTH), 0.3)
        sinks = core.sink if learned else np.zeros(heads)
        for row in range(2):
            expected = definition(q[row], k[row], v[row], sinks)
            np.testing.assert_allclose(got[row], expected, rtol=1e-6, atol=1e-7)


def test_a_sink_far_below_the_scores_is_the_plain_model(lab: Any) -> None:
    batch = lab.batch()
    ours, plain = (lab.model(lab.plan(*p), moved=False) for p in ((AttnSink(start=-60.0),), ()))
    np.testing.assert_allclose(ours.hidden(batch), plain.hidden(batch), rtol=1e-5, atol=1e-6)


def test_within_a_window_the_cache_slides(lab: Any, decoded: Any) -> None:
    plan = lab.plan(AttnSink(), Windows(start=4, window=4, block=4), seq_len=12)
    steps = decoded(plan, lab.model(plan).net, lab.batch(rows=1), 1e-6)
    for at, kept in enumerate(steps):
        for layer in range(4):
            k, v, _ = kept[f"layers.{layer}.attention"]
            assert k.shape[1] == v.shape[1] == min(at + 1, 4 - 1)


def test_a_fixed_one_has_no_parameter(lab: Any) -> None:
    assert not [
        p for p in lab.plan(AttnSink(learned=False)).parameters.values() if p.owner != "core"
    ]
    (shape,) = {p.shape for p in lab.plan(AttnSink()).parameters.values() if p.owner != "core"}
    assert shape == (4,)


def test_paired_heads_share_a_sink(lab: Any) -> None:
    plan = lab.plan(AttnSink(), PairedHeads())
    (shape,) = {p.shape for p in plan.parameters.values() if p.owner != "core"}
    assert shape == (2,)
    assert lab.model(plan).hidden(lab.batch()).shape == (2, 9, 32)


def test_no_kernel_is_asked_where_no_layer_attends_by_one(lab: Any, asked: Any) -> None:
    assert "attention" in asked(lab.plan(AttnSink(layers=Layers([0])), seq_len=16))
    assert "attention" not in asked(lab.plan(AttnSink()))


def test_two_functions_of_attention_are_refused(lab: Any) -> None:
    from minillm_mix.diff_attn import DiffAttn

    with pytest.raises(PlanError, match=r"attention\.core is claimed by both 'attnsink' and 'diff"):
        lab.plan(AttnSink(), DiffAttn())
    assert lab.plan(AttnSink(layers=Layers([0, 1])), DiffAttn(layers=Layers([2])))
