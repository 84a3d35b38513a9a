"""Tests that schedule values and batch fields reach every place that accepts them, on each framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Learned, Linear, Module, Plugin, TanhCap, cosine, ones, piecewise, stages
from minillm_kit import materialise

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

both_backends = pytest.mark.parametrize("backend", ["torch", "mlx"])


class Marked(Module):
    """x (B, T, C) -> x where a field is set, else a fraction of it."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.size = Linear(geometry.dim, 1, role="gate", init=ones)

    def forward(self, x: Any, marks: Any) -> Any:
        marked = self.ops.expand_dims(self.ops.astype(marks, "float32"), -1)
        return x * (0.5 + 0.5 * marked) + self.size(x) * 0.01


class Coefficient(Module):
    """A coefficient (B, T, 1) from a field and a schedule value."""

    def forward(self, marks: Any, ramp: Any) -> Any:
        return self.ops.expand_dims(self.ops.astype(marks, "float32"), -1) * ramp


class Ramp(Module):
    """A stream: a schedule value, spread over a row."""

    def forward(self, ids: Any) -> Any:
        return self.ops.zeros_like(self.ops.astype(ids, "float32"))[..., None] + 0.5


class Size(Module):
    """A loss term: the mean square of the stream, times a field."""

    def forward(self, x: Any, marks: Any) -> Any:
        marked = self.ops.expand_dims(self.ops.astype(marks, "float32"), -1)
        return self.ops.mean(self.ops.square(x) * marked)


class Fields(Plugin, api=1):
    """Reads its own field in every kind of node outside the blocks, and inside one."""

    def build_data(self, data: Any) -> None:
        data.field("marks", "int32")
        data.field("further", "int32")

    def on_batch(self, batch: Any) -> Any:
        return batch

    def build_model(self, model: Any) -> None:
        model.stream("ramp", Ramp)
        model.embed.mix(Marked)
        model.norm("final", Marked)
        model.residual("final", "x0", Coefficient)
        model.residual("layers.1.mid", "sublayer", Coefficient)

    def compute_loss(self, loss: Any) -> None:
        loss.target(0.3, field="further")
        loss.term("size", Size, weight=0.1)


class OnePlace(Plugin, api=1):
    """Reads the field in a single place."""

    place: str

    def build_data(self, data: Any) -> None:
        data.field("marks", "int32")

    def on_batch(self, batch: Any) -> Any:
        return batch

    def build_model(self, model: Any) -> None:
        model.stream("ramp", Ramp)
        put = {
            "embed": lambda: model.embed.mix(Marked),
            "norm": lambda: model.norm("layers.0.mlp", Marked),
            "final-norm": lambda: model.norm("final", Marked),
            "site": lambda: model.residual("layers.1.in", "carry", Coefficient),
            "final-site": lambda: model.residual("final", "carry", Coefficient),
            "mlp": lambda: model.mlp(1, Marked),
        }
        put.get(self.place, lambda: None)()

    def compute_loss(self, loss: Any) -> None:
        if self.place == "term":
            loss.term("size", Size)


class Values(Plugin, api=1):
    """Schedules in every place that accepts a number."""

    staged: bool = False

    def build_attention(self, attn: Any) -> None:
        attn.scale(piecewise((0, 0.1), (1, 0.6)))
        attn.window(stages((0, 3), (0.5, 6)) if self.staged else piecewise((0, 3), (1, 8)))

    def build_model(self, model: Any) -> None:
        model.tap("layers.0.in")
        model.residual("layers.1.in", "layers.0.in", cosine(0.5, 0.1))
        model.residual("layers.1.out", "carry", piecewise((0, 1.0), (1, 0.5)))
        model.residual("final", "layers.0.in", Learned(0.5))

    def compute_loss(self, loss: Any) -> None:
        loss.logits(cap=TanhCap(5.0), scale=0.8, smoothing=0.1, z=1e-3)
        loss.target(piecewise((0, 0.5), (1, 0.1)), offset=2)
        loss.target(cosine(0.2, 0.0), offset=4)


def with_fields(lab: Any, plan: Any, *, weights: bool = False) -> dict[str, np.ndarray]:
    batch, rng = lab.batch(plan, unsupervised=2), np.random.default_rng(2)
    shape = batch["ids"].shape
    batch["marks"] = rng.integers(0, 2, shape).astype(np.int32)
    batch["further"] = rng.integers(-1, plan.config.model.vocab, shape).astype(np.int32)
    if weights:
        batch["weights"] = rng.random(shape).astype(np.float32)
    return batch


def assert_exact(lab: Any, plan: Any, backend: str, batch: dict[str, np.ndarray]) -> None:
    """Compare gradients with float64, and the loss with NumPy."""
    run = lab.trainer(plan, backend)
    loss, found = lab.gradients(run, plan, [batch])
    objective, exact = lab.exact_gradients(plan, [batch])
    lab.assert_gradients(found, exact, overall=1e-6)
    reference = materialise(plan, 0)(batch, lab.values_of(plan, [batch]))
    assert objective == pytest.approx(float(reference.objective), rel=1e-7)
    assert loss == pytest.approx(float(reference.sums[0]) / lab.supervised([batch]), rel=1e-6)


@both_backends
@pytest.mark.parametrize("weights", [False, True])
def test_fields_reach_every_node(lab: Any, backend: str, weights: bool) -> None:
    plan = lab.plan(plugins={"fields": Fields()}, train_clip=0.0)
    assert plan.fields == ("further", "ids", "labels", "marks", "weights")
    assert_exact(lab, plan, backend, with_fields(lab, plan, weights=weights))


