"""Tests of U-net skips against their definition, with and without attention after the turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_modded.embed_skip import EmbedSkip
from minillm_modded.qk_norm import QKNorm
from minillm_modded.residual_decay import ResidualDecay
from minillm_modded.sparse_gate import SparseGate
from minillm_modded.unet_skip import UNetSkip
from minillm_modded.zero_init import ZeroInit

MIRRORS = {
    2: {1: 0},
    4: {2: 1, 3: 0},
    5: {3: 1, 4: 0},
}


@pytest.mark.parametrize("layers", list(MIRRORS))
@pytest.mark.parametrize("attention", [True, False])
def test_blocks_hear_their_mirror_images(lab: Any, layers: int, attention: bool) -> None:
    model = lab.model(lab.plan(UNetSkip(attention=attention), layers=layers))
    batch, left = lab.batch(), []
    x, bare = model.net.embedding(batch["ids"]), min(layers // 2 + 1, layers - 1)
    for i in range(layers):
        if i in MIRRORS[layers]:
            source = MIRRORS[layers][i]
            x = x + model.scalar(i, "in", f"layers_{source}_out") * left[source]
        if attention or i != bare:
            x = x + model.attention(i, x)
        x = x + model.mlp(i, x)
        left.append(x)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)


def test_skips_can_be_named(lab: Any) -> None:
    sites = lab.plan(UNetSkip(skips=[(0, 2), (0, 3)], start=0.2)).spec.blocks
    assert sites[0].site_in is sites[1].site_in is None
    for index in (2, 3):
        ((source, owner, weight),) = sites[index].site_in.terms
        assert (source, owner, weight.start) == ("layers.0.out", "unetskip", 0.2)


@pytest.mark.parametrize("pair", [(2, 1), (1, 1), (-1, 2), (0, 4)])
def test_a_skip_leads_forward_within_the_model(lab: Any, pair: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="unet_skip cannot lead from block"):
        lab.plan(UNetSkip(skips=[pair]))


def test_one_block_has_no_mirror_image(lab: Any) -> None:
    with pytest.raises(PlanError, match="unet_skip needs two blocks"):
        lab.plan(UNetSkip(), layers=1)


def test_a_layer_without_attention_is_in_nobodys_way(lab: Any) -> None:
    others = (QKNorm(), SparseGate(), ZeroInit(), EmbedSkip(), ResidualDecay())
    plan = lab.plan(UNetSkip(attention=False), *others)
    model, batch = lab.model(plan), lab.batch()
    assert not [name for name in plan.parameters if name.startswith("layers.3.attention")]
    x = left = x0 = model.net.embedding(batch["ids"])
    streams = []
    for i in range(4):
        start = model.scalar(i, "in", "carry") * x + model.scalar(i, "in", "x0") * x0
        if i in (2, 3):
            left = streams[3 - i]
            start = start + model.scalar(i, "in", f"layers_{3 - i}_out") * left
        x = model.scalar(i, "mid", "carry") * start
        if i != 3:
            x = x + model.attention(i, start)
        x = model.scalar(i, "out", "carry") * x + model.mlp(i, x)
        streams.append(x)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)
    with pytest.raises(
        PlanError, match=r"qknorm\.layers names layer 3, whose attention 'unetskip'"
    ):
        lab.plan(UNetSkip(attention=False), QKNorm(layers=Layers([0, -1])))
