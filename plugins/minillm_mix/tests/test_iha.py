"""Tests of pseudo-heads against einsum and an explicit softmax, and against plain attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_core.nn.attention import Call
from minillm_core.nn.node import Scope
from minillm_kit import GEOMETRY
from minillm_mix.forgetting_attn import ForgettingAttn
from minillm_mix.iha import IHA, Pseudo, first


def rotated(x: np.ndarray, base: float) -> np.ndarray:
    """Rotate x (B, S, M, D) at positions 0, 1, 2 ..."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute causal softmax attention, query head h reading key-value head h // (H / K)."""
    _, S, H, D = q.shape
    k, v = (np.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / D**0.5
    scores = np.where(np.tri(S, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(("pseudo", "values"), [(2, True), (3, True), (2, False)])
def test_pseudo_heads_share_a_sequence(lab: Any, pseudo: int, values: bool) -> None:
    plan = lab.plan(IHA(pseudo=pseudo, values=values, layers=Layers([1])))
    model, rng = lab.model(plan), np.random.default_rng(0)
    attention = model.net.layers[1].attention
    x = rng.standard_normal((2, 7, 32))
    q, k, v = (leaf(x).reshape(2, 7, -1, 8) for leaf in (attention.q, attention.k, attention.v))
    layout = attention.layout

    def mixed(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        M = x.shape[2]
        if weight is None:
            return np.repeat(x, pseudo, axis=1)
        a = weight.reshape(pseudo, M, M)  # [p, target, source]
        a = a + np.einsum("p,hm->phm", np.eye(pseudo)[0], np.eye(M))
        made = np.einsum("btmd,phm->btphd", x, a)
        return made.reshape(2, 7 * pseudo, M, 8)

    base = plan.config.model.rope_base
    q, k = (rotated(mixed(one, w), base) for one, w in ((q, layout.q), (k, layout.k)))
    y = attended(q, k, mixed(v, layout.v)).reshape(2, 7, pseudo, 4, 8)
    y = np.einsum("btphd,ph->bthd", y, layout.collapse)
    expected = attention.o(y.reshape(2, 7, 32))
    np.testing.assert_allclose(
        model.net.layers[1].attention(x, Scope({})), expected, rtol=1e-6, atol=1e-6
    )


def test_at_first_a_head_is_its_own_pseudo_head(lab: Any) -> None:
    model = lab.model(lab.plan(IHA()), moved=False)
    layout = model.net.layers[0].attention.layout
    q = np.random.default_rng(1).standard_normal((1, 3, 4, 8))
    call = layout.enter(Call(q, q[:, :, :2], q[:, :, :2]))
    found = call.q.reshape(1, 3, 2, 4, 8)
    np.testing.assert_allclose(found[:, :, 0], q)
    assert not found[:, :, 1].any()
    np.testing.assert_array_equal(first(2, 2).T, [[1, 0, 0, 0], [0, 1, 0, 0]])
    y = np.random.default_rng(2).standard_normal((1, 6, 4, 8))
    np.testing.assert_allclose(layout.leave(y), (y[:, 0::2] + y[:, 1::2]) / 2)
    assert layout.stretch == 2
    assert isinstance(layout, Pseudo)


def test_documents_and_positions_are_those_of_the_token(node: Any) -> None:
    layout = node(Pseudo, geometry=GEOMETRY, pseudo=3, values=True, lr_mul=1.0)
    q = np.zeros((1, 2, 4, 8))
    call = layout.enter(
        Call(q, q[:, :, :2], q[:, :, :2], np.array([5, 6]), None, np.array([[1, 2]]))
    )
    assert call.positions.tolist() == [15, 16, 17, 18, 19, 20]
    assert call.documents.tolist() == [[1, 1, 1, 2, 2, 2]]


def test_what_corrects_by_the_values_is_refused(lab: Any) -> None:
    pytest.importorskip("minillm_modded")
    from minillm_modded.xsa import XSA

    with pytest.raises(PlanError, match="no longer line up"):
        lab.plan(IHA(), XSA())


def test_what_reads_a_value_per_token_is_refused(lab: Any) -> None:
    with pytest.raises(PlanError, match=r"reads '\w+' token by token in layers\.0\."):
        lab.plan(IHA(pseudo=3), ForgettingAttn())
    lab.plan(IHA(layers=Layers([0])), ForgettingAttn(layers=Layers([1])))
