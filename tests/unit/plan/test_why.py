"""Tests of slot owners with their reasons, and of conflicts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from types import new_class
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.backends.bind import bind, kernel_answers
from minillm_core.backends.detect import Detected
from minillm_core.config.schema import Config
from minillm_core.errors import PlanError
from minillm_core.nn.attention import Layout
from minillm_core.nn.init import Constant
from minillm_core.nn.module import Module
from minillm_core.ops.select import Candidate
from minillm_core.optim.schedules import plateaus
from minillm_core.optim.stage import stage
from minillm_core.plan import Plan, build_plan
from minillm_core.plan.slots import SlotReport, SlotState
from minillm_core.plan.why import grouped, matches, names_of, nearest_names, slot_reports
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.plugin import Plugin
from minillm_core.plugins.slots import Chain, Claim, Terms
from minillm_modded.paired_heads import PairedHeads
from minillm_muon.muon import Muon

Asked = Callable[..., list[SlotReport]]

# Namespaces as named in hooks and documents.
SLOTS = ("attn.qk", "attn.qk.norm", "attn.rope.frequencies", "attn.rope.positions")
SLOTS += (
    "attn.rope.scaling",
    "attn.v",
    "attn.layout",
    "attn.window",
    "attn.documents",
    "attn.scale",
    "attn.out.gate",
)
SLOTS += ("model.embed", "model.streams", "model.residual[final]", "model.residual[layers.0.mid]")
SLOTS += ("model.attention[3]", "model.mlp", "model.norm[final]", "model.norm[layers.1.mlp]")
SLOTS += ("model.init[embedding.weight]", "loss.logits", "loss.target", "loss.term", "adamw")
SLOTS += ("opt.rule[adamw].write", "opt.assign[embedding.weight]", "opt.set", "data.field")
SLOTS += ("on_batch", "on_event", "layers.2.*", "attn.*", "layers.0.mlp.up.weight", "*")


class X(Module):
    def forward(self, x):
        return x


class Y(Module):
    def forward(self, y):
        return y


class Twisted(Layout):
    def enter(self, call):
        return call


def halved(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update / 2, state


def quiet(hook: Callable[..., Any]) -> Callable[..., None]:
    """Return a hook that returns None."""

    @wraps(hook)
    def call(*args: Any, **named: Any) -> None:
        hook(*args, **named)

    return call


def plugin(**hooks: Callable[..., Any]) -> Plugin:
    made = {name: quiet(hook) for name, hook in hooks.items()}
    body = {"__module__": __name__, "__doc__": "Made here.", **made}
    return new_class("Made", (Plugin,), {"api": 1}, lambda namespace: namespace.update(body))()


def attention(do: Callable[[Any], Any]) -> Plugin:
    return plugin(build_attention=lambda self, attn: do(attn))


def model(do: Callable[[Any], Any]) -> Plugin:
    return plugin(build_model=lambda self, model: do(model))


def optimizer(do: Callable[[Any], Any]) -> Plugin:
    return plugin(optimizer_factory=lambda self, optimizer: do(optimizer))


def norms(name: str, info: Any) -> bool:
    return info.role == "norm"


@pytest.fixture(scope="session")
def asked(small_config: Callable[..., Config]) -> Asked:
    """Return ``asked("attn.qk", gate=Gate())``: the reports, with plugins by the names they get."""

    def ask(slot: str, **plugins: Plugin) -> list[SlotReport]:
        config = small_config()
        state, plan, refusal = SlotState.of(config), None, None
        loaded = [LoadedPlugin.of(name, plugin) for name, plugin in plugins.items()]
        try:
            plan = build_plan(config, loaded, state)
        except PlanError as error:
            refusal = error
        answers = slot_reports(state, plan, refusal, list(plugins))
        return [answer for answer in answers if matches(slot, answer)]

    return ask


@pytest.mark.parametrize("slot", SLOTS)
def test_every_slot_is_the_cores_without_plugins(asked: Asked, slot: str) -> None:
    answers = asked(slot)
    assert answers
    for answer in answers:
        assert {held.owner for held in answer.held} == {"core"}
        assert all(held.what and held.why for held in answer.held)
        assert not answer.refused


def test_every_placement_of_a_plan_is_found(asked: Asked, planned: Callable[..., Plan]) -> None:
    plugins = {
        "muon": Muon(),
        "paired_heads": PairedHeads(),
        "mine": plugin(
            build_attention=lambda self, attn: attn.v(X) or attn.window(5) or attn.qk.norm(Passed),
            build_model=lambda self, model: (
                model.embed.mix(X),
                model.stream("extra", Stream),
                model.residual("layers.1.out", "extra", 0.5),
                model.mlp(2, None),
                model.norm("final", X),
                model.init("embedding.weight", Constant(0.5)),
            ),
            compute_loss=lambda self, loss: loss.logits(z=1e-4) or loss.target(0.5, offset=2),
            optimizer_factory=lambda self, optimizer: optimizer.extend(
                "adamw", "scale", stage(halved)
            ),
        ),
    }
    plan, answers = planned(**plugins), asked("*", **plugins)
    for placement in plan.placements:
        if placement.slot.startswith(("opt.assign", "opt.set", "on_")):
            continue
        place = [a for a in answers if matches(placement.slot, a) and a.kind != "parameter"]
        held = {(one.owner, one.what) for answer in place for one in answer.held}
        assert (placement.owner, placement.what) in held, placement


class Passed(Module):
    def forward(self, q, k):
        return q, k


class Stream(Module):
    def forward(self, x0):
        return x0


def test_every_parameter_knows_its_rule_and_its_owner(
    asked: Asked, planned: Callable[..., Plan]
) -> None:
    plugins = {"muon": Muon(), "mine": model(lambda m: m.embed.norm(X))}
    plan = planned(**plugins)
    rules = {m.name: group.rule.name for group in plan.groups for m in group.members}
    answers = {one.slot: one for one in asked("*", **plugins)}
    for name, info in plan.parameters.items():
        answer = answers[name]
        assert answer.kind == "parameter"
        assert answer.held[0].owner == info.owner
        (rule,) = [one for one in answer.held if one.why.startswith("opt.assign")]
        assert rule.what == rules[name]
        assert rule.owner == ("muon" if rules[name] == "muon" else "core")
    assert (
        answers["opt.rule[muon]"].held[0].what
        == f"{sum(r == 'muon' for r in rules.values())} parameters follow it"
    )


CLASHES = {
    "attn.layout": lambda: attention(lambda attn: attn.layout(Twisted)),
    "attn.rope.frequencies": lambda: attention(lambda a: a.rope.frequencies(frequencies)),
    "attn.scale": lambda: attention(lambda attn: attn.scale(1.0)),
    "attn.out.gate": lambda: attention(lambda attn: attn.out.gate(Y)),
    "model.mlp[1]": lambda: model(lambda m: m.mlp(1, X)),
    "model.norm[final]": lambda: model(lambda m: m.norm("final", None)),
    "model.residual[final][carry]": lambda: model(lambda m: m.residual("final", "carry", 0.5)),
    "model.streams": lambda: model(lambda m: m.stream("extra", Stream)),
    "model.linear[layers.0.mlp.up]": lambda: model(lambda m: m.linear("layers.0.mlp.up", Leaf)),
    "loss.logits[z]": lambda: plugin(compute_loss=lambda self, loss: loss.logits(z=1e-4)),
    "loss.target[offset2]": lambda: plugin(
        compute_loss=lambda self, loss: loss.target(0.5, offset=2)
    ),
    "opt.rule[mine]": lambda: optimizer(lambda o: o.rule("mine", lr=1.0)),
    "opt.rule[adamw].scale": lambda: optimizer(lambda o: o.extend("adamw", "scale", stage(halved))),
    "opt.assign[layers.0.mlp_norm.weight]": lambda: optimizer(lambda o: o.assign("adamw", norms)),
    "layers.0.mlp_norm.weight": lambda: optimizer(lambda o: o.set(norms, lr_mul=2.0)),
}


class Leaf(Module):
    def forward(self, x, weight):
        return x


def frequencies(head_dim: int) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("slot", CLASHES)
def test_a_clash_is_an_answer_that_names_both(asked: Asked, slot: str) -> None:
    made = CLASHES[slot]
    answers = asked(slot, one=made(), two=made())
    assert any(answer.clashes for answer in answers)
    for clash in (clash for answer in answers for clash in answer.clashes):
        assert clash.who == ("one", "two")
        assert clash.fix
    elsewhere = asked("data.field", one=made(), two=made())
    assert not any(answer.clashes for answer in elsewhere)
    backwards = asked(slot, two=made(), one=made())
    assert [one.refused for one in answers] == [one.refused for one in backwards]


def test_shares_of_one_source_add_up(asked: Asked) -> None:
    def adds(share: float) -> Any:
        return model(lambda m: m.residual("layers.0.in", "x0", share))

    (answer,) = asked("model.residual[layers.0.in][x0]", two=adds(0.5), one=adds(0.25))
    assert not answer.clashes
    assert [(h.owner, h.what) for h in answer.held] == [("one", "0.25"), ("two", "0.5")]


def test_no_slot_of_the_builders_is_forgotten(
    asked: Asked, small_config: Callable[..., Config]
) -> None:
    config = small_config()
    state = SlotState.of(config)
    kept = [
        value
        for part in (*state.attention, state.model, state.loss, state.data)
        for value in vars(part).values()
    ]
    for several in [one for one in kept if isinstance(one, (list, dict))]:
        kept += several.values() if isinstance(several, dict) else several
    places = [one.where for one in kept if isinstance(one, (Chain, Claim, Terms))]
    answers = asked("*")
    assert len(places) > 50
    for place in places:
        assert any(matches(place, answer) for answer in answers), place


def test_claimed_numbers_of_a_parameter_are_shown(asked: Asked) -> None:
    sets = optimizer(lambda o: o.set(norms, lr_mul=2.0, wd_mul=0.5, betas=(0.75, 0.95)))
    (answer,) = asked("layers.0.mlp_norm.weight", sets=sets)
    found = {one.why.partition(":")[0]: one.what for one in answer.held if one.owner == "sets"}
    assert found == {
        "opt.set.lr_mul": "2.0",
        "opt.set.wd_mul": "0.5",
        "opt.set.betas": "(0.75, 0.95)",
    }
    scheduled = optimizer(lambda o: o.set(norms, lr_mul=plateaus((0, 0.0), (0.5, 1.0))))
    (answer,) = asked("layers.0.mlp_norm.weight", freeze=scheduled)
    assert "freeze.lr_mul" in [one.what for one in answer.held if one.owner == "freeze"]


def test_a_claimed_function_is_named(asked: Asked) -> None:
    (answer, *_) = asked("attn.rope.scaling", it=attention(lambda a: a.rope.scaling(scaled)))
    assert [one.what for one in answer.held] == ["scaled"]


def scaled(theta: Any) -> Any:
    return theta / 2


def test_a_chain_says_what_ordered_it(asked: Asked, planned: Callable[..., Plan]) -> None:
    plugins = {
        "late": attention(lambda attn: attn.out.gate(Y, after="early")),
        "early": attention(lambda attn: attn.out.gate(Y)),
        "before": attention(lambda attn: attn.out.gate(Y, before=("early", "late"))),
        "first": attention(lambda attn: attn.out.correct(Y)),
    }
    correct, between, gate = asked("layers.0.attention.out", **plugins)
    held = (*correct.held, *gate.held)
    spec: Any = planned(**plugins).spec.blocks[0].attention
    assert [one.owner for one in held] == [node.owner for node in spec.out]
    assert [one.owner for one in between.held] == ["core"]
    why = {one.owner: one.why for one in gate.held}
    assert why["late"].startswith("joins at gate; after 'early', as it states")
    assert "after 'before', as that states" in why["late"]
    assert "before 'late', as that states" in why["early"]
    assert "before 'early', as it states" in why["before"]


def test_a_closed_anchor_says_by_whom_and_who_ran_into_it(asked: Asked) -> None:
    closing = attention(lambda attn: attn.out.gate.close("for a reason"))
    scale = attention(lambda attn: attn.scale(1.0))
    (answer,) = asked("layers.1.attention.out.gate", closing=closing, scale=scale)
    (shut,) = answer.refused
    assert (shut.how, shut.who, shut.what) == ("closed", ("closing",), "for a reason")
    gate = attention(lambda attn: attn.out.gate(Y))
    (answer,) = asked("layers.1.attention.out.gate", closing=closing, gate=gate)
    (clash,) = answer.clashes
    assert clash.who == ("closing", "gate")
    assert "for a reason" in clash.what


def test_a_replaced_attention_has_no_slots_left(asked: Asked) -> None:
    whole = model(lambda m: m.attention(1, X))
    for answer in asked("layers.1.attention.*", whole=whole):
        if answer.kind != "parameter":
            assert [one.owner for one in answer.held] == ["whole"]
    scale = attention(lambda attn: attn.scale(1.0) if attn.layer == 1 else None)
    answers = asked("attn.scale", whole=whole, scale=scale)
    assert [bool(answer.clashes) for answer in answers] == [False, True, False, False]
    (clash,) = answers[1].clashes
    assert clash.who == ("scale", "whole")


def test_what_was_not_heard_out_is_not_said_to_be_the_core_s(asked: Asked) -> None:
    made = CLASHES["model.streams"]  # refused in build_model, before any loss hook
    caps = plugin(compute_loss=lambda self, loss: loss.logits(z=1e-4))
    both = {"one": made(), "two": made(), "zcap": caps}
    assert asked("loss.logits", **both) == []
    assert [one.slot for one in asked("model", **both)] == ["model.streams[extra]"]
    (alone,) = asked("loss.logits[z]", one=made(), zcap=caps)
    assert alone.held[0].owner == "zcap"


def test_a_refusal_elsewhere_is_put_where_it_belongs(asked: Asked) -> None:
    reads = model(lambda m: m.norm("final", Absent))
    assert not asked("attn.scale", reads=reads)[0].refused
    (answer,) = asked("model.norm[final]", reads=reads)
    assert "reads 'absent'" in answer.clashes[0].what


class Absent(Module):
    def forward(self, x, absent):
        return x


@pytest.mark.parametrize("slot", ["attn.layout", "model.streams", "opt.rule[mine]"])
def test_no_report_depends_on_the_words_of_a_refusal(
    small_config: Callable[..., Config], slot: str
) -> None:
    config, plugins = small_config(), {"one": CLASHES[slot](), "two": CLASHES[slot]()}
    loaded = [LoadedPlugin.of(name, plugin) for name, plugin in plugins.items()]
    state = SlotState.of(config)
    with pytest.raises(PlanError) as caught:
        build_plan(config, loaded, state)
    told = slot_reports(state, None, caught.value, plugins)
    caught.value.what = "worded otherwise"
    reworded = slot_reports(state, None, caught.value, plugins)
    who = [[one.who for one in report.clashes] for report in reworded]
    assert who == [[one.who for one in report.clashes] for report in told]
    assert [("one", "two")] in who


def test_a_conflict_names_the_lines_of_both(planned: Callable[..., Plan]) -> None:
    scale = CLASHES["attn.scale"]
    with pytest.raises(PlanError) as caught:
        planned(one=scale(), two=scale())
    assert str(caught.value.line).count(f"{__file__}:") == 2


def test_a_layer_that_is_left_out_is_no_conflict_for_plugins_of_all_layers(asked: Asked) -> None:
    hollow = model(lambda m: m.attention(1, None))
    answers = asked("attn.scale", hollow=hollow, scale=attention(lambda attn: attn.scale(1.0)))
    assert not any(answer.refused for answer in answers)
    assert [answer.held[0].owner for answer in answers] == ["scale", "hollow", "scale", "scale"]


def test_layers_that_are_alike_are_said_once(asked: Asked) -> None:
    plugins = {"gate": attention(lambda a: a.out.gate(Y) if a.layer != 1 else None)}
    gates = grouped(asked("attn.out.gate", **plugins))
    assert [(one.slot, one.where) for one in gates] == [
        ("layers.*.attention.out.gate", "layers 0, 2-3"),
        ("layers.*.attention.out.gate", "layer 1"),
    ]
    clash = CLASHES["attn.layout"]
    (one,) = grouped(asked("attn.layout", a=clash(), b=clash()))
    assert one.layers == (0, 1, 2, 3)
    assert one.data()["refused"][0]["who"] == ("a", "b")
    (plain,) = grouped(asked("loss.logits[cap]"))
    assert (plain.layers, plain.where) == ((), "")


@pytest.fixture(scope="module")
def everything(asked: Asked) -> list[SlotReport]:
    return asked("*", muon=Muon())


@given(data=st.data())
def test_an_answer_is_picked_by_each_name_and_its_beginnings(
    everything: list[SlotReport], data: Any
) -> None:
    answer = data.draw(st.sampled_from(everything))
    name = data.draw(st.sampled_from(sorted(names_of(answer))))
    ends = [i for i, letter in enumerate(name) if letter in ".["]
    end = data.draw(st.sampled_from([len(name), *ends]))
    assert matches(name[:end], answer)
    assert matches(f"*{name[1:]}", answer)
    assert matches(re.sub(r"^opt\.", "optimizer.", name[:end]), answer)
    assert not matches(f"{name[:end]}?", answer)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("atn.layout", "attn.layout"),
        ("model.mpl", "model.mlp"),
        ("layers.0.mlp.upp.weight", "layers.0.mlp.up.weight"),
        ("opt.rule[adam]", "opt.rule[adamw]"),
        ("opt.assign[layers.0.mlp.upp]", "opt.assign[layers.0.mlp.up.weight]"),
    ],
)
def test_what_is_misspelt_has_near_names(asked: Asked, misspelt: str, meant: str) -> None:
    answers = asked("*")
    assert not asked(misspelt)
    near = nearest_names(misspelt, answers)
    assert meant in near
    assert all(name.count("[") == name.count("]") for name in near)
    assert not nearest_names("entirely elsewhere", answers)


CPU = {backend: Detected(backend, "cpu", "test") for backend in ("torch", "mlx")}


@pytest.mark.parametrize("backend", CPU)
def test_the_kernel_of_an_op_is_the_one_that_is_bound(
    planned: Callable[..., Plan], backend: str
) -> None:
    plan = planned("train.dtype=bfloat16")
    binding, candidates = bind(CPU[backend], plan)
    answers = {answer.slot: answer for answer in kernel_answers(plan, CPU[backend])}
    for choice in binding.kernels:
        answer = answers[f"kernel[{choice.op}]"]
        assert [(one.owner, one.what) for one in answer.held] == [("core", choice.kernel)]
        offered = {c.name for c in candidates if c.op == choice.op and backend in c.backends}
        assert {one.who[0] for one in answer.refused} == offered - {choice.kernel}
        for refused in answer.refused:
            assert refused.what == choice.refused.get(refused.who[0], refused.what)
        assert matches(choice.op, answer)


def shy(request: Any) -> str:
    return "too shy"


def test_a_kernel_of_a_plugin_is_explained(planned: Callable[..., Plan]) -> None:
    def offer(**more: Any) -> Plugin:
        candidate = Candidate(
            "swiglu", "mine", ("torch",), "operator:mul", rank=lambda r: -1, **more
        )
        return plugin(kernel_provider=lambda self, kernels: kernels.candidate(candidate))

    (answer,) = _ops(planned(brings=offer()), "swiglu")
    assert [(one.owner, one.what) for one in answer.held] == [("brings", "mine")]
    assert not answer.clashes
    (answer,) = _ops(planned(brings=offer(accepts=shy)), "swiglu")
    reasons = {one.who[0]: one.what for one in answer.refused if one.how == "cannot serve"}
    assert reasons["mine"] == "too shy"
    assert "none of the kernels that plugin 'brings' brings can serve" in answer.clashes[0].what


def test_a_kernel_that_cannot_be_had_is_a_clash_of_its_op_alone(
    planned: Callable[..., Plan],
) -> None:
    plan = planned("kernels=swiglu=absent")
    assert [one.slot for one in kernel_answers(plan, CPU["torch"]) if one.clashes] == [
        "kernel[swiglu]"
    ]


def test_without_a_backend_no_kernel_is_chosen(planned: Callable[..., Plan]) -> None:
    answers = kernel_answers(planned(), None)
    assert {one.what for answer in answers for one in answer.held} == {"not chosen"}


def _ops(plan: Plan, op: str) -> list[SlotReport]:
    return [one for one in kernel_answers(plan, CPU["torch"]) if matches(op, one)]
