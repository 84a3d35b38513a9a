"""Tests of estimated parameters, FLOPs and bytes against closed formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.config.load import load
from minillm_core.nn.layers import Linear
from minillm_core.nn.module import Module
from minillm_core.nn.param import Param
from minillm_core.optim.schedules import stages
from minillm_core.plan import Plan, build_plan
from minillm_core.plan.estimate import CORE
from minillm_core.plugins.layers import Layers
from minillm_core.plugins.plugin import Plugin
from minillm_modded.paired_heads import PairedHeads
from minillm_muon.muon import Muon

Planned = Callable[..., Plan]


def preset(name: str) -> Plan:
    return build_plan(load(preset=name, default_preset=lambda: (name, "test")).config)


sizes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 4),
        "head_dim": st.sampled_from([4, 8, 16]),
        "kv_heads": st.integers(1, 3),
        "groups": st.integers(1, 3),
        "hidden": st.integers(1, 50),
        "vocab": st.integers(2, 99),
        "tied": st.booleans(),
        "seq_len": st.integers(1, 33),
    }
)


@settings(max_examples=30)
@given(sizes)
def test_the_plain_model_is_the_closed_formula(planned: Planned, size: dict[str, Any]) -> None:
    heads = size["kv_heads"] * size["groups"]
    dim = heads * size["head_dim"]
    if dim < 8:
        return
    keys = ("layers", "kv_heads", "hidden", "vocab")
    plan = planned(
        *(f"model.{key}={size[key]}" for key in keys),
        f"model.heads={heads}",
        f"model.dim={dim}",
        f"model.tied={str(size['tied']).lower()}",
        f"train.seq_len={size['seq_len']}",
    )
    cost = plan.estimate()
    layers, vocab = size["layers"], size["vocab"]
    kv = size["kv_heads"] * size["head_dim"]
    matrices = layers * (2 * dim * dim + 2 * dim * kv + 3 * dim * size["hidden"])
    embedding = vocab * dim * (1 if size["tied"] else 2)
    assert cost.parameters == plan.num_parameters == matrices + embedding + (2 * layers + 1) * dim
    assert cost.multiplied == matrices + vocab * dim  # the head, tied or not; lookups are free
    scores = 12 * layers * heads * size["head_dim"] * size["seq_len"]
    assert cost.flops_per_token == 6 * cost.multiplied + scores
    assert cost.part("attention.scores").flops == scores
    assert cost.flops_per_step == cost.flops_per_token * plan.tokens_per_step
    assert {part.name for part in cost.parts} <= {*CORE}


def test_gpt2_small_is_gpt2_small() -> None:
    cost = preset("gpt2-124m").estimate("bfloat16")
    assert cost.parameters == pytest.approx(124.4e6, rel=0.01)
    assert cost.flops_per_token == 6 * cost.multiplied + 12 * 12 * 768 * 1024
    assert cost.multiplied == pytest.approx(123.57e6, rel=1e-3)


@pytest.mark.parametrize(("name", "size"), [("tiny", 4.85e6), ("350m", 350e6), ("1b", 1e9)])
def test_presets_are_the_size_of_their_name(name: str, size: float) -> None:
    assert preset(name).estimate().parameters == pytest.approx(size, rel=0.25)


def test_paired_heads_double_the_scores_alone(planned: Planned) -> None:
    plain, paired = planned().estimate(), planned(paired_heads=PairedHeads()).estimate()
    half = planned(paired_heads=PairedHeads(layers=Layers([0, 1]))).estimate()
    scores = plain.part("attention.scores").flops
    assert paired.flops_per_token - plain.flops_per_token == scores
    assert half.flops_per_token - plain.flops_per_token == scores / 2
    assert paired.parameters == plain.parameters


class Windows(Plugin, api=1):
    """A window in every layer."""

    grows: bool = False

    def build_attention(self, attn):
        attn.window(stages((0, 4), (0.5, 8)) if self.grows else 4)


def test_a_window_bounds_the_keys(planned: Planned) -> None:
    full = planned().estimate().part("attention.scores").flops  # of 16 keys
    assert planned(w=Windows()).estimate().part("attention.scores").flops == full / 4
    growing = planned(w=Windows(grows=True))
    assert growing.estimate().part("attention.scores").flops == full / 2
    wide = planned("train.seq_len=2", w=Windows()).estimate()
    assert wide.part("attention.scores") == planned("train.seq_len=2").estimate().part(
        "attention.scores"
    )
    both = planned(w=Windows(), paired_heads=PairedHeads()).estimate()
    assert both.part("attention.scores").flops == full / 4  # the window counts 2T positions


class Added(Module):
    def __init__(self, geometry):
        super().__init__()
        self.gate = Linear(4, geometry.heads, role="gate")
        self.table = Param((geometry.vocab, 3), role="embedding.bigram")
        self.bias = Param((5,), role="scalar")

    def forward(self, y):
        return y


class Gates(Plugin, api=1):
    """Parameters of its own."""

    def build_attention(self, attn):
        if attn.layer == 0:
            attn.out.gate(Added)


class Whole(Module):
    def __init__(self, geometry):
        super().__init__()
        self.up = Linear(geometry.dim, 7, role="attention.q")

    def forward(self, x):
        return x


class Replaces(Plugin, api=1):
    """A whole attention."""

    def build_model(self, model):
        model.attention(1, Whole)


def test_a_plugins_parameters_are_a_part_of_their_own(planned: Planned) -> None:
    part = planned(gates=Gates()).estimate().part("gates")
    assert part.parameters == 4 * 4 + 64 * 3 + 5
    assert part.multiplied == 4 * 4  # lookups and elementwise scaling have no FLOPs
    assert part.flops == 6 * 16


class Costly(Module):
    """Three times plain attention's products."""

    def __init__(self, geometry):
        super().__init__()
        self.width = geometry.heads * geometry.head_dim

    def flops(self, keys):
        return 36 * self.width * keys

    def forward(self, q):
        return q


