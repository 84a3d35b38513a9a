"""Tests of typical first mistakes: the error names the line in the file, the alternatives, and the fix."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import new_class
from typing import Any

import pytest

from minillm_core.errors import PlanError
from minillm_core.nn.module import Module
from minillm_core.ops.select import Candidate
from minillm_core.plan import Plan
from minillm_core.plugins.options import option
from minillm_core.plugins.plugin import Plugin

Planned = Callable[..., Plan]


def plugin(**hooks: Callable[..., Any]) -> Plugin:
    """Build a plugin with these hooks."""
    body = {"__module__": __name__, "__doc__": "Made here.", **hooks}
    return new_class("Made", (Plugin,), {"api": 1}, lambda namespace: namespace.update(body))()


def gated(cls: type) -> Plugin:
    """Build a plugin that gates every head's output with a node of ``cls``."""

    def build_attention(self: Any, attn: Any) -> None:
        attn.out.gate(cls)

    return plugin(build_attention=build_attention)


def line(function: Any, further: int = 0) -> str:
    """Return the first line of a function of this file, plus an offset."""
    return f"{__file__}:{function.__code__.co_firstlineno + further}"


class Forgot(Module):
    def __init__(self) -> None:
        self.amount = 2.0

    def forward(self, y: Any) -> Any:
        return y * self.amount


class Late(Module):
    def __init__(self) -> None:
        self.amount = 2.0
        super().__init__()

    def forward(self, y: Any) -> Any:
        return y * self.amount


class Empty(Module):
    def __init__(self) -> None:
        pass

    def forward(self, y: Any) -> Any:
        return y


