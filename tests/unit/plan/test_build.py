"""Tests of building a plan: every slot is applied in its place, for any order of the plugins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.config.schema import Config
from minillm_core.nn.attention import AttentionSpec
from minillm_core.nn.init import Constant, fan_in_residual, zeros
from minillm_core.nn.layers import Linear
from minillm_core.nn.module import Module
from minillm_core.nn.param import Param
from minillm_core.nn.residual import Learned
from minillm_core.ops.form import TanhCap
from minillm_core.ops.select import Candidate
from minillm_core.optim.schedules import cosine, piecewise, scheduled, stages
from minillm_core.optim.stage import stage
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.options import option
from minillm_core.plugins.plugin import Plugin

Planned = Callable[..., Plan]


class QK(Module):
    def forward(self, q, k):
        return q, k


class Values(Module):
    def forward(self, v, bigram):
        return v * 0 + bigram[..., None, :8]


class Gate(Module):
    def __init__(self, geometry, width: int = 4):
        super().__init__()
        self.gate = Linear(width, geometry.heads, init=zeros, role="gate", lr_mul=0.1)
        self.width = width

    def forward(self, y, x):
        return y * self.ops.sigmoid(self.gate(x[..., : self.width]))[..., None]


class Carry(Module):
    def forward(self, carry):
        return carry


class Positions(Module):
    def forward(self, positions):
        return positions


class Bigram(Module):
    def __init__(self, geometry):
        super().__init__()
        shape = (geometry.vocab, geometry.dim)
        self.table = Param(shape, axes=("vocab", "dim"), init=zeros, role="embedding.bigram")

    def forward(self, ids):
        return self.ops.embedding(ids, self.table)


class After(Module):
    def forward(self, bigram, x0):
        return bigram + x0


class Sublayer(Module):
    terms = ("balance",)

    def __init__(self, geometry):
        super().__init__()
        self.up = Linear(geometry.dim, geometry.dim, role="mlp.up")

    def forward(self, x):
        return self.up(x), x.sum()


class Scalar(Module):
    def forward(self, x):
        return x.sum()


class Product(Module):
    def __init__(self, rank: int):
        super().__init__()
        self.a = Linear(32, rank, role="attention.q")

    def forward(self, x, weight):
        return self.ops.linear(x, weight)


def halved(head_dim: int, base: float) -> np.ndarray:
    return base ** (-np.arange(head_dim // 2) / head_dim)


def stretched(frequencies: np.ndarray, factor: float) -> np.ndarray:
    return frequencies / factor


def eye(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.eye(*shape, dtype=np.float32)


def halve(ops: Any, update: Any, param: Any, state: Any, *, by: float) -> Any:
    return update * by, state


class Attn(Plugin, api=1):
    """Everything of attention, in all layers but the last."""

    def build_attention(self, attn):
        if attn.layer == attn.layers - 1:
            return
        attn.qk.norm(QK)
        attn.v(Values)
        attn.out.gate(Gate, width=8)
        attn.window(stages((0, 8), (0.5, 16)) if attn.layer % 2 else 4)
        attn.scale(cosine(1.0, 0.5))
        attn.rope.frequencies(halved, base=100.0)
        attn.rope.scaling(stretched, factor=2.0)
        attn.rope.positions(Positions)


class Shift(Plugin, api=1):
    """After the rotation, behind the other's nodes where both are."""

    def build_attention(self, attn):
        if attn.layer == attn.layers - 1:
            return
        attn.qk.shift(QK, after=("attn",))
        attn.qk.norm(QK, name="second", after=("attn",))
        attn.out.gate(Gate, before=("attn",))


class Around(Plugin, api=1):
    """Everything of the model outside attention."""

    def build_model(self, model):
        model.embed.mix(Carry2)
        model.stream("bigram", Bigram)
        model.stream("after", After)
        tap = model.tap("layers.0.mid")
        model.residual("layers.1.in", "x0", 0.5)
        model.residual("layers.1.mid", "carry", Learned(1.0, lr_mul=5.0))
        model.residual("layers.2.out", tap, piecewise((0, 0.0), (1, 0.5)))
        model.residual("final", "after", Carry)
        model.mlp(0, Sublayer)
        model.attention(-1, None)
        model.norm("final", None)
        model.linear("layers.0.attention.q", Product, rank=2)
        model.init("layers.1.attention.o.weight", zeros)
        model.init("layers.2.attention.o.weight", eye)
        model.init_role("mlp.down", zeros)

    def compute_loss(self, loss):
        loss.term("balance", emitted="balance", weight=scheduled(0.01))
        loss.term("size", Scalar, weight=1e-4)


