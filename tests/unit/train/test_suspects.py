"""Tests of the plugins named as possible causes of NaN or infinity."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm_core import Candidate, Module, Plugin, stage
from minillm_core.config.load import load
from minillm_core.plan import build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.errors import suspects


class Double(Module):
    def forward(self, y: Any) -> Any:
        return y * 2


def halved(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return update / 2, state


def swiglu(gate: Any, up: Any) -> Any:
    return gate * up


class Gates(Plugin, api=1):
    """A node and a kernel."""

    def build_attention(self, attn: Any) -> None:
        attn.out.gate(Double)

    def kernel_provider(self, kernels: Any) -> None:
        at = f"{__name__}:swiglu"
        kernels.candidate(Candidate(op="swiglu", name="mine", backends=("torch",), reference=at))


class Halves(Plugin, api=1):
    """A stage."""

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.extend("adamw", "scale", stage(halved))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch):
    """Build the relevant part of a run with these plugins, kernels and weights."""

    def made(*plugins: Plugin, kernels: Any = (), **arrays: Any) -> Any:
        loaded = [LoadedPlugin.of(type(one).__name__.lower(), one) for one in plugins]
        trainer = SimpleNamespace(
            local_arrays=lambda: {
                f"model.{name}": np.array(value) for name, value in arrays.items()
            },
            binding=SimpleNamespace(kernels=kernels),
        )
        plan = build_plan(load(preset="tiny", default_preset=lambda: ("tiny", "")).config, loaded)
        return SimpleNamespace(plan=plan, plugins=tuple(loaded), trainer=trainer)

    return made


def test_without_plugins_nobody_is_named(job: Any) -> None:
    assert suspects(job()) == ([], "")


def test_what_takes_part_in_the_loss_is_named(job: Any) -> None:
    names, found = suspects(job(Gates(), Halves()))
    assert names == ["gates"]
    assert found == "the loss is computed by plugin 'gates': Double.forward"
    serving = [SimpleNamespace(op="swiglu", kernel="mine")]
    assert suspects(job(Gates(), kernels=serving))[1].endswith("Double.forward, swiglu")


def test_where_weights_are_spoilt_the_stages_are_named(job: Any) -> None:
    arrays = {"embed.weight": [1.0], "layers.0.mlp.up.weight": [np.inf]}
    names, found = suspects(job(Gates(), Halves(), **arrays))
    assert names == ["halves"]
    assert found == "layers.0.mlp.up.weight is updated by plugin 'halves': halved"
