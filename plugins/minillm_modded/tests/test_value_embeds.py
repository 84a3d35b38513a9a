"""Tests of value embeddings against their formulas, head by head, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import PlanError, PluginError
from minillm_core.config.load import load
from minillm_core.nn.module import declared
from minillm_core.nn.node import Scope
from minillm_core.nn.param import Param
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.options import validated
from minillm_kit import materialise
from minillm_modded.value_embeds import ValueEmbeds

DIM, VOCAB = 16, 11


def planned(
    plugin: ValueEmbeds, *, layers: int = 2, heads: int = 4, kv_heads: int = 2, **more: int
) -> Plan:
    sizes = {"layers": layers, "dim": DIM, "heads": heads, "kv_heads": kv_heads, "hidden": 8}
    sizes |= more
    config = load(
        preset="tiny",
        assignments=(*(f"model.{k}={v}" for k, v in sizes.items()), f"model.vocab={VOCAB}"),
        default_preset=lambda: ("tiny", "test"),
    ).config
    return build_plan(config, [LoadedPlugin.of("value_embeds", plugin)])


def stirred(plan: Plan, seed: int) -> Any:
    """Build a model with random parameters."""
    model, rng = materialise(plan, 0), np.random.default_rng(seed)
    for _, module, attribute, param in declared(model, Param):
        setattr(module, attribute, rng.standard_normal(param.shape))
    return model


@settings(max_examples=12)
@given(
    shape=st.sampled_from([(4, 4), (4, 2), (4, 1), (2, 2)]),
    mix=st.sampled_from(["gates", "lambdas"]),
    seed=st.integers(0, 2**32),
)
def test_values_are_the_formulas(shape: tuple[int, int], mix: Any, seed: int) -> None:
    """With one token in the row, attention returns its value unchanged."""
    heads, kv_heads = shape
    width: dict[str, Any] = {"gate_width": 5} if mix == "gates" else {}
    plan = planned(ValueEmbeds(mix=mix, **width), heads=heads, kv_heads=kv_heads)
    model = stirred(plan, seed)
    size, rng = DIM // heads, np.random.default_rng(seed)
    ids, x = rng.integers(0, VOCAB, (3, 1)), rng.standard_normal((3, 1, DIM))
    table = model.streams["value_embedding_0"]
    layer = model.layers[1].attention
    layer.o.weight = np.eye(DIM)
    (term,) = layer.v_terms.values()
    got = layer(x, Scope({"value_embedding_0": table(ids)}))
    for row in range(3):
        for head in range(heads):
            kv = head // (heads // kv_heads)
            mine = slice(kv * size, (kv + 1) * size)
            v = layer.v.weight[mine] @ x[row, 0]
            looked_up = table.weight[ids[row, 0], mine]
            if mix == "lambdas":
                want = term.l0 * v + term.l1 * looked_up
            else:
                opened = 2 / (1 + np.exp(-term.gate.weight[kv] @ x[row, 0, :5]))
                want = v + opened * looked_up
            np.testing.assert_allclose(got[row, 0, head * size : (head + 1) * size], want)


def places(plan: Plan) -> dict[int, str]:
    """Map each layer to the stream that it reads."""
    found = {}
    for layer, block in enumerate(plan.spec.blocks):
        for node in block.attention.v:  # type: ignore[union-attr]
            found[layer] = node.external[0].removeprefix("value_embedding_")
    return found


@pytest.mark.parametrize(
    ("options", "layers", "want"),
    [
        ({}, 12, {0: "0", 1: "1", 2: "2", 9: "0", 10: "1", 11: "2"}),
        ({}, 4, {0: "0", 1: "1", 2: "0", 3: "1"}),
        ({}, 5, {0: "0", 1: "1", 3: "0", 4: "1"}),
        ({}, 1, {0: "0"}),
        ({"tables": 1}, 4, {0: "0", 3: "0"}),
        ({"layers": "every:2"}, 4, {0: "0", 2: "1"}),
        ({"layers": [-1]}, 4, {3: "0"}),
    ],
)
def test_tables_serve_the_first_and_the_last_layers(
    options: dict[str, Any], layers: int, want: dict[int, str]
) -> None:
    plan = planned(ValueEmbeds(**options), layers=layers)
    assert places(plan) == want
    assert len(plan.spec.streams) == len(set(want.values()))


def test_the_tables_learn_at_a_rate_of_their_own() -> None:
    plan = planned(ValueEmbeds(lr_mul=50, wd_mul=2, betas=(0.5, 0.6)))
    ((member, rule),) = (
        (m, g.rule) for g in plan.groups for m in g.members if "value_embedding" in m.name
    )
    assert (member.lr_mul, member.wd_mul, member.shape) == (50, 2, (VOCAB, 8))
    held = {anchor: dict(stage.arguments) for anchor, _, stage in rule.stages}
    assert (held["precondition"]["beta1"], held["precondition"]["beta2"]) == (0.5, 0.6)
    assert (
        plan.estimate().part("value_embeds").flops == 6 * 2 * 2 * 12
    )  # only the gates: lookups have no FLOPs


@pytest.mark.parametrize(
    ("mix", "std", "want"), [("gates", None, 0.25), ("lambdas", None, 1.0), ("gates", 0.0, 0.0)]
)
def test_tables_start_at_the_size_that_suits_them(mix: Any, std: float | None, want: float) -> None:
    plan = planned(ValueEmbeds(mix=mix, std=std))
    name = "streams.value_embedding_0.weight"
    assert plan.parameters[name].init == {"init": "normal", "std": want}


@pytest.mark.parametrize(
    ("options", "layers", "said"),
    [
        ({"tables": 3}, 4, "value_embeds.tables=2, or less"),
        ({"gate_width": 17}, 2, "value_embeds.gate_width=16, or less"),
        ({"layers": [7]}, 4, "outside the model"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    options: dict[str, Any], layers: int, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        planned(ValueEmbeds(**options), layers=layers)


@pytest.mark.parametrize("head_dim", [2, 8])
def test_a_gate_reads_the_stream_however_wide_heads_are(head_dim: int) -> None:
    assert planned(ValueEmbeds(gate_width=16), head_dim=head_dim)
    with pytest.raises(PlanError, match="x has 16 features"):
        planned(ValueEmbeds(gate_width=17), head_dim=head_dim)


def test_tables_and_layers_are_refused_together() -> None:
    with pytest.raises(PluginError, match="layers have their own"):
        validated(ValueEmbeds, "value_embeds", {"tables": 2, "layers": "all"})


def test_a_width_of_gates_that_are_not_there_is_refused() -> None:
    with pytest.raises(PluginError, match="lambdas have none"):
        validated(ValueEmbeds, "value_embeds", {"mix": "lambdas", "gate_width": 5})
    validated(ValueEmbeds, "value_embeds", {"mix": "lambdas", "gate_width": 12})  # as in run.json
