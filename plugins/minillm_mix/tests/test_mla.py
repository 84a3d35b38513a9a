"""Tests of latent attention against the paper's formulas, and of its cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.config.load import load
from minillm_core.errors import PlanError
from minillm_core.plan import build_plan
from minillm_mix.mla import MLA, Latent
from minillm_modded.qk_norm import QKNorm

LENGTH, DIM = 5, 12


def turned(x: np.ndarray, position: int) -> np.ndarray:
    half = len(x) // 2
    angle = position * 10_000.0 ** (-np.arange(half) / half)
    a, b = x[:half], x[half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    )


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def definition(
    x: np.ndarray,
    node: Any,
    heads: int,
    size: int,
    rope: int,
    window: int | None = None,
    documents: np.ndarray | None = None,
) -> np.ndarray:
    """Attend x (T, C), documents (T,) -> (T, C)."""
    down = x @ node.kv_down.weight.T
    c = normed(down[:, : node.kv_rank], node.kv_norm)
    queries = x if node.q_down is None else normed(x @ node.q_down.weight.T, node.q_norm)
    q = (queries @ node.q.weight.T).reshape(len(x), heads, size + rope)
    k, v = ((c @ leaf.weight.T).reshape(len(x), heads, size) for leaf in (node.k, node.v))
    y = np.zeros((len(x), heads, size))
    for t in range(len(x)):
        seen = np.arange(t + 1)[max(0, t + 1 - (window or len(x))) :]
        if documents is not None:
            seen = seen[documents[seen] == documents[t]]
        for head in range(heads):
            scores = np.array(
                [
                    q[t, head, :size] @ k[s, head]
                    + turned(q[t, head, size:], t) @ turned(down[s, node.kv_rank :], s)
                    for s in seen
                ]
            ) / np.sqrt(size + rope)
            weights = np.exp(scores - scores.max())
            y[t, head] = weights @ v[seen, head] / weights.sum()
    return y.reshape(len(x), -1) @ node.o.weight.T


@pytest.mark.parametrize("q_rank", [None, 7])
@pytest.mark.parametrize("first", [LENGTH, 2])
def test_it_is_the_papers_whole_and_continued(
    node: Any, rng: Any, seen: Any, q_rank: int | None, first: int
) -> None:
    sizes = seen.geometry(3, 1, 4, dim=DIM)
    made = node(Latent, geometry=sizes, kv_rank=5, rope_dim=2, q_rank=q_rank, base=10_000.0)
    x = rng.standard_normal((2, LENGTH, DIM))
    y, kept = made(x[:, :first], None, None, None)
    if first < LENGTH:
        after, new = made(x[:, first:], None, None, kept)
        y, kept = np.concatenate([y, after], 1), np.concatenate([kept, new], 1)
    assert kept.shape == (2, LENGTH, 5 + 2)
    for row in range(2):
        expected = definition(x[row], made, 3, 4, 2)
        np.testing.assert_allclose(y[row], expected, rtol=1e-4, atol=1e-4)  # tables are float32


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("documents", [None, ((0, 0, 1, 1, 1), (3, 4, 4, 4, 9))])
@pytest.mark.parametrize("first", [LENGTH, 2])
def test_it_sees_a_window_and_its_own_document(
    node: Any, rng: Any, seen: Any, window: int | None, documents: Any, first: int
) -> None:
    sizes = seen.geometry(3, 1, 4, dim=DIM)
    made = node(Latent, geometry=sizes, kv_rank=5, rope_dim=2, q_rank=None, base=10_000.0)
    x = rng.standard_normal((2, LENGTH, DIM))
    of = None if documents is None else np.array(documents, np.int32)
    y, kept = made(x[:, :first], window, None if of is None else of[:, :first], None)
    if first < LENGTH:
        y = np.concatenate([y, made(x[:, first:], window, of, kept)[0]], 1)
    for row in range(2):
        its = None if of is None else of[row]
        expected = definition(x[row], made, 3, 4, 2, window, its)
        np.testing.assert_allclose(y[row], expected, rtol=1e-4, atol=1e-4)


def test_the_cache_has_the_papers_numbers_a_token(lab: Any, decoded: Any) -> None:
    plan = lab.plan(MLA(kv_rank=16, rope_dim=4), seq_len=12)
    *_, kept = decoded(plan, lab.model(plan).net, {"ids": lab.batch(1, 9)["ids"]}, 1e-6)
    for layer in range(4):
        held = kept[f"layers.{layer}.attention"]
        assert sum(array.size for array in held) == 9 * (16 + 4)
    assert {path.count(".") for path in kept} == {2}  # and nothing else


def test_sizes_are_the_papers_where_none_are_given(lab: Any) -> None:
    parameters = lab.plan(MLA(), dim=64).parameters  # head_dim 16
    assert parameters["layers.0.attention.kv_down.weight"].shape == (4 * 16 + 8, 64)
    with pytest.raises(PlanError, match="mla cannot rotate 3 features"):
        lab.plan(MLA(rope_dim=3))


def test_it_turns_as_the_model_does(lab: Any) -> None:
    spec = lab.plan(MLA(), rope_base=500.0).spec
    assert dict(spec.blocks[0].attention.arguments)["base"] == 500.0
    assert dict(lab.plan(MLA(rope_base=9.0)).spec.blocks[0].attention.arguments)["base"] == 9.0


def test_its_products_are_counted(lab: Any) -> None:
    cost = lab.plan(MLA(kv_rank=16, rope_dim=4), seq_len=16).estimate()  # 4 heads of 8, 4 layers
    assert cost.part("attention.scores").flops == 4 * 6 * 4 * (2 * 8 + 4) * 16
    assert not cost.uncounted


def test_it_shares_a_model_with_techniques_of_attention(lab: Any) -> None:
    plan = lab.plan(MLA(layers=Layers([1])), QKNorm())
    normed_ = {p.slot for p in plan.placements if p.owner == "qknorm"}
    assert normed_ == {f"layers.{layer}.attention.qk.norm" for layer in (0, 2, 3)}
    assert plan.notes == (
        "mla: its attention in layer 1 has no slots: qknorm is in the other layers",
    )


def test_the_recipe_takes_it_in_a_layer() -> None:
    config = load(
        preset="speedrun",
        plugins="mla",
        assignments=("mla.layers=[3]",),
        default_preset=lambda: ("speedrun", "test"),
    )
    plan = build_plan(config)
    (note,) = (note for note in plan.notes if note.startswith("mla:"))
    assert "half_rope, qk_norm are in the other layers" in note
    assert (
        plan.spec.blocks[3].seen.window == plan.spec.attentions[1].window
    )  # the windows of short layers
