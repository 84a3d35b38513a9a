"""Tests of cached streams against their definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.errors import PlanError
from minillm_core.nn.node import Scope
from minillm_modded.cached_stream import CachedStream
from minillm_modded.embed_skip import EmbedSkip


@pytest.mark.parametrize(
    ("layers", "first", "place"), [(4, None, 2), (2, None, 0), (11, None, 8), (4, 1, 1), (4, -4, 0)]
)
def test_later_attentions_read_one_stream(
    lab: Any, layers: int, first: int | None, place: int
) -> None:
    model = lab.model(lab.plan(CachedStream(first=first), layers=layers))
    batch = lab.batch()
    x = cached = model.net.embedding(batch["ids"])
    for i, block in enumerate(model.net.layers):
        cached = x if i <= place else cached
        x = x + block.attention(block.attention_norm(cached), Scope({}))
        x = x + model.mlp(i, x)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)


def test_what_others_add_before_that_block_is_in_it(lab: Any) -> None:
    model = lab.model(lab.plan(CachedStream(first=1), EmbedSkip(layers=[1]), layers=3))
    batch, coefficients = lab.batch(), []
    x = x0 = model.net.embedding(batch["ids"])
    for i, block in enumerate(model.net.layers):
        if i == 1:
            coefficients = [model.scalar(1, "in", one) for one in ("carry", "x0")]
            x = cached = coefficients[0] * x + coefficients[1] * x0
        given = cached if i == 2 else x
        x = x + block.attention(block.attention_norm(given), Scope({}))
        x = x + model.mlp(i, x)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)


@pytest.mark.parametrize("first", [3, -1, 4, -5])
def test_nothing_reads_the_last_block_s(lab: Any, first: int) -> None:
    with pytest.raises(PlanError, match=f"cached_stream.first={first} is not before the last of 4"):
        lab.plan(CachedStream(first=first))


def test_one_block_has_none_behind_it(lab: Any) -> None:
    with pytest.raises(PlanError, match="cached_stream needs an attention after another"):
        lab.plan(CachedStream(), layers=1)