class Carry2(Module):
    def forward(self, x):
        return x


class Targets(Plugin, api=1):
    """Everything of the loss."""

    def compute_loss(self, loss):
        loss.logits(cap=TanhCap(15.0), z=1e-4)
        loss.target(0.5, offset=2)
        loss.target(piecewise((0, 1.0), (1, 0.0)), field="prefix")

    def build_data(self, data):
        data.field("prefix", "int32")

    def on_batch(self, batch, phase):
        return batch


class Reader(Plugin, api=1):
    """Reads what another writes."""

    def build_data(self, data):
        data.reads("prefix", "documents")

    def on_batch(self, batch, phase):
        return batch


class Rule(Plugin, api=1):
    """Everything of the optimizer."""

    def optimizer_factory(self, optimizer):
        optimizer.rule("plainly", lr=0.5, scale=stage(halve, by=scheduled(0.5)))
        optimizer.assign("plainly", lambda name, p: p.role.startswith("mlp"))
        optimizer.set(lambda name, p: p.role == "norm", lr_mul=2.0, betas=(0.8, 0.9))


class Extends(Plugin, api=1):
    """A stage more."""

    def optimizer_factory(self, optimizer):
        optimizer.extend("plainly", "momentum", stage(halve, by=0.25))


class Kernel(Plugin, api=1):
    """A candidate."""

    def kernel_provider(self, kernels):
        kernels.candidate(Candidate("swiglu", "mine", ("torch",), "operator:mul"))


EVERYTHING: dict[str, Plugin] = {
    "attn": Attn(),
    "shift": Shift(),
    "around": Around(),
    "targets": Targets(),
    "areader": Reader(),
    "rule": Rule(),
    "extends": Extends(),
    "kernel": Kernel(),
}


@pytest.fixture(scope="module")
def full(planned: Planned) -> Plan:
    """Build a plan with every slot filled."""
    return planned(**EVERYTHING)


def slots(plan: Plan, owner: str) -> dict[str, str]:
    return {p.slot: p.what for p in plan.placements if p.owner == owner}


def test_attention_slots_land_in_every_layer(full: Plan) -> None:
    mine = slots(full, "attn")
    for layer in range(3):  # the last one's attention is removed
        at = f"layers.{layer}.attention"
        assert mine[f"{at}.qk.norm"] == "QK"
        assert mine[f"{at}.v"] == "Values"
        assert mine[f"{at}.out.gate"] == "Gate(width=8)"
        assert mine[f"{at}.rope.frequencies"] == "halved"
        assert mine[f"{at}.rope.scaling"] == "stretched"
        assert mine[f"{at}.rope.positions"] == "Positions"
    assert mine["layers.0.attention.window"] == "4"
    assert full.staged == ("attn.window",)


@pytest.fixture
def without_hole(planned: Planned) -> Plan:
    return planned(attn=Attn(), shift=Shift(), bigram=OnlyBigram())


class OnlyBigram(Plugin, api=1):
    """A stream that attn reads."""

    def build_model(self, model):
        model.stream("bigram", Bigram)


def test_chains_are_ordered_across_plugins(without_hole: Plan) -> None:
    attention = without_hole.spec.blocks[0].attention
    assert isinstance(attention, AttentionSpec)
    assert [node.name for node in attention.before_rope] == ["attn", "shift_second"]
    assert [node.name for node in attention.after_rope] == ["shift"]
    assert [node.name for node in attention.out] == ["shift", "attn"]


class Share(Plugin, api=1):
    """A learned share of x0 at the end."""

    start: float = option(0.5, help="the share")

    def build_model(self, model):
        model.residual("final", "x0", Learned(self.start))


def test_names_of_shared_coefficients_say_whose_they_are(planned: Planned) -> None:
    def scalars(plan: Plan) -> list[str]:
        return [name for name, p in plan.parameters.items() if p.role == "scalar"]

    assert scalars(planned(one=Share())) == ["site_final.coefficients.x0.scalar"]
    both = [f"site_final.coefficients.x0_{name}.scalar" for name in ("one", "two")]
    assert scalars(planned(one=Share(), two=Share(start=1.0))) == both