class Cores(Plugin, api=1):
    """A function of attention: as it states, or as the plain one."""

    costly: bool = False

    def build_attention(self, attn):
        attn.core(Costly if self.costly else Same)
        attn.window(4)


class Same(Module):
    def forward(self, q):
        return q


def test_a_function_of_attention_costs_what_it_states(planned: Planned) -> None:
    plain = planned(w=Windows()).estimate().part("attention.scores").flops  # 4 of 16 keys
    assert planned(core=Cores()).estimate().part("attention.scores").flops == plain
    assert planned(core=Cores(costly=True)).estimate().part("attention.scores").flops == 3 * plain


def test_what_cannot_be_counted_is_said(planned: Planned) -> None:
    cost = planned(whole=Replaces()).estimate()
    assert cost.uncounted == ("layers.1.attention of 'whole'",)
    assert cost.part("attention.scores").flops == 12 * 3 * 32 * 16
    assert cost.part("whole").parameters == 7 * 32


def test_bytes_are_the_closed_formula(planned: Planned) -> None:
    plan = planned("train.accumulate=3")
    count, tokens = plan.num_parameters, 2 * 16
    one, half = plan.estimate("float32"), plan.estimate("bfloat16")
    kept = 4 * (4 * 32 + 2 * 32 + 2 * 16 + 3 * 48) + 2 * 32
    assert dict(one.memory) == {
        "weights": 0,  # the master weights are the weights
        "master weights": 4 * count,
        "gradients": 4 * count,
        "optimizer state (adamw)": 8 * count,
        "activations": 4 * tokens * kept,
        "logits": 0,
    }
    assert half.memory["weights"] == 2 * count
    assert half.memory["master weights"] == 4 * count
    assert half.memory["gradients"] == 6 * count
    assert half.memory["activations"] == 2 * tokens * kept
    assert one.bytes == sum(one.memory.values())
    assert plan.estimate("float16").memory == half.memory
    dense = plan.estimate("bfloat16", dense_logits=True)
    assert dense.memory["logits"] == 2 * tokens * 64


def test_muon_halves_the_state_of_its_matrices(planned: Planned) -> None:
    rules = {rule.name: rule for rule in planned(muon=Muon()).estimate().rules}
    assert rules["muon"].arrays == 28
    assert rules["muon"].state_bytes == 4 * rules["muon"].parameters
    assert rules["adamw"].state_bytes == 8 * rules["adamw"].parameters
    assert sum(rule.parameters for rule in rules.values()) == planned().num_parameters


def test_checkpointing_keeps_one_block_at_a_time(planned: Planned) -> None:
    plain = planned("model.layers=8").estimate().memory["activations"]
    kept = planned("model.layers=8", "train.checkpointing=true").estimate().memory["activations"]
    assert kept < plain / 3
    some = planned("model.layers=8", "train.checkpointing=selective").estimate()
    assert kept < some.memory["activations"] < plain


def test_the_dtype_is_the_settings_and_must_be_known(planned: Planned) -> None:
    assert planned("train.dtype=bfloat16").estimate().dtype == "bfloat16"
    assert planned().estimate().dtype == "float32"
    with pytest.raises(ValueError, match="dtype 'int8': one of float32, bfloat16, float16"):
        planned().estimate("int8")


def test_parts_and_rules_are_json(planned: Planned) -> None:
    cost = planned(muon=Muon(), gates=Gates()).estimate()
    data = cost.data()
    assert sum(part["parameters"] for part in data["parts"].values()) == data["parameters"]
    assert sum(part["flops"] for part in data["parts"].values()) == data["flops_per_token"]
    assert set(data["rules"]) == {"adamw", "muon"}
