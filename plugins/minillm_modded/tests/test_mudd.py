"""Tests of MUDD connections against their definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.errors import PlanError
from minillm_core.nn.node import Scope
from minillm_modded.backout import Backout
from minillm_modded.cached_stream import CachedStream
from minillm_modded.embed_skip import EmbedSkip
from minillm_modded.mudd import MUDD, WAYS
from minillm_modded.residual_decay import ResidualDecay
from minillm_modded.unet_skip import UNetSkip


def coefficients(node: Any, x: np.ndarray, scale: float) -> np.ndarray:
    """Compute the paper's A without its initial value, (B, T, N)."""
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    h = normed @ node.up.weight.T
    h = h * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return scale * (h @ node.down.weight.T) + node.bias


def mixed(mix: np.ndarray, sources: list[np.ndarray], way: int) -> np.ndarray:
    """Sum over sources, where the last starts with coefficient 1."""
    count = len(sources)
    weights = mix[..., way * count : (way + 1) * count] + np.eye(count)[-1]
    return sum(weights[..., j, None] * source for j, source in enumerate(sources))


@pytest.mark.parametrize("ways", [WAYS, ("residual",), ("v", "q")])
def test_what_a_block_reads_is_mixed_of_all_outputs(lab: Any, ways: tuple[str, ...]) -> None:
    plan = lab.plan(MUDD(ways=ways, hidden=8, scale=0.5))
    model, batch = lab.model(plan), lab.batch()
    outputs = [model.net.embedding(batch["ids"])]
    for i, block in enumerate(model.net.layers):
        x, given = outputs[-1], {}
        if i:
            node = block.site_in.computed[f"mudd_{i}"]
            mix = coefficients(node, outputs[-1], 0.5)
            assert mix.shape[-1] == len(ways) * (i + 1)
            for at, way in enumerate(ways):
                if way == "residual":
                    x = mixed(mix, outputs, at)
                else:
                    given[way] = block.attention_norm(mixed(mix, outputs, at))
        x = x + block.attention(block.attention_norm(x), Scope({}), given)
        outputs.append(x + model.mlp(i, x))
    x = outputs[-1]
    if "residual" in ways:
        x = mixed(coefficients(model.net.site_final.computed["mudd_4"], x, 0.5), outputs, 0)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-11)


@pytest.mark.parametrize("ways", [WAYS, ("residual",)])
def test_beside_embed_skip_the_stream_is_scaled_and_both_sums_are_added(
    lab: Any, ways: tuple[str, ...]
) -> None:
    """x = lambda X_i + mu x0 + (A_i - 1) X_i + sum over j < i of A_j X_j; q, k and v are MUDD's alone."""
    plan = lab.plan(MUDD(ways=ways, hidden=8, scale=0.5), EmbedSkip())
    assert plan.hash == lab.plan(EmbedSkip(), MUDD(ways=ways, hidden=8, scale=0.5)).hash
    model, batch = lab.model(plan), lab.batch()
    x0 = model.net.embedding(batch["ids"])
    outputs = [x0]
    for i, block in enumerate(model.net.layers):
        site, given = block.site_in.coefficients, {}
        scale = site["carry"].scalar
        skip = site["x0_embedskip" if "x0_embedskip" in site else "x0"].scalar
        assert scale != 1
        assert skip != 0
        x = scale * outputs[-1] + skip * x0
        if i:
            mix = coefficients(block.site_in.computed[f"mudd_{i}"], outputs[-1], 0.5)
            for at, way in enumerate(ways):
                if way == "residual":
                    x = x + mixed(mix, outputs, at) - outputs[-1]
                else:
                    given[way] = block.attention_norm(mixed(mix, outputs, at))
        x = x + block.attention(block.attention_norm(x), Scope({}), given)
        outputs.append(x + model.mlp(i, x))
    x = outputs[-1]
    x = mixed(coefficients(model.net.site_final.computed["mudd_4"], x, 0.5), outputs, 0)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-11)


@pytest.mark.parametrize("other", [Backout, ResidualDecay, UNetSkip])
def test_it_is_planned_beside_every_other_sum_of_the_stream(lab: Any, other: Any) -> None:
    plan = lab.plan(MUDD(), EmbedSkip(), other())
    assert len(plan.plugins) == 3


def test_few_sources_and_few_blocks_are_mixed(lab: Any) -> None:
    plan = lab.plan(MUDD(sources=[0], layers=[0, 3], last=False, ways=("v",)), layers=4)
    assert [len(block.apart) for block in plan.spec.blocks] == [0, 0, 0, 1]
    (site,) = plan.spec.blocks[3].apart
    assert {source for source, _, _ in site.terms} == {
        "carry",
        "x0",
        "layers.0.out",
        "mudd_own_3",
    }
    assert plan.parameters["layers.3.site_in.computed.mudd_3.down.weight"].shape == (3, 3)


def test_who_sets_the_attentions_input_would_go_unheard(lab: Any) -> None:
    with pytest.raises(PlanError, match=r"\[carry\] is claimed by both 'cachedstream' and 'mudd'"):
        lab.plan(MUDD(), CachedStream())
    lab.plan(MUDD(ways=("v", "residual")), CachedStream())


def test_one_block_has_nothing_to_mix(lab: Any) -> None:
    with pytest.raises(PlanError, match="mudd mixes outputs of several blocks"):
        lab.plan(MUDD(), layers=1)
