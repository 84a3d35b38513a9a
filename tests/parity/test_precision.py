"""Tests of mixed precision: float32 master weights, loss scaling, activation checkpointing, a replaced product."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from minillm_core import Module, Plugin, stage
from minillm_core.errors import PluginCodeError

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]
NARROW = ["bfloat16", "float16"]
both_backends = pytest.mark.parametrize("backend", BACKENDS)


class Twice(Module):
    """A custom matrix product."""

    def forward(self, x: Any, weight: Any) -> Any:
        return self.ops.linear(x, weight) * 2.0


class Doubled(Plugin, api=1):
    """Replaces the product of one leaf."""

    def build_model(self, model: Any) -> None:
        model.linear("layers.0.attention.k", Twice)


def trained(lab: Any, plan: Any, backend: str, steps: int = 12, **options: Any) -> tuple[Any, Any]:
    """Return (trainer, losses) after repeated steps on one batch."""
    batch = lab.batch(plan, unsupervised=2)
    run = lab.trainer(plan, backend, **options)
    return run, lab.losses(run, plan, [[batch]] * steps)


@pytest.mark.broad(3)
@both_backends
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("names", [(), ("muon", "paired_heads")], ids=["plain", "both"])
def test_narrow_dtypes_train(lab: Any, names: tuple[str, ...], dtype: str, backend: str) -> None:
    settings = {"train_lr": 3e-3, "train_schedule": "constant"}
    run, found = trained(lab, lab.plan(*names, train_dtype=dtype, **settings), backend)
    _, wide = trained(lab, lab.plan(*names, **settings), backend)
    assert found[-1] < found[0] - 0.3
    assert found == pytest.approx(wide, abs=0.02)
    held = {n: v.dtype for n, v in run.arrays().items() if not n.startswith("random.")}
    assert set(held.values()) == {np.dtype(np.float32)}


class Wide(Module):
    """Any array of a slot, in float32."""

    def forward(self, x: Any) -> Any:
        return self.ops.astype(x, "float32") * 1.5


class WideGate(Module):
    """y (B, T, H, D) in float32."""

    def forward(self, y: Any) -> Any:
        return self.ops.astype(y, "float32") * 1.5


class WideProduct(Module):
    """A product in float32."""

    def forward(self, x: Any, weight: Any) -> Any:
        return self.ops.astype(self.ops.linear(x, weight), "float32")


class WideValue(Module):
    """A term of v in float32."""

    def forward(self, v: Any) -> Any:
        return self.ops.astype(v, "float32")


PLACES: dict[str, tuple[str, str]] = {
    "gate": ("WideGate", "layers.0.attention.out.it"),
    "v": ("WideValue", "layers.0.attention.v_terms.it"),
    "mlp": ("Wide", "layers.0.mlp"),
    "attention": ("Wide", "layers.0.attention"),
    "norm": ("Wide", "norm"),
    "embed": ("Wide", "embed.it"),
    "product": ("WideProduct", "layers.0.mlp.up.product"),
    "residual": ("Wide", "layers.0.site_mid.coefficients.sublayer"),
}
"""Slot -> the class that returns float32 in it, and the path of its node."""


class Widens(Plugin, api=1):
    """Returns float32 in one slot."""

    place: str

    def build_attention(self, attn: Any) -> None:
        if attn.layer == 0 and self.place == "gate":
            attn.out.gate(WideGate)
        if attn.layer == 0 and self.place == "v":
            attn.v(WideValue)

    def build_model(self, model: Any) -> None:
        put = {
            "mlp": lambda: model.mlp(0, Wide),
            "attention": lambda: model.attention(0, Wide),
            "norm": lambda: model.norm("final", Wide),
            "embed": lambda: model.embed.mix(Wide),
            "product": lambda: model.linear("layers.0.mlp.up", WideProduct),
            "residual": lambda: model.residual("layers.0.mid", "sublayer", Wide),
        }
        put.get(self.place, lambda: None)()


@both_backends
@pytest.mark.parametrize("place", sorted(PLACES))
def test_a_node_of_another_dtype_is_its_plugin_s_fault(lab: Any, place: str, backend: str) -> None:
    plan = lab.plan(plugins={"it": Widens(place=place)}, train_dtype="bfloat16")
    with pytest.raises(PluginCodeError) as raised:
        trained(lab, plan, backend, steps=1)
    name, where = PLACES[place]
    assert raised.value.what.startswith(f"plugin 'it' returned float32 from {name}.forward")
    assert raised.value.where == where
    assert raised.value.fix == "return bfloat16: cast with ops.astype(..., 'bfloat16')"


class WideStream(Module):
    """A stream in float32."""

    def forward(self, x0: Any) -> Any:
        return self.ops.astype(x0, "float32")


class Streams(Plugin, api=1):
    """Adds a float32 stream to the residual stream."""

    def build_model(self, model: Any) -> None:
        model.stream("early", WideStream)
        model.residual("layers.1.mid", "early", 0.5)


@both_backends
def test_a_source_of_another_dtype_is_its_plugin_s_fault(lab: Any, backend: str) -> None:
    plan = lab.plan(plugins={"it": Streams()}, train_dtype="bfloat16")
    with pytest.raises(PluginCodeError) as raised:
        trained(lab, plan, backend, steps=1)
    said = r"plugin 'it' adds 'early' of float32 (\(.*\)) to x of bfloat16 \1 in model.residual"
    assert re.match(said, raised.value.what)
    assert raised.value.where == "layers.1.site_mid"


class Flat(Module):
    """The mean over the last axis, (B, T)."""

    def forward(self, x: Any) -> Any:
        return self.ops.mean(x, -1)


class Cut(Module):
    """Three columns of a product."""

    def forward(self, x: Any, weight: Any) -> Any:
        return self.ops.linear(x, weight)[..., :3]


class Counted(Module):
    """Positions of features, not of tokens."""

    def forward(self, x: Any) -> Any:
        return self.ops.arange(x.shape[2])


class OfNumPy(Module):
    """An array that is NumPy's."""

    def forward(self, x: Any) -> Any:
        return np.ones(tuple(x.shape), np.float32)


