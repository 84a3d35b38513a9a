"""Tests of value residual against its definition, with other terms added to v."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers, Module, Plugin
from minillm_core.errors import PlanError
from minillm_mix.value_residual import ValueResidual
from minillm_modded.value_embeds import ValueEmbeds


class Heard(Module):
    """Returns y unchanged, and records v."""

    def forward(self, y: Any, v: Any) -> Any:
        HEARD.append(v)
        return y


HEARD: list[np.ndarray] = []


class Hearing(Plugin, api=1):
    """Records every layer's v, including its terms."""

    def build_attention(self, attn: Any) -> None:
        attn.out.correct(Heard)


@pytest.mark.parametrize("beside", [(), (ValueEmbeds(tables=1),)])
@pytest.mark.parametrize("source", [0, 1])
def test_later_values_are_mixed_with_the_sources(lab: Any, beside: Any, source: int) -> None:
    HEARD.clear()
    model = lab.model(lab.plan(ValueResidual(source=source), Hearing(), *beside))
    scope_free = [layer.attention for layer in model.net.layers]
    seen: list[np.ndarray] = []
    for attention in scope_free:
        own = attention.v.forward
        attention.v.__dict__["forward"] = lambda x, _, own=own: seen.append(own(x)) or seen[-1]
    model.hidden(lab.batch())
    for layer in range(source + 1, 4):
        term = scope_free[layer].v_terms["valueresidual"]
        own = seen[layer].reshape(HEARD[layer].shape)
        expected = term.first * HEARD[source] + term.own * own
        if not beside or layer < 3:  # value embeddings of the last layer are a further term
            np.testing.assert_allclose(HEARD[layer], expected, rtol=1e-10, atol=1e-12)
        else:
            assert np.abs(HEARD[layer] - expected).max() > 1e-3


def test_with_nothing_of_the_source_it_is_the_plain_model(lab: Any) -> None:
    batch, none = lab.batch(), ValueResidual(first=0.0, own=1.0)
    ours, plain = (lab.model(lab.plan(*p), moved=False) for p in ((none,), ()))
    np.testing.assert_allclose(ours.hidden(batch), plain.hidden(batch), rtol=1e-12, atol=1e-12)


def test_numbers_that_stay_are_no_parameters(lab: Any) -> None:
    assert {p.owner for p in lab.plan(ValueResidual(learned=False)).parameters.values()} == {"core"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"source": 3}, r"source=3: no layer of 4 comes after it[\s\S]*source from 0 to 2"),
        ({"layers": Layers([0])}, r"layers=\[0\] has no layer after[\s\S]*from 1 to 3"),
        ({"source": 2, "layers": Layers("every:2")}, r"has no layer after[\s\S]*from 3 to 3"),
    ],
)
def test_without_a_layer_after_the_source_it_is_refused(
    lab: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        lab.plan(ValueResidual(**options))
    with pytest.raises(PlanError, match=r"model\.layers=2 or more"):
        lab.plan(ValueResidual(), layers=1)


def test_a_second_weight_of_a_layers_own_values_is_refused(lab: Any) -> None:
    lambdas = ValueEmbeds(tables=1, mix="lambdas")  # in the first layer and the last
    for options in ({}, {"learned": False}):
        with pytest.raises(PlanError) as refused:
            lab.plan(ValueResidual(**options), lambdas)
        assert refused.value.where == "layers.3.attention.v"
        assert "valueembeds.mix=lambdas and value_residual" in refused.value.what
        assert "leave out valueembeds.mix (gates), or value_residual.own=1" in str(
            refused.value.fix
        )
    for options in ({"own": 1, "learned": False}, {"layers": Layers([1, 2])}):
        assert lab.plan(ValueResidual(**options), lambdas)


class Gone(Plugin, api=1):
    """Removes the first attention."""

    def build_model(self, model: Any) -> None:
        model.attention(0, None)


def test_an_attention_that_is_not_there_cannot_be_the_source(lab: Any) -> None:
    with pytest.raises(PlanError, match=r"taps layers\.0\.attention\.v, and 'gone' leaves out"):
        lab.plan(ValueResidual(), Gone())
    assert lab.plan(ValueResidual(source=1), Gone())


def test_layers_before_the_source_are_left_alone(lab: Any) -> None:
    plan = lab.plan(ValueResidual(source=1, layers=Layers("every:2")))
    assert [p.slot for p in plan.placements if p.owner == "valueresidual"] == [
        "layers.2.attention.v"
    ]