def test_model_slots_land(full: Plan) -> None:
    mine = slots(full, "around")
    assert mine["model.embed.mix"] == "Carry2"
    assert mine["model.residual[layers.1.in][x0]"] == "0.5"
    assert mine["model.residual[layers.1.mid][carry]"] == "learned, from 1"
    assert mine["model.residual[layers.2.out][layers.0.mid]"].startswith("around.residual.")
    assert mine["model.residual[final][after]"] == "Carry"
    assert mine["model.mlp[0]"] == "Sublayer"
    assert mine["model.attention[3]"] == "none"
    assert mine["model.norm[final]"] == "none"
    assert mine["model.linear[layers.0.attention.q]"] == "Product(rank=2)"
    assert mine["model.init[layers.1.attention.o.weight]"] == "Constant(0.0)"
    assert [node.name for node in full.spec.streams] == ["bigram", "after"]  # after reads bigram
    assert full.spec.blocks[0].taps == ("mid",)


def test_parameters_know_their_owner_and_their_initial_values(full: Plan) -> None:
    owners = {name: info.owner for name, info in full.parameters.items()}
    assert owners["layers.0.attention.q.weight"] == "core"
    assert owners["layers.0.attention.q.product.a.weight"] == "around"
    assert owners["layers.0.attention.out.attn.gate.weight"] == "attn"
    assert owners["streams.bigram.table"] == "around"
    assert full.parameters["layers.1.attention.o.weight"].init == Constant(0.0).data()
    assert full.inits["layers.1.attention.o.weight"] == zeros
    begun = {n for n, p in full.parameters.items() if p.init == Constant(0.0).data()}
    assert begun >= {n for n, p in full.parameters.items() if p.role == "mlp.down"} != set()
    assert "layers.3.attention.q.weight" not in owners
    assert "norm.weight" not in owners


def test_loss_and_data_slots_land(full: Plan) -> None:
    loss = full.spec.loss
    assert (loss.form.cap, loss.form.z) == (TanhCap(15.0), 1e-4)
    assert loss.form_owners == (("cap", "targets"), ("z", "targets"))
    assert [(t.key, t.offset, t.field) for t in loss.targets] == [
        ("offset2", 2, None),
        ("prefix", None, "prefix"),
    ]
    assert [term.key for term in loss.terms] == ["balance", "size"]
    assert [name for name, _, _ in full.batch_fields] == ["prefix"]
    assert full.on_batch == ("targets", "areader")  # writers run before readers
    assert [(owner, c.name) for owner, c in full.candidates] == [("kernel", "mine")]


def test_optimizer_slots_land(full: Plan) -> None:
    assert [(anchor, owner) for anchor, owner, _ in full.rules["plainly"].stages] == [
        ("momentum", "extends"),
        ("scale", "rule"),
        ("decay", "rule"),
        ("write", "rule"),
    ]
    followers = {m.name for g in full.groups if g.rule.name == "plainly" for m in g.members}
    assert followers == {n for n, p in full.parameters.items() if p.role.startswith("mlp")}
    norms = [m for g in full.groups for m in g.members if full.parameters[m.name].role == "norm"]
    assert {(m.lr_mul, m.wd_mul, dict(m.overrides)["beta1"]) for m in norms} == {(2.0, 0.0, 0.8)}
    assert {"plainly.lr", "plainly.by", "train.lr"} <= set(full.schedules)


def test_every_parameter_is_updated_once(full: Plan) -> None:
    names = [member.name for group in full.groups for member in group.members]
    assert sorted(names) == sorted(full.parameters)


def test_evidence_is_asked_of_every_plugin(full: Plan) -> None:
    expected = {plugin.name: plugin.expected for plugin in full.plugins}
    assert "node:layers.0.attention.out.attn" in expected["attn"]
    assert "parameter:layers.0.attention.out.attn.gate.weight" in expected["attn"]
    assert not any(key.startswith("slot:") for key in expected["attn"])
    assert "node:layers.0.attention.q.product" in expected["around"]
    assert expected["extends"] == ("stage:plainly.momentum",)
    assert expected["kernel"] == ("kernel:swiglu=mine",)
    assert expected["areader"] == ("batch:areader",)
    assert all(len(set(keys)) == len(keys) for keys in expected.values())


class Nothing1(Plugin, api=1):
    """Numbers alone."""

    def build_attention(self, attn):
        attn.window(8)


def test_numbers_are_evidence_of_a_plugin_that_has_nothing_else(planned: Planned) -> None:
    (only,) = planned(windows=Nothing1()).plugins
    assert only.expected == tuple(f"slot:layers.{i}.attention.window" for i in range(4))


@settings(max_examples=20)
@given(order=st.permutations(sorted(EVERYTHING)))
def test_the_order_of_plugins_never_matters(
    full: Plan, small_config: Callable[..., Config], order: list[str]
) -> None:
    plan = build_plan(small_config(), [LoadedPlugin.of(name, EVERYTHING[name]) for name in order])
    assert plan.data() == full.data()
    assert plan.hash == full.hash
    assert plan.plugins == full.plugins
    assert plan.placements == full.placements