@pytest.mark.parametrize(
    "place", ["embed", "norm", "final-norm", "site", "final-site", "mlp", "term"]
)
def test_a_field_is_sent_for_one_reader(lab: Any, place: str) -> None:
    plan = lab.plan(plugins={"one_place": OnePlace(place=place)})
    assert plan.fields == ("ids", "labels", "marks", "weights")
    batch = with_fields(lab, plan)
    ours, theirs = (lab.losses(lab.trainer(plan, b), plan, [[batch]] * 2) for b in ("torch", "mlx"))
    assert ours == pytest.approx(theirs, rel=1e-6)


@both_backends
@pytest.mark.parametrize("staged", [False, True])
def test_values_reach_every_place(lab: Any, backend: str, staged: bool) -> None:
    plan = lab.plan(plugins={"values": Values(staged=staged)}, train_clip=0.0)
    assert len(plan.values(0.5)) == 1 + 2 + 2 + 2  # learning rate; attention, residual, loss
    assert_exact(lab, plan, backend, lab.batch(plan, unsupervised=2))


@both_backends
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_in_narrow_dtypes(lab: Any, backend: str, dtype: str) -> None:
    found = []
    for each in (dtype, "float32"):
        plan = lab.plan("paired_heads", plugins={"values": Values()}, train_dtype=each)
        run = lab.trainer(plan, backend)
        batch = lab.batch(plan)
        found.append(lab.losses(run, plan, [[batch]] * 3))
    assert found[0] == pytest.approx(found[1], rel=5e-3)


@both_backends
def test_terms_and_further_targets_are_reported(lab: Any, backend: str) -> None:
    plan = lab.plan(plugins={"fields": Fields()}, train_lr=0.0)
    batch = with_fields(lab, plan)
    run = lab.trainer(plan, backend)
    count = lab.supervised([batch])
    result = run.read(run.step([batch], plan.values(0.05), count))
    reference = materialise(plan, 0)(batch, lab.values_of(plan, [batch]))
    assert set(result.terms) == {"further", "size"}
    assert result.terms["further"] == pytest.approx(float(reference.sums[1]) / count, rel=1e-6)
    size, _ = reference.terms["size"]
    assert result.terms["size"] == pytest.approx(float(size), rel=1e-6)


@both_backends
def test_evaluation_has_the_main_target_alone(lab: Any, backend: str) -> None:
    plan = lab.plan(plugins={"values": Values()})
    batch = lab.batch(plan, unsupervised=2)
    nats, count = lab.trainer(plan, backend).evaluate([batch])
    model, values = materialise(plan, 0), plan.values(1.0)
    expected, predictions = model.evaluate(batch, values)
    assert count == predictions == lab.supervised([batch])
    assert nats == pytest.approx(float(expected), rel=1e-6)
    step = model(batch, values | {"normaliser": 1.0 / count})
    assert abs(float(step.sums[0]) - nats) > 1e-3 * nats  # smoothing and z only apply in training


@pytest.mark.slow
def test_values_are_inputs_of_torchs_graph(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def refuse(self: Any, *arguments: Any) -> Any:
        raise AssertionError("a step waited for a number")

    def compiler(function: Any, **options: Any) -> Any:
        return torch.compile(function, backend="aot_eager", **options)

    torch.compiler.reset()
    plugins = {"values": Values(staged=True)}
    eager = lab.trainer(lab.plan("paired_heads", plugins=plugins))
    plan = lab.plan("paired_heads", plugins=plugins, train_compile="on")
    run, batch = lab.trainer(plan, compiler=compiler), lab.batch(plan)
    expected, found = [], []
    for index in range(20):
        values, stance = plan.values((index + 1) / 20), "default"
        stance = "fail_on_recompile" if index not in (0, 10) else "default"
        with torch.compiler.set_stance(stance):
            found.append(run.read(run.step([batch], values, lab.supervised([batch]))).loss)
        with monkeypatch.context() as patch:
            for name in ("item", "__float__", "__int__", "__bool__"):
                patch.setattr(torch.Tensor, name, refuse)
            handle = eager.step([batch], values, lab.supervised([batch]))
        expected.append(eager.read(handle).loss)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    torch.compiler.reset()


def test_values_are_inputs_of_mlxs_graph(lab: Any) -> None:
    plugins, found = {"values": Values()}, []
    for compiled in ("on", "off"):
        plan = lab.plan(plugins=plugins, train_compile=compiled)
        run, batch = lab.trainer(plan, "mlx"), lab.batch(plan)
        found.append(lab.losses(run, plan, [[batch]] * 3))
        assert run.traces == (1 if compiled == "on" else 3)
    np.testing.assert_allclose(*found, atol=1e-5)


class Named(Plugin, api=1):
    """A stream with a name that torch's Module has a method of, and a learned share of it."""

    stream: str

    def build_model(self, model: Any) -> None:
        model.stream(self.stream, Ramp)
        model.residual("layers.0.out", self.stream, Learned(0.5))


@pytest.mark.parametrize("stream", ["half", "type", "forward"])
def test_a_stream_may_be_named_like_a_method_of_torchs_module(lab: Any, stream: str) -> None:
    named, other = (lab.plan(plugins={"p": Named(stream=one)}) for one in (stream, "ramp"))
    found = [lab.losses(lab.trainer(one), one, [[lab.batch(one)]] * 2) for one in (named, other)]
    assert found[0] == found[1]
