"""Tests that the set and order of plugins change no more than those plugins do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core import Linear, Module, Plugin
from minillm_core.backends.detect import Detected
from minillm_core.config.load import load
from minillm_core.plugins.hookspecs import HOOKS
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.request import Prepared, train

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]
CALLED: Counter[str] = Counter()
ROWS: list[bytes] = []


class Gate(Module):
    """A gate per head."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.gate = Linear(geometry.dim, geometry.heads, role="gate")

    def forward(self, y: Any, x: Any) -> Any:
        return y * self.ops.expand_dims(self.ops.sigmoid(self.gate(x)), -1)


class Gated(Plugin, api=1):
    """Adds a parameter to every layer."""

    def build_attention(self, attn: Any) -> None:
        attn.out.gate(Gate)


class Counted(Plugin, api=1):
    """Implements every hook, and counts the calls; the gate gives it an effect."""

    def build_attention(self, attn: Any) -> None:
        CALLED["build_attention"] += 1
        attn.out.gate(Gate)

    def build_model(self, model: Any) -> None:
        CALLED["build_model"] += 1

    def compute_loss(self, loss: Any) -> None:
        CALLED["compute_loss"] += 1

    def optimizer_factory(self, optimizer: Any) -> None:
        CALLED["optimizer_factory"] += 1

    def kernel_provider(self, kernels: Any) -> None:
        CALLED["kernel_provider"] += 1

    def build_data(self, data: Any) -> None:
        CALLED["build_data"] += 1

    def on_batch(self, batch: Any, phase: str) -> Any:
        CALLED["on_batch"] += 1
        return batch

    def on_evaluated(self) -> None:
        CALLED["on_evaluated"] += 1

    def on_event(self, event: Any) -> None:
        CALLED["on_event"] += 1


class Witness(Plugin, api=1):
    """Records the contents of training batches."""

    def on_batch(self, batch: Any, phase: str) -> Any:
        if phase == "train":
            ROWS.append(batch["ids"].tobytes() + batch["labels"].tobytes())
        return batch


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(30):
        (folder / f"{n:02d}.txt").write_text(
            f"{n}: the quick brown fox, {n * n} times. " * 9, "utf-8"
        )
    return folder


@pytest.fixture
def whole_run(tmp_path: Path, text: Path) -> Any:
    """Train for six steps with the command; resets the plugins' counters first."""

    def run(**plugins: Plugin) -> None:
        CALLED.clear()
        ROWS.clear()
        settings = {
            **{"model.vocab": 300, "model.dim": 16, "model.heads": 2, "model.kv_heads": 2},
            **{"model.layers": 2, "model.hidden": 16, "train.rows": 2, "train.seq_len": 16},
            **{"eval.tokens": 100, "eval.every": 3, "checkpoint.every": 3},
        }
        loaded = load(
            preset="tiny",
            plugins=",".join(plugins),
            assignments=[f"{key}={value}" for key, value in settings.items()],
            flags={"--data": [str(text)], "--steps": 6},
            default_preset=lambda: ("tiny", "test"),
        )
        named = tuple(LoadedPlugin.of(name, plugin) for name, plugin in plugins.items())
        train(
            Prepared(loaded, None, named, Detected("torch", "cpu", "test")),
            out=tmp_path / "-".join(plugins),
            cache=tmp_path / "cache",
            say=lambda line: None,
        )

    return run


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_plugins_does_not_matter(lab: Any, backend: str) -> None:
    plans = [lab.plan(*names) for names in (("muon", "paired_heads"), ("paired_heads", "muon"))]
    assert plans[0].hash == plans[1].hash
    assert plans[0].data() == plans[1].data()
    steps = [[lab.batch(plans[0], seed)] for seed in range(5)]
    runs = [lab.trainer(plan, backend) for plan in plans]
    ours, theirs = (lab.losses(run, plan, steps) for run, plan in zip(runs, plans, strict=True))
    assert ours == theirs
    for name, value in runs[0].arrays().items():
        assert value.tobytes() == runs[1].arrays()[name].tobytes(), name


def test_without_plugins_a_plan_holds_no_trace_of_them(lab: Any) -> None:
    text = json.dumps(lab.plan().data())
    for word in ("plugin", "muon", "paired", "digests", "on_batch", "fields", "minillm_"):
        assert word not in text.replace("minillm_core", "")
    assert {p.owner for p in lab.plan().placements} | {
        i.owner for i in lab.plan().parameters.values()
    } == {"core"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plugin_that_adds_parameters_moves_no_other_start(lab: Any, backend: str) -> None:
    plain = lab.trainer(lab.plan(), backend, seed=7).arrays()
    gated = lab.trainer(lab.plan(plugins={"gated": Gated()}), backend, seed=7).arrays()
    added = [name for name in gated if name not in plain]
    assert [name for name in added if name.startswith("model.")] == [
        f"model.layers.{i}.attention.out.gated.gate.weight" for i in range(2)
    ]
    for name, value in plain.items():
        assert value.tobytes() == gated[name].tobytes(), name
    other = lab.trainer(lab.plan(), backend, seed=8).arrays()
    assert np.any(other["model.embedding.weight"] != plain["model.embedding.weight"])


def test_a_plugin_that_adds_parameters_moves_no_data(whole_run: Any) -> None:
    whole_run(witness=Witness())
    plain = ROWS[:6]
    whole_run(witness=Witness(), gated=Gated())
    assert len(set(plain)) == 6
    assert ROWS[:6] == plain


def test_planning_hooks_are_over_when_training_begins(whole_run: Any) -> None:
    whole_run(counted=Counted())
    assert set(CALLED) == set(HOOKS)
    planning = {hook: n for hook, n in CALLED.items() if not hook.startswith("on_")}
    assert planning.pop("build_attention") == 2  # once per layer
    assert set(planning.values()) == {1}
    assert CALLED["on_batch"] >= 6
    assert CALLED["on_evaluated"] == 3  # before the first step, after three and after six
    assert CALLED["on_event"] >= 6
