"""Tests of removed sublayers against the stream computed by hand, and of refused removals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers
from minillm_core.errors import PlanError
from minillm_modded.layer_drop import LayerDrop
from minillm_modded.sparse_gate import SparseGate


@pytest.mark.parametrize(
    ("options", "without", "bare"),
    [
        ({}, {0}, set()),
        ({"attention": Layers([1, -1]), "mlp": Layers([0])}, {1, 3}, {0}),
        ({"attention": None, "mlp": Layers("every:2")}, set(), {0, 2}),
    ],
)
def test_the_stream_passes_what_is_not_there(
    lab: Any, options: dict[str, Any], without: set[int], bare: set[int]
) -> None:
    plan, plain = lab.plan(LayerDrop(**options)), lab.plan()
    model, batch = lab.model(plan), lab.batch()
    x = model.net.embedding(batch["ids"])
    for layer in range(4):
        x = x if layer in without else x + model.attention(layer, x)
        x = x if layer in bare else x + model.mlp(layer, x)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)
    gone = plain.parameters.keys() - plan.parameters.keys()
    parts = {(int(name.split(".")[1]), name.split(".")[2].partition("_")[0]) for name in gone}
    assert parts == {(i, "attention") for i in without} | {(i, "mlp") for i in bare}
    assert plan.estimate().flops_per_token < plain.estimate().flops_per_token


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": None}, "leaves nothing out"),
        ({"mlp": Layers([0])}, r"leaves nothing of layer 0[\s\S]*layer_drop\.mlp=none"),
        (
            {"attention": Layers([1]), "mlp": Layers("all")},
            r"leaves nothing of layer 1[\s\S]*layer_drop\.mlp=\[0,2,3\]",
        ),
        (
            {"attention": Layers("all"), "mlp": Layers([0])},
            r"leaves no attention[\s\S]*list fewer layers in layer_drop\.attention",
        ),
        ({"attention": Layers([7])}, "7"),
    ],
)
def test_a_model_needs_something_of_each_layer(
    lab: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        lab.plan(LayerDrop(**options))


def test_a_model_of_one_layer_needs_a_second_one(lab: Any) -> None:
    with pytest.raises(PlanError, match=r"layer_drop\.attention=\[0\] model\.layers=2 or more"):
        lab.plan(LayerDrop(), layers=1)


def test_others_are_in_the_layers_that_are_left(lab: Any) -> None:
    plan = lab.plan(LayerDrop(), SparseGate())
    gates = {name.split(".")[1] for name, p in plan.parameters.items() if p.owner == "sparsegate"}
    assert gates == {"1", "2", "3"}
    with pytest.raises(PlanError, match="names layer 0"):
        lab.plan(LayerDrop(), SparseGate(layers=Layers([0])))
