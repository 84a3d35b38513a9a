"""Tests of planning errors: each names the plugin, the place, and the fix where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import new_class
from typing import Any

import numpy as np
import pytest

from minillm_core.config.schema import Config
from minillm_core.errors import PlanError, PluginCodeError
from minillm_core.nn.attention import UNMASKED, DocumentMask, Layout
from minillm_core.nn.init import zeros
from minillm_core.nn.layers import Linear
from minillm_core.nn.module import Module
from minillm_core.nn.node import Setting
from minillm_core.nn.param import Param, State
from minillm_core.ops.form import SigmoidCap, TanhCap
from minillm_core.ops.select import Candidate
from minillm_core.optim.schedules import cosine, piecewise, scheduled, stages
from minillm_core.optim.stage import stage
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.layers import Layers
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.options import option
from minillm_core.plugins.plugin import Plugin
from minillm_modded.paired_heads import PairedHeads
from minillm_muon.muon import Muon

Planned = Callable[..., Plan]


def nothing(_: object) -> None:
    """Return None, whatever the last expression is."""


def plugin(**hooks: Callable[..., Any]) -> Plugin:
    """Build a plugin with these hooks."""
    body = {"__module__": __name__, "__doc__": "Made here.", **hooks}
    return new_class("Made", (Plugin,), {"api": 1}, lambda namespace: namespace.update(body))()


Do = Callable[[Any], Any]
Made = Callable[[], Plugin]


def attention(do: Do) -> Made:
    return lambda: plugin(build_attention=lambda self, attn: nothing(do(attn)))


def model(do: Do) -> Made:
    return lambda: plugin(build_model=lambda self, model: nothing(do(model)))


def loss(do: Do) -> Made:
    return lambda: plugin(compute_loss=lambda self, loss: nothing(do(loss)))


def data(do: Do) -> Made:
    return lambda: plugin(build_data=lambda self, data: nothing(do(data)))


def optimizer(do: Do) -> Made:
    return lambda: plugin(optimizer_factory=lambda self, optimizer: nothing(do(optimizer)))


def kernels(do: Do) -> Made:
    return lambda: plugin(kernel_provider=lambda self, kernels: nothing(do(kernels)))


class X(Module):
    def forward(self, x):
        return x


class Y(Module):
    def forward(self, y):
        return y


class QK(Module):
    def forward(self, q, k):
        return q, k


class Listed(Plugin, api=1):
    """A gate in some layers."""

    where: Layers = option("all", help="layers")

    def build_attention(self, attn):
        if attn.layer in self.where.resolve(attn.layers):
            attn.out.gate(Y)


class Star(Module):
    def forward(self, *y):
        return y


class Named(Module):
    def forward(self, y, **more):
        return y


class StarInit(Module):
    def __init__(self, *sizes):
        super().__init__()

    def forward(self, y):
        return y


class Needs(Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, y):
        return y


class Unknown(Module):
    def forward(self, y, bigramm):
        return y


class Scheduled(Module):
    def __init__(self):
        super().__init__()
        self.scale = Param((1,), role="scalar", lr_mul=piecewise((0, 1.0)))

    def forward(self, x):
        return x


class HalfNamed(Scheduled):
    def __init__(self):
        Module.__init__(self)
        self.scale = Param((8, 4), axes=("hidden",), role="scalar")


class Late(Module):
    def forward(self, x0):
        return x0


class Loop1(Module):
    def forward(self, two):
        return two


class Loop2(Module):
    def forward(self, one):
        return one


class Swapped(Module):
    def forward(self, weight, x):
        return x


class Emits(Module):
    terms = ("balance",)

    def forward(self, x):
        return x, x


class Drawn(Module):
    def __init__(self):
        super().__init__()
        self.scale = Param((1,), role="scalar", init=value)

    def forward(self, x):
        return x


class Remembered(Module):
    def __init__(self):
        super().__init__()
        self.seen = State((), value)

    def forward(self, x):
        return x


class Counts(Module):
    statistics = {"load": "sum"}  # noqa: RUF012

    def forward(self, x):
        return x, self.ops.mean(x)


class Frward(Module):
    def frward(self, y):
        return y


class OtherStatistics(Module):
    statistics = {"load": "sum"}  # noqa: RUF012

    def forward(self, y):
        return y, self.ops.mean(y)

    def next_state(self, loads):
        return {}


class Averaged(OtherStatistics):
    statistics = {"load": "average"}  # noqa: RUF012

    def next_state(self, load):
        return {}


def not_numbers(frequencies: np.ndarray) -> np.ndarray:
    return np.full_like(frequencies, np.nan)


def below(x: float) -> float:
    return -1.0


class Tied(Module):
    def __init__(self):
        super().__init__()
        self.first = self.second = Param((2,), role="scalar")

    def forward(self, y):
        return y


class Plain(Layout):
    def enter(self, call):
        return call


class Greedy(Layout):
    def enter(self, call, ids):
        return call


class Rotating(Layout):
    rope = "after"

    def enter(self, call):
        return call


def scale(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update, state


def value(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape)


class Method:
    def start(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape)


def always(name: str, info: Any) -> bool:
    return True


CLASHES: dict[str, tuple[Made, str]] = {
    "attn.layout": (
        attention(lambda a: a.layout(Plain)),
        "slot layers.0.attention.layout is claimed by both 'one' and 'two'",
    ),
    "attn.window": (
        attention(lambda a: a.window(4)),
        "slot layers.0.attention.window is claimed by both 'one' and 'two'",
    ),
    "attn.documents": (
        attention(lambda a: a.documents()),
        "slot layers.0.attention.documents is claimed by both 'one' and 'two'",
    ),
    "attn.scale": (
        attention(lambda a: a.scale(0.1)),
        "slot layers.0.attention.scale is claimed by both 'one' and 'two'",
    ),
    "attn.rope.frequencies": (
        attention(lambda a: a.rope.frequencies(value, shape=(4,))),
        "slot layers.0.attention.rope.frequencies is claimed by both",
    ),
    "attn.rope.scaling": (
        attention(lambda a: a.rope.scaling(value, shape=(4,))),
        "slot layers.0.attention.rope.scaling is claimed by both",
    ),
    "attn.rope.positions": (
        attention(lambda a: a.rope.positions(X)),
        "slot layers.0.attention.rope.positions is claimed by both",
    ),
    "attn.qk": (
        attention(lambda a: a.qk.norm(QK)),
        "the order of 'one' and 'two' in layers.0.attention.qk.norm is not stated",
    ),
    "attn.out": (
        attention(lambda a: a.out.gate(Y)),
        "the order of 'one' and 'two' in layers.0.attention.out.gate is not stated",
    ),
    "model.embed": (
        model(lambda m: m.embed.norm(X)),
        "the order of 'one' and 'two' in model.embed.norm is not stated",
    ),
    "model.streams": (
        model(lambda m: m.stream("bigram", Late)),
        "model.streams[bigram] is added by both 'one' and 'two'",
    ),
    "model.residual": (
        model(lambda m: m.residual("layers.0.in", "carry", 0.5)),
        "model.residual[layers.0.in][carry] is claimed by both 'one' and 'two'",
    ),
    "model.attention": (
        model(lambda m: m.attention(1, X)),
        "slot model.attention[1] is claimed by both 'one' and 'two'",
    ),
    "model.mlp": (
        model(lambda m: m.mlp(-1, None)),
        "slot model.mlp[3] is claimed by both 'one' and 'two'",
    ),
    "model.norm": (
        model(lambda m: m.norm("final", X)),
        "slot model.norm[final] is claimed by both 'one' and 'two'",
    ),
    "model.linear": (
        model(lambda m: m.linear("layers.0.mlp.up", Linear2)),
        "slot model.linear[layers.0.mlp.up] is claimed by both 'one' and 'two'",
    ),
    "model.init": (
        model(lambda m: m.init("norm.weight", value)),
        "slot model.init[norm.weight] is claimed by both 'one' and 'two'",
    ),
    "loss.logits": (
        loss(lambda lo: lo.logits(scale=2.0)),
        "slot loss.logits[scale] is claimed by both 'one' and 'two'",
    ),
    "loss.target": (
        loss(lambda lo: lo.target(1.0, offset=2)),
        "loss.target[offset2] is added by both 'one' and 'two'",
    ),
    "loss.term": (
        loss(lambda lo: lo.term("size", X)),
        "loss.term[size] is added by both 'one' and 'two'",
    ),
    "data.field": (
        data(lambda d: d.field("prefix")),
        "data.field[prefix] is added by both 'one' and 'two'",
    ),
    "opt.rule": (
        optimizer(lambda o: o.rule("mine", lr=1.0)),
        "rule 'mine' is provided by both 'one' and 'two'",
    ),
    "opt.assign": (
        optimizer(lambda o: o.assign("adamw", always)),
        "slot opt.assign[embedding.weight] is claimed by both 'one' and 'two'",
    ),
    "opt.set": (
        optimizer(lambda o: o.set(always, lr_mul=2.0)),
        "slot opt.set[embedding.weight].lr_mul is claimed by both 'one' and 'two'",
    ),
    "kernel": (
        kernels(lambda k: k.candidate(Candidate("swiglu", "mine", ("torch",), "operator:mul"))),
        "kernel swiglu=mine is offered by both 'one' and 'two'",
    ),
}


class Linear2(Module):
    def forward(self, x, weight):
        return x


@pytest.mark.parametrize("slot", sorted(CLASHES))
def test_what_two_plugins_want_is_refused_by_name(planned: Planned, slot: str) -> None:
    made, message = CLASHES[slot]
    with pytest.raises(PlanError) as refused:
        planned(one=made(), two=made())
    assert message in refused.value.what
    assert "leave out '" in str(refused.value.fix) or "leave out one" in str(refused.value.fix)
    assert len(str(refused.value).splitlines()) <= 12


def test_extending_the_same_stage_twice_is_refused(planned: Planned) -> None:
    extends = optimizer(lambda o: o.extend("muon", "precondition", stage(scale)))
    with pytest.raises(PlanError, match=r"opt.extend\(muon, precondition\) is claimed by both"):
        planned(muon=Muon(), one=extends(), two=extends())


ALONE: dict[str, tuple[Made, str]] = {
    "arguments in a row": (
        attention(lambda a: a.out.gate(Star)),
        "Star.forward takes *y: arguments are bound by name",
    ),
    "arguments by any name": (
        attention(lambda a: a.out.gate(Named)),
        "Named.forward takes *more",
    ),
    "a constructor with arguments in a row": (
        attention(lambda a: a.out.gate(StarInit)),
        "StarInit takes *sizes",
    ),
    "an argument too many": (
        attention(lambda a: a.out.gate(Needs, width=1, wdith=2)),
        "Needs takes no argument 'wdith' (it takes width)",
    ),
    "an argument too few": (
        attention(lambda a: a.out.gate(Needs)),
        "Needs needs the argument 'width'",
    ),
    "an argument that is not JSON": (
        attention(lambda a: a.out.gate(Needs, width={1, 2})),
        "argument width={1, 2} is not JSON",
    ),
    "an argument that is not a number": (
        attention(lambda a: a.out.gate(Needs, width=float("nan"))),
        "argument width=nan is not JSON",
    ),
    "an array as argument": (
        attention(lambda a: a.out.gate(Needs, width=np.zeros(2))),
        "is not JSON",
    ),
    "a mapping as argument": (
        attention(lambda a: a.out.gate(Needs, width={"a": 1})),
        "is a mapping",
    ),
    "no module": (
        attention(lambda a: a.out.gate(dict)),
        "is not a class derived from minillm_core.Module",
    ),
    "a lambda": (
        model(lambda m: m.init("norm.weight", lambda rng, shape: None)),
        "no lambda, no closure, no instance",
    ),
    "a method": (
        model(lambda m: m.init("norm.weight", Method().start)),
        "cannot be referred to",
    ),
    "an unknown name": (
        attention(lambda a: a.out.gate(Unknown)),
        "plugin 'one' reads 'bigramm', which nothing provides there",
    ),
    "x0 before it is there": (
        model(lambda m: m.embed.mix(Late)),
        "plugin 'one' reads 'x0', which nothing provides there",
    ),
    "a tap that comes later": (
        model(lambda m: m.residual("layers.0.in", m.tap("layers.2.out"))),
        "reads 'layers.2.out', which nothing provides there",
    ),
    "a source that nobody has": (
        model(lambda m: m.residual("final", "bigram")),
        "reads 'bigram', which nothing provides there",
    ),
    "a field that nobody declares": (
        loss(lambda lo: lo.target(1.0, field="prefix")),
        "reads 'prefix', which nothing provides there",
    ),
    "a circle of streams": (
        model(lambda m: (m.stream("one", Loop1), m.stream("two", Loop2))),
        "streams one, two read each other in a cycle",
    ),
    "a reserved stream": (model(lambda m: m.stream("x0", Late)), "'x0' is a reserved name"),
    "a reserved field": (data(lambda d: d.field("labels")), "'labels' is a reserved name"),
    "a stream with dots": (
        model(lambda m: m.stream("layers.0.in", Late)),
        "'layers.0.in' is not the name of an argument",
    ),
    "a keyword as field": (data(lambda d: d.field("class")), "is not the name of an argument"),
    "an unknown dtype": (data(lambda d: d.field("prefix", "int64")), "has dtype int64"),
    "a field that nobody writes": (
        data(lambda d: d.field("prefix")),
        "declares the batch field 'prefix', but has no on_batch",
    ),
    "a layer outside the model": (
        model(lambda m: m.mlp(4, None)),
        "names layer 4 of a model of 4 layers",
    ),
    "a layer before the first": (model(lambda m: m.attention(-5, X)), "names layer -5"),
    "an unknown site": (
        model(lambda m: m.residual("layers.9.in", "x0")),
        "there is no residual site 'layers.9.in'",
    ),
    "a tap of the end": (model(lambda m: m.tap("final")), "nothing comes after the site"),
    "an unknown norm": (model(lambda m: m.norm("layers.0.in", X)), "there is no norm at"),
    "an unknown leaf": (
        model(lambda m: m.linear("layers.0.attention.queries", Linear2)),
        "replaces the product of 'layers.0.attention.queries', which is not a leaf",
    ),
    "a product of other arguments": (
        model(lambda m: m.linear("layers.0.mlp.up", Swapped)),
        "Swapped.forward takes (weight, x), and is called with (x, weight)",
    ),
    "an unknown parameter": (
        model(lambda m: m.init("layers.0.mlp.upp.weight", value)),
        "gives initial values to 'layers.0.mlp.upp.weight', which is not a parameter",
    ),
    "no layout": (attention(lambda a: a.layout(X)), "is not a Layout"),
    "a layout that reads": (
        attention(lambda a: a.layout(Greedy)),
        "Greedy.enter takes (call, ids), and is called with a Call alone",
    ),
    "no forward": (attention(lambda a: a.out.gate(Frward)), "Frward has no method forward"),
    "a next_state of other statistics": (
        attention(lambda a: a.out.gate(OtherStatistics)),
        "OtherStatistics has statistics, but no next_state that takes them",
    ),
    "an unknown reduction": (
        attention(lambda a: a.out.gate(Averaged)),
        "Averaged has statistics, reduced by 'average'",
    ),
    "frequencies that are not numbers": (
        attention(lambda a: a.rope.scaling(not_numbers)),
        "rotary frequencies are NaN or infinite",
    ),
    "a scale of nothing": (attention(lambda a: a.scale(0.0)), "slot scale: 0.0 is not above 0"),
    "a cap that is a number": (loss(lambda lo: lo.logits(cap=30.0)), "loss.logits: cap=30.0"),
    "half a token ahead": (loss(lambda lo: lo.target(1.0, offset=2.5)), "offset 2.5"),
    "rates below zero": (
        optimizer(lambda o: o.schedule(below)),
        "-1.0 at 0 of what follows the warm-up",
    ),
    "frequencies of another shape": (
        attention(lambda a: a.rope.scaling(value, shape=(3,))),
        "rotary frequencies have shape (3,), not (4,)",
    ),
    "rotations that follow a schedule": (
        attention(lambda a: a.rope.scaling(value, shape=piecewise((0, 1), (1, 2)))),
        "slot layers.0.attention.rope.scaling: shape cannot follow this schedule",
    ),
    "rotations that follow two": (
        attention(lambda a: a.rope.scaling(value, shape=stages((0, 4)), size=stages((0, 2)))),
        "shape, size cannot follow these schedules",
    ),
    "a window of nothing": (attention(lambda a: a.window(0)), "a window of 0 keys"),
    "half a key": (attention(lambda a: a.window(2.5)), "a window of 2.5 keys"),
    "a text for a number": (attention(lambda a: a.scale("big")), "'big' is neither a number"),
    "an infinite number": (attention(lambda a: a.scale(float("inf"))), "neither a number"),
    "a truth for a number": (attention(lambda a: a.scale(True)), "neither a number"),
    "a target twice defined": (
        loss(lambda lo: lo.target(1.0, offset=2, field="labels")),
        "give offset= or field=",
    ),
    "the main target again": (loss(lambda lo: lo.target(1.0, offset=1)), "1 is the main target"),
    "a term of nothing": (loss(lambda lo: lo.term("size")), "give a Module or emitted="),
    "a term that nobody emits": (
        loss(lambda lo: lo.term("balance", emitted="balance")),
        "none of its nodes emits it",
    ),
    "a term that emits": (
        loss(lambda lo: lo.term("balance", Emits)),
        "Emits emits more than its result",
    ),
    "an unknown rule": (
        optimizer(lambda o: o.assign("muon", always)),
        "plugin 'one' builds on the rule 'muon', which no active plugin provides",
    ),
    "a rule that no parameter follows": (
        optimizer(lambda o: o.rule("mine", lr=1.0, scale=stage(scale))),
        "plugin 'one' put nothing into the plan: no parameter follows its rule 'mine'",
    ),
    "an unknown rule to extend": (
        optimizer(lambda o: o.extend("muon", "scale", stage(scale))),
        "plugin 'one' builds on the rule 'muon', which no active plugin provides",
    ),
    "an unknown stage": (
        optimizer(lambda o: o.rule("mine", lr=1.0, polish=stage(scale))),
        "a rule has no stage 'polish'",
    ),
    "a function for a stage": (
        optimizer(lambda o: o.rule("mine", lr=1.0, scale=scale)),
        "is not a stage",
    ),
    "a rule for nobody": (
        optimizer(lambda o: o.assign("adamw", lambda name, info: False)),
        "no parameter fits",
    ),
    "betas of a rule without": (
        optimizer(
            lambda o: (
                o.rule("mine", lr=1.0),
                o.assign("mine", lambda name, info: name == "norm.weight"),
                o.set(lambda name, info: name == "norm.weight", betas=(0.8, 0.9)),
            )
        ),
        "follows the rule 'mine': it has none",
    ),
    "a rule that nothing follows": (
        optimizer(lambda o: o.rule("mine", lr=1.0)),
        "plugin 'one' put nothing into the plan",
    ),
    "nothing at all": (attention(lambda a: None), "plugin 'one' put nothing into the plan"),
    "a slot that is set": (
        attention(lambda a: setattr(a, "window", 8)),
        "AttentionBuilder.window was assigned (int), without effect",
    ),
    "a chain that is set": (
        attention(lambda a: setattr(a.out, "gate", Y)),
        "Out.gate was assigned (type), without effect",
    ),
    "a form that is not a number": (
        loss(lambda lo: lo.logits(z=float("nan"))),
        "plugin 'one', slot loss.logits: z=nan is not a finite number",
    ),
    "a smoothing of more than all": (
        loss(lambda lo: lo.logits(smoothing=1.0)),
        "plugin 'one', slot loss.logits: smoothing=1.0",
    ),
    "a form that turns the logits": (
        loss(lambda lo: lo.logits(scale=-1.0)),
        "plugin 'one', slot loss.logits: scale=-1.0",
    ),
    "a form that rewards large logits": (
        loss(lambda lo: lo.logits(z=-5.0)),
        "plugin 'one', slot loss.logits: z=-5.0",
    ),
    "a cap that divides by 0": (
        loss(lambda lo: lo.logits(cap=TanhCap(0.0))),
        "plugin 'one', slot loss.logits: cap=0.0",
    ),
    "a cap that falls": (
        loss(lambda lo: lo.logits(cap=SigmoidCap(1.0, -2.0, -1.0))),
        "plugin 'one', slot loss.logits: c=-1.0",
    ),
    "a negative factor": (
        optimizer(lambda o: o.set(always, lr_mul=-1.0)),
        "plugin 'one', slot opt.set: lr_mul=-1.0 is negative",
    ),
    "a factor that becomes negative": (
        optimizer(lambda o: o.set(always, wd_mul=piecewise((0, 1.0), (1, -0.5)))),
        "plugin 'one', slot opt.set: wd_mul=-0.5 is negative",
    ),
    "a negative rate": (
        optimizer(lambda o: o.rule("own", lr=-0.1)),
        "plugin 'one', slot opt.rule(own): lr=-0.1 is negative",
    ),
    "a negative peak": (
        optimizer(lambda o: o.rule("own", lr=scheduled(-0.1))),
        "plugin 'one', slot opt.rule(own): lr=-0.1 is negative",
    ),
    "rates that become negative": (
        optimizer(lambda o: o.rates(cosine(1.0, -1.0))),
        "plugin 'one', slot opt.rates: factor=-1.0 is negative",
    ),
    "a function as an initialiser": (
        model(lambda m: m.mlp(0, Drawn)),
        "init='value' is not an initialiser",
    ),
    "a function as a State's initialiser": (
        model(lambda m: m.mlp(0, Remembered)),
        "init='value' is not an initialiser",
    ),
    "statistics that nothing reads": (
        model(lambda m: m.mlp(0, Counts)),
        "plugin 'one': Counts has statistics, but no next_state",
    ),
    "a factor that is not a number": (
        optimizer(lambda o: o.set(lambda name, info: True, betas=(0.9, float("inf")))),
        "plugin 'one', slot opt.set: betas=inf is not a finite number",
    ),
    "a factor that compiles": (
        optimizer(lambda o: o.set(always, lr_mul=stages((0, 0), (0.5, 1)))),
        "plugin 'one', slot opt.set: lr_mul cannot be stages(...)",
    ),
    "a rate that compiles": (
        optimizer(lambda o: o.rule("own", lr=stages((0, 1)))),
        "plugin 'one', slot opt.rule(own): lr cannot be stages(...)",
    ),
    "a factor of another kind": (
        optimizer(lambda o: o.set(always, wd_mul="half")),
        "plugin 'one', slot wd_mul: 'half' is neither a number nor a schedule",
    ),
    "one beta": (
        optimizer(lambda o: o.set(always, betas=(0.9,))),
        "plugin 'one', slot opt.set: betas=(0.9,)",
    ),
    "a parameter's factor with a schedule": (
        model(lambda m: m.mlp(0, Scheduled)),
        "a Param's lr_mul is a number, not Piecewise",
    ),
    "a parameter with fewer axes than its shape": (
        model(lambda m: m.mlp(0, HalfNamed)),
        "a Param of shape (8, 4) has axes=('hidden',)",
    ),
    "the same name in one chain": (
        attention(lambda a: (a.out.gate(Y), a.out.correct(Y))),
        "two nodes named 'one' in layers.0.attention.out",
    ),
    "a schedule of two meanings": (
        optimizer(
            lambda o: (
                o.rule("train", lr=piecewise((0, 1.0))),
                o.assign("train", lambda name, info: name == "norm.weight"),
            )
        ),
        "schedule value 'train.lr' is declared twice, by 'core' and 'one'",
    ),
}


@pytest.mark.parametrize("mistake", sorted(ALONE))
def test_a_mistake_of_one_plugin_is_refused(planned: Planned, mistake: str) -> None:
    made, message = ALONE[mistake]
    with pytest.raises(PlanError) as refused:
        planned(one=made())
    assert message in refused.value.what
    assert "one" in f"{refused.value}"
    assert len(str(refused.value).splitlines()) <= 12


def test_a_closed_anchor_names_who_closed_it(planned: Planned) -> None:
    gate = attention(lambda a: a.out.project_out(Y))
    with pytest.raises(PlanError) as refused:
        planned(pairs=PairedHeads(), xsa=gate())
    assert "'xsa' cannot join layers.0.attention.out.project_out: 'pairs' closed it" in str(
        refused.value
    )
    assert "leave out 'pairs' or 'xsa'" in str(refused.value.fix)


def test_a_layout_that_rotates_closes_the_shift(planned: Planned) -> None:
    layout = attention(lambda a: a.layout(Rotating))
    shift = attention(lambda a: a.qk.shift(QK))
    with pytest.raises(PlanError, match="its layout rotates q and k after they are rearranged"):
        planned(layout=layout(), shift=shift())


@pytest.mark.parametrize("cls", [X, None])
def test_a_replaced_attention_has_no_slot_for_who_is_nowhere_else(
    planned: Planned, cls: type | None
) -> None:
    whole = model(lambda m: m.attention(0, cls))
    gate = attention(lambda a: a.out.gate(Y) if a.layer == 0 else None)
    with pytest.raises(PlanError) as refused:
        planned(whole=whole(), gate=gate())
    does = "leaves out" if cls is None else "replaces"
    assert f"'whole' {does} the whole attention of layer 0, and 'gate' wants" in str(refused.value)


def test_plugins_of_all_layers_pass_over_a_replaced_attention(planned: Planned) -> None:
    whole = model(lambda m: [m.attention(layer, X) for layer in (1, 2)])()
    plan = planned(whole=whole, gate=attention(lambda a: a.out.gate(Y))())
    gated = {p.slot for p in plan.placements if p.owner == "gate"}
    assert gated == {f"layers.{layer}.attention.out.gate" for layer in (0, 3)}
    assert plan.notes == (
        "whole: its attention in layers 1-2 has no slots: gate is in the other layers",
    )
    with pytest.raises(PlanError, match=r"gate.where names layer 2, whose attention 'whole' repl"):
        planned(whole=whole, gate=Listed(where=Layers([0, 2])))


class Seeing(Module):
    def forward(self, x: Any, window: Any, documents: Any) -> Any:
        return x


def test_a_whole_attention_that_names_them_has_window_and_documents(planned: Planned) -> None:
    whole = model(lambda m: [m.attention(layer, Seeing) for layer in range(4)])
    near = attention(lambda a: [a.window(3), a.documents()])
    plan = planned(whole=whole(), near=near())
    seen = plan.spec.blocks[1].seen
    assert (seen.window, seen.documents) == (Setting("near", 3), DocumentMask("near"))
    slots = {p.slot for p in plan.placements if p.owner == "near"}
    assert {"layers.1.attention.window", "layers.1.attention.documents"} <= slots
    assert not plan.notes
    with pytest.raises(PlanError, match=r"layers\.0\.attention\.window is claimed by both 'far' a"):
        planned(whole=whole(), near=near(), far=attention(lambda a: a.window(9))())
    gate = attention(lambda a: [a.window(3), a.out.gate(Y)])
    with pytest.raises(PlanError, match="'gate' wants a slot of it, and has none elsewhere"):
        planned(whole=whole(), gate=gate())
    assert planned(whole=whole()).spec.blocks[1].seen == UNMASKED


@pytest.mark.parametrize("cls", [X, None])
def test_inputs_of_a_replaced_attention_are_those_of_the_other_layers(
    planned: Planned, cls: type | None
) -> None:
    whole = model(lambda m: m.attention(1, cls))
    parts = ("q", "v")
    mixed = model(
        lambda m: [m.input(f"layers.{i}.attention.{one}", "x0") for i in range(4) for one in parts]
    )
    plan = planned(whole=whole(), mixed=mixed())
    assert [len(block.apart) for block in plan.spec.blocks] == [2, 0, 2, 2]
    slots = {p.slot for p in plan.placements if p.owner == "mixed"}
    assert "model.input[layers.0.attention.q][x0]" in slots
    assert not any("layers.1" in slot for slot in slots)
    note = "whole: its attention in layer 1 has no slots: mixed is in the other layers"
    assert plan.notes == ((note,) if cls else ())
    alone = model(lambda m: m.input("layers.1.attention.q", "x0"))
    with pytest.raises(PlanError, match="'alone' wants a slot of it, and has none elsewhere"):
        planned(whole=whole(), alone=alone())


@pytest.mark.parametrize(
    "claims",
    [
        lambda m: m.norm("layers.1.mlp", X),
        lambda m: m.residual("layers.1.out", "sublayer", 0.5),
    ],
)
def test_what_is_left_out_cannot_be_claimed(planned: Planned, claims: Any) -> None:
    gone = model(lambda m: m.mlp(1, None))
    with pytest.raises(PlanError, match=r"'gone' leaves out the mlp of layers\.1, and 'other'"):
        planned(gone=gone(), other=model(claims)())


def test_an_attention_that_is_left_out_is_not_among_all(planned: Planned) -> None:
    gone = model(lambda m: m.attention(1, None))()
    plan = planned(gone=gone, gate=attention(lambda a: a.out.gate(Y))())
    gated = [p.slot for p in plan.placements if p.owner == "gate"]
    assert "layers.0.attention.out.gate" in gated
    assert "layers.1.attention.out.gate" not in gated


def test_an_attention_that_is_left_out_cannot_be_named(planned: Planned) -> None:
    gone = model(lambda m: m.attention(-1, None))()
    with pytest.raises(PlanError) as refused:
        planned(gone=gone, gate=Listed(where=Layers([0, -1])))
    last = len(planned().spec.blocks) - 1
    assert f"gate.where names layer {last}, whose attention 'gone'" in refused.value.what
    assert planned(gone=gone, gate=Listed(where=Layers("all")))


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        (lambda m: m.tap("layers.0.attention.v"), "taps 'layers.0.attention.v' without a name"),
        (lambda m: m.tap("layers.9.attention.v", name="v9"), "no residual site 'layers.9.att"),
        (
            lambda m: m.tap("layers.0.attention.w", name="w"),
            "no residual site 'layers.0.attention.w'",
        ),
        (
            lambda m: [m.tap("layers.1.attention.v", name="v1"), m.attention(1, X)],
            "taps layers.1.attention.v, and 'one' replaces that attention",
        ),
    ],
)
def test_taps_of_attention_are_of_what_is_there(planned: Planned, asks: Any, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        planned(one=model(asks)())
    assert message in refused.value.what
    assert refused.value.fix


def test_roles_are_those_of_the_model(planned: Planned) -> None:
    with pytest.raises(
        PlanError, match=r"of the role 'mlp\.dwon', but the model has none"
    ) as refused:
        planned(one=model(lambda m: m.init_role("mlp.dwon", zeros))())
    assert "mlp.down" in str(refused.value.fix)


def test_two_may_not_begin_one_parameter(planned: Planned) -> None:
    by_role = model(lambda m: m.init_role("norm", zeros))
    by_name = model(lambda m: m.init("norm.weight", zeros))
    with pytest.raises(
        PlanError, match=r"model\.init\[norm\.weight\] is claimed by both 'a' and 'b'"
    ):
        planned(a=by_role(), b=by_name())
    with pytest.raises(PlanError, match="'a' claims slot model"):
        planned(a=model(lambda m: (m.init_role("norm", zeros), m.init("norm.weight", zeros)))())


def test_a_stream_may_not_take_the_name_of_a_field(planned: Planned) -> None:
    def field(self, data):
        data.field("bigram")

    writer = plugin(build_data=field, on_batch=lambda self, batch, phase: batch)
    with pytest.raises(PlanError, match="stream 'bigram' has the name of a batch field"):
        planned(writer=writer, stream=model(lambda m: m.stream("bigram", Late))())


def test_a_batch_reader_finds_what_it_reads(planned: Planned) -> None:
    def reads(self, data):
        data.reads("prefix")

    reader = plugin(build_data=reads, on_batch=lambda self, batch, phase: batch)
    with pytest.raises(PlanError, match="on_batch of plugin 'one' reads 'prefix'"):
        planned(one=reader)


def test_batch_readers_that_wait_for_each_other_are_refused(planned: Planned) -> None:
    def made(writes: str, reads: str) -> Plugin:
        return plugin(
            build_data=lambda self, data: nothing((data.field(writes), data.reads(reads))),
            on_batch=lambda self, batch, phase: batch,
        )

    with pytest.raises(PlanError, match="on_batch of a, b: each reads what another writes"):
        planned(a=made("first", "second"), b=made("second", "first"))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "message", "fix"),
    [
        (1, 1, "cannot pair 1 heads in layer 0: odd", "an even model.heads"),
        (4, 1, "cannot pair 1 key-value heads in layer 0: odd", "an even model.kv_heads"),
    ],
)
def test_odd_heads_cannot_pair(
    planned: Planned, heads: int, kv_heads: int, message: str, fix: str
) -> None:
    with pytest.raises(PlanError) as refused:
        planned(f"model.heads={heads}", f"model.kv_heads={kv_heads}", paired_heads=PairedHeads())
    assert message in refused.value.what
    assert fix in str(refused.value.fix)


def test_layers_outside_the_model_are_refused(planned: Planned) -> None:
    with pytest.raises(PlanError, match="4"):
        planned(paired_heads=PairedHeads(layers=Layers([4])))


@pytest.mark.parametrize(
    "made",
    [
        attention(lambda a: a.out.gate(Y) or 1 / 0),
        attention(lambda a: a.out.gate(Tied)),  # its constructor gives a Param two owners
        optimizer(lambda o: stage(scale, by=2.0)),
        optimizer(lambda o: stage(scale, needs="half")),
    ],
)
def test_a_plugin_that_raises_is_named(planned: Planned, made: Made) -> None:
    with pytest.raises(PluginCodeError, match="plugin 'one' raised in") as raised:
        planned(one=made())
    assert "test_refusals.py" in str(raised.value.where)


class Inner(Module):
    statistics = {"load": "sum"}  # noqa: RUF012

    def forward(self, x, weight):
        return x, x


class Outer(Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, y):
        return y


@pytest.mark.parametrize(
    ("made", "where"),
    [
        (attention(lambda a: a.out.gate(Outer)), "layers.0.attention.out.p.inner"),
        (
            model(lambda m: m.linear("layers.1.mlp.up", Inner)),
            "layers.1.mlp.up.product",
        ),
    ],
)
def test_what_nothing_would_collect_is_not_emitted(
    planned: Planned, made: Made, where: str
) -> None:
    with pytest.raises(PlanError, match="has terms or statistics") as refused:
        planned(p=made())
    assert where in refused.value.what


def test_a_tap_may_not_take_the_name_of_a_stream(planned: Planned) -> None:
    def build(self, model):
        model.stream("early", Late)
        model.tap("layers.0.mid", name="early")

    with pytest.raises(PlanError, match=r"tap 'early' of layers\.0\.mid has a name that is taken"):
        planned(p=plugin(build_model=build))


@pytest.mark.parametrize("name", ["x0", "two words", "layers.0.mid"])
def test_a_tap_has_a_name_that_forward_can_ask_for(planned: Planned, name: str) -> None:
    with pytest.raises(PlanError, match=f"'{name}' is"):
        planned(p=model(lambda m: m.tap("layers.0.mid", name=name))())


def test_progress_is_refused_where_a_run_goes_by_the_clock(
    small_config: Callable[..., Config],
) -> None:
    config, late = (
        small_config("train.minutes=1"),
        plugin(on_batch=lambda self, batch, progress: batch),
    )
    with pytest.raises(PlanError, match="on_batch of plugin 'late' takes progress") as refused:
        build_plan(config, [LoadedPlugin.of("late", late)])
    assert refused.value.where == "train.minutes"
    build_plan(config, [LoadedPlugin.of("early", plugin(on_batch=lambda self, batch: batch))])
    by_steps = small_config("train.steps=9")
    assert build_plan(by_steps, [LoadedPlugin.of("late", late)]).on_batch == ("late",)


class Lane(Module):
    def forward(self, x, lane):
        return x + lane


class Kept(Module):
    keeps = ("mean",)

    def forward(self, x, mean):
        return x, x


class Further(Module):
    def forward(self, x, weight, x0):
        return self.ops.linear(x, weight) + x0


class Folded(Further):
    def folded(self, weight, own):
        return weight


class Leafy(Module):
    def __init__(self, geometry):
        super().__init__()
        self.up = Linear(geometry.dim, geometry.dim, role="mlp.up")

    def forward(self, x):
        return self.up(x)


def lanes(*steps: tuple[Any, ...]) -> Made:
    """Build a plugin that calls its builder like this."""

    def build(m):
        for name, *arguments in steps:
            *given, named = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
            getattr(m, name)(*given, **named)

    return model(build)


@pytest.mark.parametrize(
    ("steps", "what"),
    [
        ([("stream", "lane", Lane, {"at": "layers.9.in"})], "no residual site 'layers.9.in'"),
        (
            [("stream", "lane", Lane, {"at": "layers.0.attention.q"})],
            "no residual site 'layers.0.attention.q'",
        ),
        ([("stream", "lane", Lane, {"at": "layers.0.in"})], "read each other in a cycle"),
        (
            [
                ("stream", "lane", Late, {"at": "layers.1.in"}),
                ("stream", "next", Lane, {"at": "layers.0.out"}),
            ],
            "reads 'lane', which nothing provides there",
        ),
        (
            [
                ("stream", "lane", Late, {"at": "layers.0.mid"}),
                ("input", "layers.0.attention", "lane"),
            ],
            "reads 'lane', which nothing provides there",
        ),
        (
            [
                ("stream", "lane", Late, {"at": "layers.0.out"}),
                ("linear", "layers.0.mlp.up", Further, {"reads": {"x0": "lane"}}),
            ],
            "reads 'lane', which nothing provides there",
        ),
        (
            [
                ("stream", "lane", Late, {"at": "layers.0.out"}),
                ("tap", "layers.1.mid", {"name": "lane"}),
            ],
            "tap 'lane' of layers.1.mid has a name that is taken",
        ),
        ([("stream", "documents_", Late), ("stream", "documents_", Late)], "twice"),
        ([("input", "layers.0.attention.o", "x0")], "no part 'layers.0.attention.o'"),
        (
            [("input", "layers.0.mlp", "x0"), ("mlp", 0, None)],
            "gives layers.0.mlp an input of its own, and 'p' leaves out that mlp",
        ),
        (
            [("input", "layers.0.attention.q", "x0"), ("attention", 0, Late)],
            "gives layers.0.attention.q an input of its own, and 'p' replaces that attention",
        ),
        (
            [("input", "layers.0.attention.k", "x0"), ("norm", "layers.0.attention", Kept)],
            "is the norm of several inputs, and looks back",
        ),
        ([("linear", "layers.0.mlp.up", Folded)], "(x, weight) alone, which are folded"),
        (
            [("mlp", 0, Leafy), ("linear", "layers.0.mlp.up", Further)],
            "reads 'x0' in the product of 'layers.0.mlp.up', which is given x",
        ),
    ],
)
def test_lanes_inputs_and_products_that_cannot_be(
    planned: Planned, steps: list[tuple[Any, ...]], what: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(what)):
        planned(p=lanes(*steps)())


def test_two_plugins_claim_one_input(planned: Planned) -> None:
    first, second = (lanes(("input", "layers.0.mlp", "carry", n))() for n in (0.5, 0.25))
    with pytest.raises(PlanError, match=r"\[carry\] is claimed by both 'first' and 'second'"):
        planned(first=first, second=second)
    both = (lanes(("input", "layers.0.mlp", "x0", n))() for n in (0.5, 0.25))
    planned(**dict(zip(("first", "second"), both, strict=True)))  # a source is added to
