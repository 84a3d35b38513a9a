"""Test of the embedding skip against its definition, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_modded.embed_skip import EmbedSkip


@pytest.mark.parametrize("layers", ["all", [0, -1]])
def test_every_block_begins_from_stream_and_embedding(lab: Any, layers: Any) -> None:
    model, batch = lab.model(lab.plan(EmbedSkip(layers=layers))), lab.batch()
    x = x0 = model.net.embedding(batch["ids"])
    for i in range(4):
        if layers == "all" or i in (0, 3):
            x = model.scalar(i, "in", "carry") * x + model.scalar(i, "in", "x0") * x0
        x = x + model.attention(i, x)
        x = x + model.mlp(i, x)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)


def test_it_changes_nothing_at_first(lab: Any) -> None:
    batch = lab.batch()
    ours, plain = (lab.model(lab.plan(*p), moved=False) for p in ((EmbedSkip(),), ()))
    np.testing.assert_array_equal(ours.hidden(batch), plain.hidden(batch))


def test_its_numbers_learn_at_a_rate_of_their_own(lab: Any) -> None:
    parameters = lab.plan(EmbedSkip(lr_mul=7.0)).parameters.values()
    added = [info for info in parameters if info.owner == "embedskip"]
    assert len(added) == 8
    assert {(p.shape, p.role, p.lr_mul, p.wd_mul) for p in added} == {((1,), "scalar", 7.0, 0.0)}
