"""Tests of forgetting attention against the paper's formula, with gates summed one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.errors import PlanError
from minillm_mix.forgetting_attn import Forgetting, ForgettingAttn, cumulative, log_sigmoid
from minillm_modded.paired_heads import PairedHeads
from minillm_modded.windows import Windows

LENGTH, SIZE, DIM = 5, 4, 6


def definition(q: np.ndarray, k: np.ndarray, v: np.ndarray, x: np.ndarray, core: Any) -> np.ndarray:
    """Attend q (T, H, D), k and v (T, K, D), x (T, C) -> (T, H, D)."""
    y, group = np.zeros_like(q), q.shape[1] // k.shape[1]
    gates = 1 / (1 + np.exp(-(x @ core.gate.weight.T + core.bias)))  # (T, H)
    for i in range(len(q)):
        for head in range(q.shape[1]):
            scores = [
                k[j, head // group] @ q[i, head] / np.sqrt(SIZE)
                + sum(np.log(gates[between, head]) for between in range(j + 1, i + 1))
                for j in range(i + 1)
            ]
            weights = np.exp(scores - np.max(scores))
            y[i, head] = weights @ v[: i + 1, head // group] / weights.sum()
    return y


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("first", [LENGTH, 2])
def test_it_is_the_papers_whole_and_continued(
    node: Any, rng: Any, seen: Any, heads: int, kv_heads: int, first: int
) -> None:
    sizes = seen.geometry(heads, kv_heads, SIZE, dim=DIM)
    core = node(Forgetting, geometry=sizes, bias=0.0, lr_mul=1.0)
    q = rng.standard_normal((2, LENGTH, heads, SIZE))
    k, v = rng.standard_normal((2, 2, LENGTH, kv_heads, SIZE))
    x = rng.standard_normal((2, LENGTH, DIM))
    pieces, kept = [], None
    for start, end in ((0, first), (first, LENGTH)):
        if start == end:
            continue
        now = slice(start, end)
        mask = seen.mask(end - start, end)
        y, new = core(q[:, now], k[:, :end], v[:, :end], x[:, now], mask, SIZE**-0.5, kept)
        pieces.append(y)
        kept = new if kept is None else np.concatenate([kept, new], 1)
    got = np.concatenate(pieces, 1)
    for row in range(2):
        expected = definition(q[row], k[row], v[row], x[row], core)
        np.testing.assert_allclose(got[row], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 13])
def test_sums_are_cumulative(node: Any, rng: Any, seen: Any, length: int) -> None:
    core = node(Forgetting, geometry=seen.geometry(2, 2, SIZE, dim=DIM), bias=0.0, lr_mul=1.0)
    x = rng.standard_normal((2, length, 3))
    np.testing.assert_allclose(cumulative(core.ops, x), np.cumsum(x, 1), rtol=1e-12)


def test_a_gate_that_is_shut_has_a_finite_logarithm(node: Any, seen: Any) -> None:
    core = node(Forgetting, geometry=seen.geometry(2, 2, SIZE, dim=DIM), bias=0.0, lr_mul=1.0)
    got = log_sigmoid(core.ops, np.array([-800.0, -1.0, 0.0, 30.0, 800.0]))
    np.testing.assert_allclose(got, [-800.0, -1.3132616875, -np.log(2), 0.0, 0.0], atol=1e-10)


def test_gates_that_stay_open_are_the_plain_model(lab: Any) -> None:
    batch = lab.batch()
    open_ = ForgettingAttn(bias=40.0, rope=True)
    ours, plain = (lab.model(lab.plan(*p), moved=False) for p in ((open_,), ()))
    np.testing.assert_allclose(ours.hidden(batch), plain.hidden(batch), rtol=1e-5, atol=1e-6)


def test_nothing_turns_unless_it_is_asked_for(lab: Any) -> None:
    for rope in (False, True):
        tables = lab.model(lab.plan(ForgettingAttn(rope=rope))).net.layers[0].attention.rope
        assert bool(np.any(tables.sin)) == rope


def test_what_does_not_turn_cannot_be_rescaled(lab: Any) -> None:
    windows = {"start": 4, "window": 16, "block": 4, "yarn": True}
    with pytest.raises(PlanError, match=r"rope\.scaling is claimed by both 'forgettingattn' and"):
        lab.plan(ForgettingAttn(), Windows(**windows), seq_len=16)
    assert lab.plan(ForgettingAttn(rope=True), Windows(**windows), seq_len=16)


def test_it_is_refused_where_heads_are_paired(lab: Any) -> None:
    with pytest.raises(PlanError, match="makes several positions of each token"):
        lab.plan(ForgettingAttn(), PairedHeads())