def numpy_update(ops: Any, update: Any, param: Any, state: Any) -> Any:
    return np.ones(tuple(update.shape), np.float32), state


class Misfits(Plugin, api=1):
    """Gives an array that its slot has no use for."""

    place: str

    def build_attention(self, attn: Any) -> None:
        if attn.layer == 0 and self.place == "positions":
            attn.rope.positions(Counted)

    def build_model(self, model: Any) -> None:
        put = {
            "coefficient": lambda: model.residual("layers.0.mid", "sublayer", Flat),
            "product": lambda: model.linear("layers.0.mlp.up", Cut),
            "numpy": lambda: model.mlp(0, OfNumPy),
        }
        put.get(self.place, lambda: None)()
        if self.place == "stream":
            model.stream("early", Flat, at="layers.0.mlp")
            model.residual("layers.0.out", "early", 0.5)

    def optimizer_factory(self, optimizer: Any) -> None:
        if self.place == "stage":
            optimizer.gradient("*", stage(numpy_update))


@both_backends
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("coefficient", r"returned the coefficient \(\d+, \d+\) from Flat.forward"),
        ("product", r"returned \(\d+, \d+, 3\) from Cut.forward"),
        ("positions", r"returned \(\d+,\) from Counted.forward"),
        (
            "stream",
            r"adds 'early' of float32 \(\d+, \d+\) to x of float32 \(.*\) in model.residual",
        ),
        ("numpy", "returned a NumPy array from OfNumPy.forward"),
        ("stage", "returned an update of ndarray from numpy_update"),
    ],
)
def test_an_array_that_does_not_fit_is_its_plugin_s_fault(
    lab: Any, place: str, said: str, backend: str
) -> None:
    plan = lab.plan(plugins={"it": Misfits(place=place)})
    with pytest.raises(PluginCodeError) as raised:
        trained(lab, plan, backend, steps=1)
    assert re.match(f"plugin 'it' {said}", raised.value.what)


@both_backends
@pytest.mark.parametrize("dtype", NARROW)
def test_masters_keep_what_copies_cannot_hold(lab: Any, dtype: str, backend: str) -> None:
    plan = lab.plan(train_dtype=dtype, train_lr=1e-6, train_schedule="constant", train_warmup=0)
    run, _ = trained(lab, plan, backend, steps=4)
    start = lab.trainer(plan, backend).arrays()["model.norm.weight"]
    moved = run.arrays()["model.norm.weight"] - start
    assert (np.abs(moved) > 1e-7).all()  # a step of 1e-6 from 1.0 would be lost in 16 bits
    assert (np.abs(moved) < 1e-5).all()


