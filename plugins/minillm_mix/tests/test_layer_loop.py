"""Tests of repeated layers against a deeper model with shared weights, of decoding, and of refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Module, Plugin
from minillm_core.errors import PlanError
from minillm_kit.subject import Subject
from minillm_mix.hyper_connections import HyperConnections
from minillm_mix.layer_loop import LayerLoop
from minillm_modded.mudd import MUDD

ORDER = (0, 1, 2, 1, 2, 1, 2, 3)
"""The order of four layers with three rounds of the middle ones."""


class Noisy(Module):
    """Returns y, and a term."""

    terms = ("noise",)

    def forward(self, y: Any) -> Any:
        """Return y (B, T, H, D), and a number."""
        return y, self.ops.sum(y)


class Emits(Plugin, api=1):
    """Emits a term in every layer."""

    def build_attention(self, attn):
        attn.out.gate(Noisy)

    def compute_loss(self, loss):
        loss.term("noise", emitted="noise")


def test_the_stream_passes_the_layers_again(lab: Any) -> None:
    plan = lab.plan(LayerLoop(first=1, last=2, times=3))
    model, batch = lab.model(plan), lab.batch()
    x = model.net.embedding(batch["ids"])
    for layer in ORDER:
        x = x + model.attention(layer, x)
        x = x + model.mlp(layer, x)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)
    assert plan.parameters.keys() == lab.plan().parameters.keys()
    before = model.net.hidden(batch, plan.values(0.5))[0]  # before three quarters of the run
    assert np.abs(before - model.hidden(batch)).max() > 0.01


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_gradients_are_those_of_a_deeper_model_added_up(backend: str) -> None:
    pytest.importorskip("torch" if backend == "torch" else "mlx.core")
    subject = Subject("layer_loop", {"first": 0, "last": 1, "times": 2, "start": 0})
    plan, deep = subject.plan(), subject.plan(without=True, **{"model.layers": 4})
    (batch,) = subject.batches(plan, 1)
    run, deeper = (subject.trainer(one, backend, stirred=True) for one in (plan, deep))
    arrays = run.arrays()
    twice = deeper.arrays()
    for name in deep.parameters:
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) % 2)
        twice[f"model.{name}"] = arrays["model." + ".".join(parts)]
    deeper.resume(twice)
    values = {**plan.values(0.5), "train.lr": 0.0}
    total = int((batch["labels"] >= 0).sum())
    results = [one.read(one.step([batch], values, total)) for one in (run, deeper)]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert plan.config.train.clip == 0
    ours, theirs = run.arrays(), deeper.arrays()
    for name in plan.parameters:  # the first moments are gradients up to a factor
        if not name.startswith("layers."):
            continue
        again = name.replace(f"layers.{name[7]}", f"layers.{int(name[7]) + 2}", 1)
        key = "optimizer.precondition.m."
        summed = theirs[key + name] + theirs[key + again]
        np.testing.assert_allclose(ours[key + name], summed, rtol=2e-3, atol=2e-6, err_msg=name)
        assert np.abs(summed).max() > 1e-4


def test_every_round_has_a_cache_of_its_own(lab: Any, decoded: Any) -> None:
    plan = lab.plan(LayerLoop(first=1, last=2, times=3))
    model, batch = lab.model(plan), lab.batch(rows=1)
    *_, last = decoded(plan, model.net, batch, 1e-9)
    kept = {path for path in last if path.startswith("layers.1.attention")}
    assert kept == {f"layers.1.attention{turn}" for turn in ("", "@1", "@2")}


def test_a_plan_counts_the_rounds(lab: Any) -> None:
    plain = lab.plan().estimate()
    always = lab.plan(LayerLoop(first=1, last=2, times=3, start=0)).estimate()
    late = lab.plan(LayerLoop(first=1, last=2, times=3, start=0.5)).estimate()
    layer = (
        sum(part.flops for part in plain.parts if part.name.startswith(("attention", "mlp"))) // 4
    )
    assert always.flops_per_token - plain.flops_per_token == pytest.approx(4 * layer, rel=1e-3)
    assert late.flops_per_token - plain.flops_per_token == pytest.approx(2 * layer, rel=1e-2)
    assert always.memory["activations"] == late.memory["activations"] > plain.memory["activations"]


@pytest.mark.parametrize("first", [0, 1, 3])
def test_dense_connections_start_unchanged_in_every_round(lab: Any, first: int) -> None:
    loop, batch = LayerLoop(first=first, last=3, times=3, start=0), lab.batch()
    dense, plain = (lab.model(lab.plan(loop, *more), moved=False) for more in ((MUDD(),), ()))
    np.testing.assert_allclose(dense.hidden(batch), plain.hidden(batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        (
            (LayerLoop(), HyperConnections()),
            r"model.loop is claimed by both 'hyperconnections' and 'layerloop'[\s\S]*leave out",
        ),
        ((LayerLoop(first=3, last=1),), "cannot run layers 3 to 1"),
        ((LayerLoop(last=4),), "cannot run layers 2 to 4"),
        ((LayerLoop(), Emits()), "runs layers.2 several times, where 'emits' emits"),
    ],
)
def test_what_cannot_run_again_is_refused(lab: Any, plugins: tuple[Any, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        lab.plan(*plugins)
