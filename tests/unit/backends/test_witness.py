"""Tests of the trainers' evidence on plugins: initial values and kernels; and names with dots reach a node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Candidate, Module, Normal, Plugin, ones, piecewise, zeros
from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected
from minillm_core.errors import PluginCodeError
from minillm_core.nn.initial import witness_inits

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]
OUTPUT = "layers.0.attention.o.weight"


def trained(plan: Any, backend: str) -> Any:
    """Return a trainer after one step."""
    run = create_backend(Detected(backend, "cpu", "test"), plan).trainer(plan, 0)
    ids = np.arange(16, dtype=np.int32).reshape(2, 8)
    batch = {"ids": ids, "labels": ids, "documents": ids * 0, "positions": ids % 8}
    return run, run.read(run.step([batch], plan.values(1.0), 16))


class Starts(Plugin, api=1):
    """Initial values alone."""

    def build_model(self, model: Any) -> None:
        model.init(OUTPUT, zeros)
        model.init("embedding.weight", Normal(0.5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_claimed_initial_values_are_shown(plan_of: Any, backend: str) -> None:
    plan = plan_of({"starts": Starts()})
    expected = plan.plugins[0].expected
    assert set(expected) == {f"init:{OUTPUT}", "init:embedding.weight"}
    run, _ = trained(plan, backend)
    assert all(run.witnesses()[key] == 1 for key in expected)


def test_other_initial_values_are_no_evidence(plan_of: Any) -> None:
    plan, seen = plan_of(), []
    model = create_backend(Detected("torch", "cpu", "test"), plan).trainer(plan, 0).model
    mine = {OUTPUT: zeros, "norm.weight": ones}
    witness_inits(model, mine, 0, lambda t: t.detach().numpy(), seen.append)
    assert seen == ["init:norm.weight"]


def doubled(gate: Any, up: Any, form: Any = None) -> Any:
    return gate * up


def of_ops(ops: Any, gate: Any, up: Any) -> Any:
    return gate * up


def of_numpy(gate: Any, up: Any) -> Any:
    return np.ones(tuple(gate.shape), np.float32)


def of_half(gate: Any, up: Any) -> Any:
    return gate[..., ::2] * up[..., ::2]


class Kernels(Plugin, api=1):
    """A kernel for an op that runs, and one for an op that training does not use."""

    def kernel_provider(self, kernels: Any) -> None:
        for op in ("swiglu", "logits"):
            kernels.candidate(Candidate(op, "mine", ("torch", "mlx"), f"{__name__}:doubled"))


class NoMLP(Plugin, api=1):
    """Leaves nothing that would multiply gates."""

    def build_model(self, model: Any) -> None:
        for layer in range(model.layers):
            model.mlp(layer, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernel_is_shown_where_its_op_ran(plan_of: Any, backend: str) -> None:
    run, _ = trained(plan_of({"kernels": Kernels()}), backend)
    assert run.witnesses()["kernel:swiglu=mine"] > 0
    assert "kernel:logits=mine" not in run.witnesses()
    run, _ = trained(plan_of({"kernels": Kernels(), "nomlp": NoMLP()}), backend)
    assert "kernel:swiglu=mine" not in run.witnesses()


class Misfit(Plugin, api=1):
    """A kernel that is called, or answers, in another way than its op."""

    function: str

    def kernel_provider(self, kernels: Any) -> None:
        mine = f"{__name__}:{self.function}"
        kernels.candidate(Candidate("swiglu", "mine", ("torch", "mlx"), mine))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("of_ops", r"does not take the op's arguments \(.*'up'\) in of_ops"),
        ("of_numpy", "returned ndarray from of_numpy"),
        ("of_half", r"returned shape \(.*\) from of_half"),
    ],
)
def test_a_kernel_that_is_not_its_op_s_is_its_plugin_s_fault(
    plan_of: Any, function: str, said: str, backend: str
) -> None:
    with pytest.raises(PluginCodeError, match=f"plugin 'it' {said}") as raised:
        trained(plan_of({"it": Misfit(function=function)}), backend)
    assert raised.value.where == "kernel:swiglu=mine"


class Fade(Module):
    """y times a schedule value, plus 0 times a tap."""

    reads = {"rate": "train.lr", "strength": "fades.residual.x0"}  # noqa: RUF012

    def forward(self, x: Any, rate: Any, strength: Any, early: Any) -> Any:
        return x * self.ops.like(strength + rate * 0, x) + early * 0


class Fades(Plugin, api=1):
    """A node that reads two schedule values and a tap."""

    def build_model(self, model: Any) -> None:
        model.residual("layers.0.in", "x0", piecewise((0, 1.0), (1, 0.0)))
        model.tap("layers.0.mid", name="early")
        model.norm("final", Fade)
        model.norm("layers.1.mlp", Fade)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_names_with_dots_and_taps_reach_a_node(plan_of: Any, backend: str) -> None:
    plan = plan_of({"fades": Fades()})
    assert plan.spec.taps == (("early", "layers.0.mid"),)
    assert {"early", "train.lr", "fades.residual.x0"} <= set(plan.spec.blocks[1].reads())
    run, result = trained(plan, backend)
    assert result.loss == pytest.approx(np.log(31), rel=1e-6)  # scaled to 0: uniform
    assert run.witnesses()["node:norm"] > 0