@both_backends
def test_an_overflow_skips_the_update_and_halves_the_scale(lab: Any, backend: str) -> None:
    plan = lab.plan("muon", train_dtype="float16")
    run, _ = trained(lab, plan, backend, steps=2)
    before = run.arrays()
    assert before["scaler.scale"] == 2.0**16
    assert before["scaler.skipped"] == 0
    run.resume(before | {"scaler.scale": np.float32(2.0**24)})
    batch = lab.batch(plan, unsupervised=2)
    result = run.read(run.step([batch], plan.values(0.5), lab.supervised([batch])))
    assert not np.isfinite(result.grad_norm)
    assert np.isfinite(result.loss)
    after = run.arrays()
    assert after["scaler.scale"] == 2.0**23
    assert after["scaler.skipped"] == 1
    assert after["scaler.good"] == 0
    for name, value in before.items():
        if not name.startswith("scaler."):
            np.testing.assert_array_equal(after[name], value, err_msg=name)
    while run.arrays()["scaler.scale"] > 2.0**12:  # it finds a scale that fits, and continues
        skipped = run.arrays()["scaler.skipped"]
        lab.losses(run, plan, [[batch]])
        if run.arrays()["scaler.skipped"] == skipped:
            break
    assert run.arrays()["scaler.good"] == 1
    assert (run.arrays()["model.embedding.weight"] != before["model.embedding.weight"]).any()


@both_backends
def test_loss_scaling_cancels(lab: Any, backend: str) -> None:
    plan = lab.plan(train_dtype="float16", train_clip=0.0)
    batch = lab.batch(plan, unsupervised=2)
    norms = []
    for scale in (1.0, 2.0**10):
        run = lab.trainer(plan, backend)
        run.resume(run.arrays() | {"scaler.scale": np.float32(scale)})
        handle = run.step([batch], plan.values(0.5), lab.supervised([batch]))
        norms.append(run.read(handle).grad_norm)
    exact = np.hypot.reduce(
        [np.linalg.norm(grad) for grad in lab.exact_gradients(plan, [batch])[1].values()]
    )
    assert norms == pytest.approx([exact] * 2, rel=2e-2)
    assert abs(norms[1] - exact) < 5e-3 * exact


@both_backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_changes_no_loss(lab: Any, dtype: str, backend: str) -> None:
    found = []
    for checkpointing in (False, True):
        plan = lab.plan(train_dtype=dtype, train_checkpointing=checkpointing)
        found.append(trained(lab, plan, backend, steps=4)[1])
    np.testing.assert_allclose(*found, atol=1e-5)


@both_backends
def test_a_replaced_product_has_exact_gradients(lab: Any, backend: str) -> None:
    plan = lab.plan(plugins={"doubled": Doubled()}, train_clip=0.0)
    micro = [lab.batch(plan)]
    _, exact = lab.exact_gradients(plan, micro)
    run = lab.trainer(plan, backend)
    _, found = lab.gradients(run, plan, micro)
    lab.assert_gradients(found, exact, overall=1e-6)
    assert run.witnesses()["node:layers.0.attention.k.product"] >= 1


class PerToken(Module):
    """A loss term of each token."""

    def forward(self, x: Any) -> Any:
        return self.ops.mean(x, -1)


class EmitsPerToken(Module):
    """An MLP that emits a term of each token."""

    terms = ("size",)

    def forward(self, x: Any) -> Any:
        return x, self.ops.mean(x, -1)


class Terms(Plugin, api=1):
    """Adds a loss term that is not a scalar."""

    emitted: bool

    def build_model(self, model: Any) -> None:
        if self.emitted:
            model.mlp(0, EmitsPerToken)

    def compute_loss(self, loss: Any) -> None:
        if self.emitted:
            loss.term("t", emitted="size")
        else:
            loss.term("t", PerToken)


@both_backends
@pytest.mark.parametrize("emitted", [False, True])
def test_a_term_that_is_no_scalar_is_its_plugin_s_fault(
    lab: Any, emitted: bool, backend: str
) -> None:
    with pytest.raises(PluginCodeError) as raised:
        trained(lab, lab.plan(plugins={"it": Terms(emitted=emitted)}), backend, steps=1)
    assert raised.value.what.startswith("plugin 'it' returned (2, 16) as loss.term[t]")
    assert raised.value.fix == "return a scalar"