def test_without_plugins_the_plan_holds_no_trace_of_them(planned: Planned) -> None:
    plan = planned()
    assert plan.plugins == plan.placements == plan.candidates == ()
    data = plan.data()
    assert not {"plugins", "digests"} & set(data)
    assert not {"fields", "on_batch"} & set(data["data"])
    assert set(data["versions"]) == {"minillm-core"}
    assert {info["owner"] for info in data["model"]["parameters"].values()} == {"core"}
    assert plan.export.layout == "llama"


def test_a_plugin_leaves_the_other_parameters_alone(planned: Planned, full: Plan) -> None:
    plain = planned().parameters
    changed = {name for name, info in plain.items() if full.parameters.get(name) != info}
    assert changed == {
        "layers.0.mlp.gate.weight",  # replaced as a whole
        "layers.0.mlp.up.weight",
        "layers.0.mlp.down.weight",
        "layers.1.attention.o.weight",  # its initial values are claimed
        "layers.2.attention.o.weight",
        *(f"layers.{i}.mlp.down.weight" for i in (1, 2, 3)),
        "layers.3.attention_norm.weight",  # removed
        *(f"layers.3.attention.{leaf}.weight" for leaf in "qkvo"),
        "norm.weight",
    }


class Whole(Plugin, api=1):
    """A whole attention."""

    def build_model(self, model):
        model.attention(1, Carry2)


def test_replacing_attention_leaves_the_mlp_as_it_was(planned: Planned) -> None:
    name = "layers.1.mlp.down.weight"
    assert planned(whole=Whole()).parameters[name] == planned().parameters[name]


class Counting(Plugin, api=1):
    """Counts calls."""

    def build_attention(self, attn):
        CALLS.append("build_attention")
        attn.out.gate(Gate)

    def optimizer_factory(self, optimizer):
        CALLS.append("optimizer_factory")


CALLS: list[str] = []


def test_hooks_are_not_called_after_planning(planned: Planned) -> None:
    CALLS.clear()
    plan = planned(counting=Counting())
    assert CALLS == ["build_attention"] * 4 + ["optimizer_factory"]
    plan.data(), plan.hash, plan.estimate(), plan.values(0.5)
    assert len(CALLS) == 5


@pytest.mark.parametrize(
    "setting", ["train.dtype=bfloat16", "train.compile=off", "eval.tokens=77", "log.every=3"]
)
def test_the_hash_leaves_out_what_is_bound_later(planned: Planned, setting: str) -> None:
    assert planned(setting).hash == planned().hash


@pytest.mark.parametrize(
    "setting",
    [
        "train.lr=0.5",
        "train.steps=3",
        "train.clip=0.5",
        "train.betas=[0.8, 0.9]",
        "train.epsilon=1e-10",
        "train.weight_decay=0.2",
        "train.schedule=wsd",
        "train.schedule=wsd; train.cooldown=0.4",
        "train.warmup=0.2",
        "train.seq_len=8",
        "data.seed=1",
        "model.tied=false",
        "model.rope_base=500",
    ],
)
def test_the_hash_covers_what_decides_the_result(planned: Planned, setting: str) -> None:
    words = setting.split("; ")
    assert planned(*words).hash != planned(*words[:-1]).hash


class OwnBetas(Plugin, api=1):
    """Sets betas for the last parameter."""

    def optimizer_factory(self, optimizer):
        optimizer.set(lambda name, p: name == "norm.weight", betas=(0.5, 0.6))


def test_the_hash_covers_betas_that_one_parameter_does_not_follow(planned: Planned) -> None:
    hashes = {planned(f"train.betas=[{b}, 0.95]", own=OwnBetas()).hash for b in (0.8, 0.9)}
    assert len(hashes) == 2


def test_how_rows_are_split_is_not_hashed(planned: Planned) -> None:
    split = planned("train.rows=1", "train.accumulate=2")
    assert split.hash == planned().hash
    assert split.tokens_per_step == planned().tokens_per_step == 32


def test_positions_of_a_plugin_are_hashed(planned: Planned) -> None:
    data = planned(attn=Attn(), bigram=OnlyBigram()).data()
    rope = data["model"]["spec"]["blocks"][0]["attention"]["rope"]
    assert rope["positions"]["reference"].endswith(":Positions")
    assert "positions" not in data["model"]["spec"]["geometry"]


def test_files_that_the_plan_refers_to_are_digested(full: Plan) -> None:
    assert set(full.digests) == {*EVERYTHING, __name__}


