"""Test of residual decay against its definition, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_modded.residual_decay import ResidualDecay


@pytest.mark.parametrize("layers", ["all", [1, 2]])
def test_every_sublayer_scales_the_stream(lab: Any, layers: Any) -> None:
    model, batch = lab.model(lab.plan(ResidualDecay(layers=layers))), lab.batch()
    x = model.net.embedding(batch["ids"])
    for i in range(4):
        scaled = layers == "all" or i in layers
        x = (model.scalar(i, "mid", "carry") if scaled else 1.0) * x + model.attention(i, x)
        x = (model.scalar(i, "out", "carry") if scaled else 1.0) * x + model.mlp(i, x)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)


def test_a_block_scales_by_a_tenth_at_first(lab: Any) -> None:
    model = lab.model(lab.plan(ResidualDecay()), moved=False)
    block = model.scalar(0, "mid", "carry") * model.scalar(0, "out", "carry")
    assert block == pytest.approx(1.1)


def test_at_one_it_is_the_plain_model(lab: Any) -> None:
    batch = lab.batch()
    plugins = ((ResidualDecay(start=1.0),), ())
    ours, plain = (lab.model(lab.plan(*p), moved=False) for p in plugins)
    np.testing.assert_array_equal(ours.hidden(batch), plain.hidden(batch))
