"""Tests of reading a run without support for its kernels, observers and optimizer; model plugins are required."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minillm_core.backends.bind import CORE, bind
from minillm_core.backends.detect import Detected
from minillm_core.errors import BackendError, PluginError
from minillm_core.nn.init import Normal
from minillm_core.nn.layers import Linear
from minillm_core.nn.module import Module
from minillm_core.ops.select import Candidate
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_core.plugins.plugin import Plugin
from minillm_core.train.restore import inference_plan, is_compatible, shapes_model

CPU = Detected("torch", "cpu", "test")
CUDA = Detected("torch", "cuda", "test")
MLX = Detected("mlx", "cpu", "test")
REQUIRED = ("no-such-thing>=2",)


class Double(Module):
    """Doubles its input."""

    def forward(self, x: Any) -> Any:
        return x + x


class Quick(Plugin, api=1, backends=("torch",), devices=("cuda",)):
    """Requires a kernel that only CUDA has."""

    def kernel_provider(self, kernels: Any) -> None:
        devices = ("cuda",)
        kernels.candidate(
            Candidate("swiglu", "quick", ("torch",), AT, devices, unless="swiglu=false")
        )


class Open(Plugin, api=1):
    """Provides kernels, some for CUDA only, without declaring it."""

    insists: bool = False
    everywhere: bool = False

    def kernel_provider(self, kernels: Any) -> None:
        unless = "insists=false" if self.insists else ""
        kernels.candidate(Candidate("swiglu", "quick", ("torch",), AT, ("cuda",), unless=unless))
        if self.everywhere:
            kernels.candidate(Candidate("rms_norm", "quick", ("torch", "mlx"), AT))


class Watch(Plugin, api=1, requires=REQUIRED):
    """Observes, by a package that is not here."""

    def on_event(self, event: Any) -> None: ...


class Faster(Plugin, api=1, devices=("cuda",)):
    """Twice the learning rate for some."""

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.set(lambda name, info: info.role == "norm", lr_mul=2.0)


class Wide(Plugin, api=1, devices=("cuda",)):
    """Other initial values."""

    def build_model(self, model: Any) -> None:
        model.init_role("mlp.up", Normal, std=0.5)


class Gate(Plugin, api=1, devices=("cuda",)):
    """A node of the model."""

    def build_attention(self, attn: Any) -> None:
        attn.out.gate(Double)


class Plain(Module):
    """An MLP."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.up = Linear(geometry.dim, geometry.dim, role="mlp.up", axes=("hidden", "dim"))

    def forward(self, x: Any) -> Any:
        return self.up(x)


class Kernels(Plain):
    """The same, by kernels of one device where it is there."""

    written_as = Plain


class Own(Plugin, api=1, devices=("cuda",)):
    """An MLP with kernels of its own."""

    def build_model(self, model: Any) -> None:
        model.mlp(0, Kernels)


class Mixed(Own, api=1, devices=("cuda",)):
    """It also has a node without a plain form."""

    def build_attention(self, attn: Any) -> None:
        attn.out.gate(Double)


class Batches(Plugin, api=1, requires=REQUIRED):
    """Sees every batch."""

    def on_batch(self, batch: dict) -> dict:
        return batch


class Loss(Plugin, api=1, devices=("cuda",)):
    """A z-loss."""

    def compute_loss(self, loss: Any) -> None:
        loss.logits(z=1e-3)


AT = f"{__name__}:Double"
SHAPED: dict[str, Plugin] = {
    "gate": Gate(),
    "batches": Batches(),
    "loss": Loss(),
    "mixed": Mixed(),
}
UNSHAPED: dict[str, Plugin] = {
    "quick": Quick(),
    "watch": Watch(),
    "faster": Faster(),
    "wide": Wide(),
}


def read(planned: Any, where: Detected, *settings: str, **plugins: Plugin) -> tuple[Plan, list]:
    """Return the plan by which a run is read, and the notes."""
    said: list[str] = []
    plan = inference_plan(planned(*settings, **plugins), where, said.append)
    bind(where, plan)
    return plan, said


@pytest.mark.parametrize("name", SHAPED)
def test_what_shaped_the_run_is_needed_and_refused(planned: Any, name: str) -> None:
    plugins = {name: SHAPED[name], **UNSHAPED}
    with pytest.raises(PluginError, match=f"plugin '{name}'") as refused:
        read(planned, CPU, **plugins)
    with pytest.raises(PluginError) as trained:  # as for a run
        check_support([LoadedPlugin.of(name, SHAPED[name])], "torch", "cpu")
    assert str(refused.value) == str(trained.value)
    plan = planned(**plugins)
    assert [one for one in plugins if shapes_model(plan, one)] == [name]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "quick",
            "plugin 'quick' does not run on device cpu: only on cuda; the run is read without it: "
            "composed serves swiglu",
        ),
        (
            "watch",
            "plugin 'watch' needs no-such-thing>=2: it is not installed; the run is read without it",
        ),
        (
            "faster",
            "plugin 'faster' does not run on device cpu: only on cuda; the run is read without it",
        ),
        (
            "wide",
            "plugin 'wide' does not run on device cpu: only on cuda; the run is read without it",
        ),
    ],
)
def test_what_shaped_nothing_is_left_out_in_one_line(planned: Any, name: str, line: str) -> None:
    plan, said = read(planned, CPU, **{name: UNSHAPED[name]})
    assert said == [line]
    assert plan.candidates == ()
    assert plan.inits == {}