class Inside(Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [Empty()]

    def forward(self, y: Any) -> Any:
        return y


@pytest.mark.parametrize(
    ("cls", "blamed"), [(Forgot, Forgot), (Late, Late), (Empty, Empty), (Inside, Empty)]
)
def test_a_module_that_does_not_begin_is_refused(planned: Planned, cls: type, blamed: type) -> None:
    with pytest.raises(PlanError) as refused:
        planned(one=gated(cls))
    said = refused.value
    assert f"'one': {blamed.__name__}.__init__ does not call super().__init__() first" in said.what
    assert line(blamed.__init__) in str(said.where)
    assert "call super().__init__() first" in str(said.fix)


class Misnamed(Module):
    def forward(self, out: Any) -> Any:
        return out


class Misspelt(Module):
    def forward(self, y: Any, document: Any) -> Any:
        return y


class Unslotted(Module):
    def forward(self, idss: Any) -> Any:
        return idss


def test_an_unknown_name_is_answered_with_what_there_is(planned: Planned) -> None:
    with pytest.raises(PlanError) as refused:
        planned(one=gated(Misnamed))
    said = refused.value
    assert "'one' reads 'out', which nothing provides there" in said.what
    assert said.where == "layers.0.attention.out.gate"
    assert f"where: {said.where}, {line(Misnamed.forward)}\n" in str(said)
    assert str(said.fix).startswith("the slot gives y, q, k, v, x; there is also documents, ids")
    assert "model.stream, model.tap" in str(said.fix)
    assert len(str(said).splitlines()) <= 12


def test_a_misspelt_name_is_recognised(planned: Planned) -> None:
    with pytest.raises(PlanError, match=r"did you mean documents\? the slot gives y, q, k, v, x"):
        planned(one=gated(Misspelt))


def test_a_stream_is_given_nothing_by_its_slot(planned: Planned) -> None:
    def build_model(self: Any, model: Any) -> None:
        model.stream("bigram", Unslotted)

    with pytest.raises(PlanError, match=r"fix:   did you mean ids\? there is also documents"):
        planned(one=plugin(build_model=build_model))


class Attentive(Plugin, api=1):
    """Uses a missing slot of the attention's builder."""

    asks: str = option("out.gates", help="the path")

    def build_attention(self, attn: Any) -> None:
        assert not hasattr(attn, "heads_of")
        slot = attn
        for name in self.asks.split("."):
            slot = getattr(slot, name)


@pytest.mark.parametrize(
    ("asks", "what", "fix"),
    [
        ("out.gates", "Out.gates", "did you mean gate? there is correct, gate, project_out"),
        ("out.squash", "Out.squash", "there is correct, gate, project_out"),
        (
            "windows",
            "AttentionBuilder.windows",
            "did you mean window? there is core, documents, head_dim",
        ),
        (
            "rope.freqs",
            "RopeClaims.freqs",
            "did you mean frequencies? there is expects, frequencies, positions, scaling",
        ),
    ],
)
def test_an_unknown_slot_is_answered_with_those_there_are(
    planned: Planned, asks: str, what: str, fix: str
) -> None:
    with pytest.raises(PlanError) as refused:
        planned(one=Attentive(asks=asks))
    said = refused.value
    assert said.exit_code == 2
    assert said.what.startswith(f"{what} is not a slot")
    assert said.where == "plugin 'one', build_attention"
    assert str(said.fix).startswith(fix)
    assert said.line == line(Attentive.build_attention, 4)


def test_a_refusal_from_a_builder_names_the_line(planned: Planned) -> None:
    def build_model(self: Any, model: Any) -> None:
        model.mlp(99, None)

    with pytest.raises(PlanError) as refused:
        planned(one=plugin(build_model=build_model))
    assert f"plugin 'one', build_model, {line(build_model, 1)}\n" in str(refused.value)


def test_a_choice_of_no_parameter_is_answered_with_the_roles(planned: Planned) -> None:
    def optimizer_factory(self: Any, optimizer: Any) -> None:
        optimizer.set(lambda name, info: info.role == "hidden", lr_mul=0.5)

    with pytest.raises(PlanError, match="no parameter fits") as refused:
        planned(one=plugin(optimizer_factory=optimizer_factory))
    fix = str(refused.value.fix)
    assert "roles are attention.k, attention.o" in fix
    assert "mlp.up, norm; names are such as embedding.weight, " in fix
    assert refused.value.line == line(optimizer_factory, 1)


class Kernel(Plugin, api=1):
    """A kernel that supports no request."""

    op: str = option("swiglu", help="that it is for")
    function: str = option("operator:mul", help="what computes it")
    requires: tuple[str, ...] = option((), help="what has to be installed")
    device: str = option("cpu", help="what it runs on")

    def kernel_provider(self, kernels: Any) -> None:
        given = {"devices": (self.device,), "requires": self.requires}
        kernels.candidate(Candidate(self.op, "mine", ("torch",), self.function, **given))


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        (
            {"op": "swigluu"},
            "kernel for 'swigluu', but there is no such op",
            "mean swiglu? ops are",
        ),
        ({"op": "conv"}, "but there is no such op", "ops are linear, embedding, rms_norm"),
        (
            {"device": "gpu"},
            "kernel for 'gpu', but there is no such device",
            "devices are cpu, cuda, mps, metal",
        ),
        ({"function": "operator:mull"}, "operator has no mull; did you mean mul?", "its reference"),
        ({"function": "decimals:mul"}, "there is no module decimals", "its reference"),
        ({"function": "this.is:far.off"}, "not of the form package.module:function", "reference"),
        ({"function": "tabnanny:chek"}, "tabnanny has no chek; did you mean check?", "reference"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused(
    planned: Planned, options: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(PlanError) as refused:
        planned(one=Kernel(**options))
    assert "'one'" in refused.value.what
    assert what in refused.value.what
    assert fix in str(refused.value.fix)
    assert refused.value.line == line(Kernel.kernel_provider, 2)


def test_a_kernel_of_what_is_not_installed_is_left_to_the_run(planned: Planned) -> None:
    needed = ("no-such-distribution>=1",)
    assert planned(one=Kernel(function="no_such:f", requires=needed)).candidates
    ((_, offered),) = planned(one=Kernel(function="tabnanny:check")).candidates
    assert offered.provider == "one"  # blamed for what its accepts returns or raises
    assert "tabnanny" not in sys.modules


def test_a_module_that_was_made_is_refused(planned: Planned) -> None:
    made: Any = Misnamed()
    with pytest.raises(PlanError, match="hand in Misnamed and its arguments") as refused:
        planned(one=gated(made))
    assert refused.value.line == line(gated, 4)


def test_a_misspelt_stage_is_recognised(planned: Planned) -> None:
    def optimizer_factory(self: Any, optimizer: Any) -> None:
        optimizer.extend("adamw", "momentun", None)

    with pytest.raises(PlanError, match="did you mean momentum\\? stages are") as refused:
        planned(one=plugin(optimizer_factory=optimizer_factory))
    assert refused.value.line == line(optimizer_factory, 1)