@pytest.mark.parametrize(
    ("plugins", "layout", "blocked"),
    [
        ({"rule": Rule()}, "llama", ()),
        ({"targets": Targets()}, None, ("targets",)),
        ({"windows": Nothing1(), "rule": Rule()}, None, ("windows",)),
    ],
)
def test_export_names_who_stands_in_the_way(
    planned: Planned, plugins: dict[str, Plugin], layout: str | None, blocked: tuple[str, ...]
) -> None:
    export = planned(**plugins).export
    assert (export.layout, export.blocked_by) == (layout, blocked)


class Qwen(Plugin, api=1, export="qwen3"):
    """Fits another layout."""

    def build_attention(self, attn):
        attn.qk.norm(QK)


def test_export_follows_the_plugins_that_fit(planned: Planned) -> None:
    assert planned(qwen=Qwen()).export.layout == "qwen3"
    both = planned(qwen=Qwen(), windows=Nothing1()).export
    assert (both.layout, both.blocked_by) == (None, ("windows",))


@given(progress=st.floats(0, 1, exclude_min=True))
def test_values_are_numbers_everywhere(full: Plan, progress: float) -> None:
    values = full.values(progress)
    assert set(values) == set(full.schedules)
    assert all(np.isfinite(value) for value in values.values())


def test_planning_imports_no_framework() -> None:
    code = (
        "import sys; from minillm_core.config.load import load; "
        "from minillm_core.plan import build_plan; "
        "plan = build_plan(load(preset='tiny', default_preset=lambda: ('tiny', '')).config); "
        "plan.hash, plan.estimate(); "
        "assert not {'torch', 'mlx', 'mlx.core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_defaults_of_the_plain_model(planned: Planned) -> None:
    parameters = planned().parameters
    assert parameters["layers.0.attention.k.weight"].shape == (16, 32)
    assert parameters["layers.0.attention.o.weight"].init == fan_in_residual(32, 4).data()
    assert parameters["layers.0.attention_norm.weight"].wd_mul == 0.0
    assert "head.weight" not in parameters
    assert planned("model.tied=false").parameters["head.weight"].role == "head"


class Capped(Plugin, api=1):
    """Bounds the logits."""

    def compute_loss(self, loss):
        loss.logits(cap=TanhCap(15.0))


class ZLoss(Plugin, api=1):
    """Keeps the normaliser near 1."""

    def compute_loss(self, loss):
        loss.logits(z=1e-4)


def test_two_plugins_may_shape_different_parts_of_the_loss(planned: Planned) -> None:
    loss = planned(capped=Capped(), z=ZLoss()).spec.loss
    assert (loss.form.cap, loss.form.z) == (TanhCap(15.0), 1e-4)
    assert loss.form_owners == (("cap", "capped"), ("z", "z"))


class Noted(Plugin, api=1):
    """Adds the same note in every layer, and another one once."""

    sure: bool = True

    def build_attention(self, attn):
        attn.window(4)
        if self.sure:
            attn.note("nothing is hidden")

    def build_model(self, model):
        model.note("two\nlines")


def test_a_plugins_notes_are_told_once_and_change_no_plan(planned: Planned) -> None:
    plan, other = planned(noted=Noted()), planned(noted=Noted(sure=False))
    assert sorted(plan.notes) == ["noted: nothing is hidden", "noted: two lines"]
    assert other.notes == ("noted: two lines",)
    with_options = [json.dumps(one.data(), sort_keys=True) for one in (plan, other)]
    assert with_options[0].replace('"sure": true', '"sure": false') == with_options[1]


def passed_on(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update, state


class Nesterov(Plugin, api=1):
    """A rule that keeps state."""

    def optimizer_factory(self, optimizer):
        momentum = stage(passed_on, state={"mean": "like"})
        optimizer.rule("nesterov", lr=0.1, momentum=momentum, scale=stage(passed_on))
        optimizer.assign("nesterov", lambda name, p: p.role.startswith("mlp."))


class Everywhere(Plugin, api=1):
    """Replaces stages of every rule, or of a named one."""

    rule: str = "*"

    def optimizer_factory(self, optimizer):
        for anchor in ("momentum", "scale"):
            optimizer.extend(self.rule, anchor, stage(passed_on))


def test_a_state_that_every_rule_loses_is_said(planned: Planned) -> None:
    lost = planned(nesterov=Nesterov(), everywhere=Everywhere())
    assert lost.notes == ("everywhere: replaces momentum of every rule: 'nesterov' keeps no mean",)
    assert planned(nesterov=Nesterov(), everywhere=Everywhere(rule="nesterov")).notes == ()