def test_layers_with_a_plain_form_are_read_on_any_device(planned: Any) -> None:
    plan, said = read(planned, CPU, own=Own(), quick=Quick())
    assert said[0] == (
        "plugin 'own' does not run on device cpu: only on cuda; the run is read without its kernels"
    )
    assert shapes_model(plan, "own")
    _, said = read(planned, MLX, own=Own())
    assert len(said) == 1
    assert read(planned, CUDA, "train.compile=off", own=Own())[1] == []


def test_all_of_them_at_once_a_line_each(planned: Any) -> None:
    _, said = read(planned, CPU, **UNSHAPED)
    assert sorted(line.split("'")[1] for line in said) == sorted(UNSHAPED)
    _, said = read(planned, MLX, quick=Quick())
    (line,) = said
    assert "backend mlx: only on torch; the run is read without it" in line


def test_where_everything_serves_nothing_changes(planned: Any) -> None:
    plugins: dict[str, Plugin] = {"quick": Quick(), "wide": Wide(), "gate": Gate()}
    plan, said = read(planned, CUDA, "train.compile=off", **plugins)
    assert said == []
    assert plan == planned("train.compile=off", **plugins)
    assert read(planned, CPU) == (planned(), [])


@pytest.mark.parametrize("insists", [True, False])
def test_a_kernel_that_refuses_by_itself_is_left_out(planned: Any, insists: bool) -> None:
    with pytest.raises(BackendError):  # as for a run
        bind(CPU, planned(open=Open(insists=insists)))
    plan, said = read(planned, CPU, open=Open(insists=insists))
    assert said == [
        "plugin 'open': its kernel swiglu=quick does not serve here, composed does (serves cuda, "
        "not cpu)"
    ]
    assert plan.candidates == ()


def test_a_kernel_that_serves_stays(planned: Any) -> None:
    plan, said = read(planned, CPU, open=Open(everywhere=True))
    assert said == []  # as in a run: a note of the binding
    assert len(plan.candidates) == 2
    plan, (line,) = read(planned, CPU, open=Open(insists=True, everywhere=True))
    assert "swiglu=quick" in line
    assert [c.op for _, c in plan.candidates] == ["rms_norm"]


@pytest.mark.parametrize(
    ("where", "policy", "why"),
    [
        (CPU, "attention=flex", "kernel 'flex' cannot serve attention: "),
        (MLX, "attention=flex", "no kernel 'flex' for attention"),
        (CPU, "strict,swiglu=gone", "no kernel 'gone' for swiglu"),
    ],
)
def test_a_policy_that_cannot_be_had_gives_way(
    planned: Any, where: Detected, policy: str, why: str
) -> None:
    plan, (line,) = read(planned, where, f"kernels={policy}")
    assert line.startswith(why)
    assert line.endswith(f"; the run's --kernels {policy} is replaced by auto")
    assert plan.config.kernels == "auto"


@pytest.mark.parametrize("policy", ["strict", "reference", "attention=sdpa", "auto"])
def test_a_policy_that_can_be_had_stays(planned: Any, policy: str) -> None:
    plan, said = read(planned, CPU, f"kernels={policy}")
    assert (said, plan.config.kernels) == ([], policy)


def test_a_policy_for_a_kernel_that_is_left_out(planned: Any) -> None:
    plan, said = read(planned, CPU, "kernels=swiglu=quick", quick=Quick())
    assert len(said) == 2
    assert "'quick'" in said[0]
    assert (plan.config.kernels, plan.candidates) == ("auto", ())


def test_where_no_kernel_serves_it_is_said(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORE, "torch", ())
    with pytest.raises(BackendError, match="no kernel serves"):
        read(planned, CPU)


@pytest.mark.parametrize("name", UNSHAPED)
def test_a_plan_without_what_shaped_nothing_is_alike(planned: Any, name: str) -> None:
    def recorded(**plugins: Plugin) -> Any:
        return json.loads(json.dumps(planned(**plugins).data()))

    assert is_compatible(recorded(**{name: UNSHAPED[name]}), planned())
    assert is_compatible(recorded(gate=Gate(), **{name: UNSHAPED[name]}), planned(gate=Gate()))


@pytest.mark.parametrize("name", SHAPED)
def test_a_plan_without_what_shaped_the_run_is_not(planned: Any, name: str) -> None:
    assert not is_compatible(
        json.loads(json.dumps(planned(**{name: SHAPED[name]}).data())), planned()
    )


@pytest.mark.parametrize("record", [None, {}, [], {"model": 3, "data": {}}])
def test_what_is_no_plan_is_not_alike(planned: Callable[..., Plan], record: Any) -> None:
    assert not is_compatible(record, planned())
    assert not is_compatible(record, replace(planned(), core_version="0"))
