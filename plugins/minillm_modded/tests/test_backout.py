"""Test of backout against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.errors import PlanError
from minillm_modded.backout import Backout


@pytest.mark.parametrize(
    ("layers", "layer", "place"),
    [(4, None, 2), (2, None, 0), (11, None, 7), (12, None, 8), (4, 1, 1), (4, -3, 1)],
)
def test_an_earlier_stream_is_taken_back(
    lab: Any, layers: int, layer: int | None, place: int
) -> None:
    model = lab.model(lab.plan(Backout(layer=layer), layers=layers))
    batch, streams = lab.batch(), []
    x = model.net.embedding(batch["ids"])
    for i in range(layers):
        x = x + model.attention(i, x)
        x = x + model.mlp(i, x)
        streams.append(x)
    x = x + model.scalar(None, "final", f"layers_{place}_out") * streams[place]
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)


def test_half_of_it_is_subtracted_at_first(lab: Any) -> None:
    model = lab.model(lab.plan(Backout()), moved=False)
    assert model.scalar(None, "final", "layers_2_out") == -0.5


@pytest.mark.parametrize("layer", [3, -1, 4, -5])
def test_the_last_stream_cannot_be_taken_back(lab: Any, layer: int) -> None:
    with pytest.raises(PlanError, match=f"backout.layer={layer} is not before the last of 4"):
        lab.plan(Backout(layer=layer))


def test_one_layer_has_nothing_to_take_back(lab: Any) -> None:
    with pytest.raises(PlanError, match="backout needs a layer before the last"):
        lab.plan(Backout(), layers=1)
