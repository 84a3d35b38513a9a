"""Tests that blocks are pure: checkpointing changes no gradient, statistics carry none, State is written.

A plugin with everything that could leak: a stream and a tap that later blocks read, a loss term
and statistics emitted inside blocks, State, and a parameter that only a statistic depends on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Learned, Linear, Module, Normal, Param, Plugin, State, zeros
from minillm_kit import materialise

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = ["torch", "mlx"]
RATE = 0.1
KINDS = ("mean", "sum", "max")


class Side(Module):
    """A stream: a second embedding of the ids, (B, T, C)."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.table = Param((geometry.vocab, geometry.dim), init=Normal(0.02), role="embedding.side")

    def forward(self, ids: Any) -> Any:
        return self.ops.embedding(ids, self.table)


class Router(Module):
    """A gate of heads by the stream; emits a balance term, and the openness of each head."""

    terms = ("balance",)
    statistics = {kind: kind for kind in KINDS}  # noqa: RUF012

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.gate = Linear(geometry.dim, geometry.heads, role="gate", init=Normal(0.5))
        self.probe = Param((1,), init=Normal(1.0), role="scalar")
        self.bias = State((geometry.heads,), zeros)
        self.total = State((geometry.heads,), zeros)
        self.most = State((geometry.heads,), zeros)

    def forward(self, y: Any, x: Any, side: Any) -> tuple[Any, ...]:
        open_ = self.ops.sigmoid(self.gate(x + side) + self.bias)  # (B, T, H)
        load = self.ops.mean(open_, (0, 1))  # (H,)
        balance = self.ops.sum(self.ops.square(load))
        seen = load * self.probe
        return y * self.ops.expand_dims(open_, -1), balance, seen, seen, seen

    def next_state(self, **statistics: Any) -> dict[str, Any]:
        return {
            "bias": self.bias - RATE * statistics["mean"],
            "total": statistics["sum"],
            "most": statistics["max"],
        }


class Lane(Module):
    """A lane beside the stream, updated at a site from the values added there."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.scale = Param((geometry.dim,), init=Normal(1.0), role="scalar")
        self.mix = Param((geometry.dim, geometry.dim), init=Normal(0.2), role="gate")

    def forward(self, x: Any, sublayer: Any, side: Any) -> Any:
        opened = self.ops.tanh(x[..., :1, None])  # (B, T, 1, 1)
        # a sum over (B, T) of a transposed array: the gradient is a transposed view on torch
        mixed = (opened + self.ops.matrix_transpose(self.mix)) @ (x + sublayer)[..., None]
        return side + self.scale * self.ops.tanh(mixed[..., 0])


class Opening(Module):
    """A coefficient (B, T, 1) of a lane."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.gate = Linear(geometry.dim, 1, role="gate", init=Normal(0.5))

    def forward(self, carry: Any, lane: Any) -> Any:
        return self.ops.tanh(self.gate(carry + lane))


class Lent(Module):
    """A product with a fraction of a lane."""

    def forward(self, x: Any, weight: Any, lane: Any) -> Any:
        return self.ops.linear(x + 0.5 * lane, weight)


class Everything(Plugin, api=1):
    """Uses all that a block may read and emit."""

    term: float = 0.5

    def build_attention(self, attn: Any) -> None:
        attn.out.gate(Router)

    def build_model(self, model: Any) -> None:
        model.stream("side", Side)
        early = model.tap("layers.0.mid")
        same = model.tap("layers.0.out")  # the block's existing return value
        model.residual("layers.1.in", early, Learned(0.25))
        model.residual("final", same, Learned(-0.5))
        model.residual("layers.1.out", "side", 0.5)
        model.residual("final", "x0", Learned(0.125))
        model.stream("lane", Lane, at="layers.0.mid")
        model.stream("next_lane", Lane, at="layers.1.out", reads={"side": "lane"})
        model.residual("final", "next_lane", 0.5)
        model.input("layers.2.attention.v", "lane", Opening, reads={"lane": "next_lane"})
        model.linear("layers.2.mlp.up", Lent)

    def compute_loss(self, loss: Any) -> None:
        loss.term("balance", emitted="balance", weight=self.term)


def plan_of(lab: Any, *, checkpointing: bool = False, term: float = 0.5, **settings: Any) -> Any:
    plugins = {"everything": Everything(term=term)}
    given = {"train_clip": 0.0, "model_layers": 3, "train_rows": 4, **settings}
    return lab.plan(plugins=plugins, train_checkpointing=checkpointing, **given)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [1, 2])
def test_checkpointing_changes_no_gradient(lab: Any, backend: str, parts: int) -> None:
    plans = [plan_of(lab, checkpointing=on) for on in (False, True)]
    micro = lab.split(lab.batch(plans[0], unsupervised=3), parts)
    _, exact = lab.exact_gradients(plans[0], micro)
    runs = [lab.trainer(plan, backend) for plan in plans]
    plain, again = (lab.gradients(r, p, micro) for r, p in zip(runs, plans, strict=True))
    assert again[0] == plain[0]
    lab.assert_gradients(again[1], plain[1], overall=1e-6)
    lab.assert_gradients(plain[1], exact, overall=1e-6)
    states = [{k: v for k, v in r.arrays().items() if k.startswith("state.")} for r in runs]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        np.testing.assert_array_equal(states[1][name], value, err_msg=name)


@pytest.mark.slow  # MLX compiles its kernels with a C++ compiler
def test_checkpointing_is_pure_when_compiled(lab: Any) -> None:
    plan = plan_of(lab, checkpointing=True, train_compile="on")
    micro = [lab.batch(plan, unsupervised=3)]
    _, exact = lab.exact_gradients(plan, micro)
    _, found = lab.gradients(lab.trainer(plan, "mlx"), plan, micro)
    lab.assert_gradients(found, exact, overall=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_everything_reaches_its_parameters(lab: Any, backend: str, checkpointing: bool) -> None:
    plan = plan_of(lab, checkpointing=checkpointing)
    micro = [lab.batch(plan)]
    _, found = lab.gradients(lab.trainer(plan, backend), plan, micro)
    without = plan_of(lab, checkpointing=checkpointing, term=0.0)
    _, unbalanced = lab.gradients(lab.trainer(without, backend), without, micro)
    for name, grad in found.items():
        if name.endswith("probe"):  # only a statistic depends on it
            assert not grad.any(), name
        else:
            assert np.linalg.norm(grad) > 1e-6, name
    gate = "layers.0.attention.out.everything.gate.weight"
    assert np.linalg.norm(found[gate] - unbalanced[gate]) > 1e-3 * np.linalg.norm(found[gate])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_state_is_written_once_a_step(lab: Any, backend: str, checkpointing: bool) -> None:
    plan = plan_of(lab, checkpointing=checkpointing, train_lr=0.0)
    whole = lab.batch(plan, unsupervised=3)
    node = "layers.2.attention.out.everything"
    each = []
    for one in lab.split(whole, 2):
        run = lab.trainer(plan, backend)
        lab.losses(run, plan, [[one]])
        each.append(run.arrays())
    run = lab.trainer(plan, backend)
    lab.losses(run, plan, [lab.split(whole, 2)])
    state = {k: v for k, v in run.arrays().items() if k.startswith(f"state.{node}")}
    assert set(state) == {f"state.{node}.{name}" for name in ("bias", "total", "most")}
    sums = [one[f"state.{node}.total"] for one in each]
    assert np.abs(sums[0] - sums[1]).max() > 1e-4  # the halves differ
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
    np.testing.assert_allclose(state[f"state.{node}.total"], sums[0] + sums[1], **close)
    np.testing.assert_allclose(state[f"state.{node}.most"], np.maximum(*sums), **close)
    mean = (sums[0] + sums[1]) / 2
    np.testing.assert_allclose(state[f"state.{node}.bias"], -RATE * mean, **close)
    before = state[f"state.{node}.bias"]
    lab.losses(run, plan, [lab.split(whole, 2)])  # the forward pass reads the written value
    after = run.arrays()[f"state.{node}.bias"]
    assert np.all(np.abs(after - before) > 1e-4)
    assert np.any(np.abs((after - before) - before) > 1e-6)


def test_terms_are_reported_and_do_not_count_as_loss(lab: Any) -> None:
    plan = plan_of(lab, train_lr=0.0)
    whole = lab.batch(plan, unsupervised=3)
    found = []
    for backend in BACKENDS:
        run = lab.trainer(plan, backend)
        result = run.read(run.step([whole], plan.values(1.0), lab.supervised([whole])))
        nats, count = run.evaluate([whole])
        assert set(result.terms) == {"balance"}
        assert 0 < result.terms["balance"] < 3 * 4
        assert result.loss == pytest.approx(nats / count, rel=1e-3)  # State has changed since
        found.append(result)
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)
    assert found[0].terms == pytest.approx(found[1].terms, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_term_counts_by_its_share_of_supervised_tokens(lab: Any, backend: str) -> None:
    plan = plan_of(lab, term=0.5)
    micro = lab.split(lab.batch(plan, unsupervised=5), 2)
    counts = [lab.supervised([one]) for one in micro]
    model, objective, expected = materialise(plan, 0), 0.0, 0.0
    for one, count in zip(micro, counts, strict=True):
        found = model(one, lab.values_of(plan, micro))
        balance, labels = found.terms["balance"]
        assert labels == count
        objective += found.sums[0] / sum(counts) + 0.5 * balance * count / sum(counts)
        expected += balance * count / sum(counts)
    assert counts[0] != counts[1]
    assert lab.exact_gradients(plan, micro)[0] == pytest.approx(float(objective), rel=1e-7)
    run = lab.trainer(plan, backend)
    result = run.read(run.step(micro, plan.values(0.05), sum(counts)))
    assert result.terms["balance"] == pytest.approx(float(expected), rel=1e-6)


def test_both_frameworks_train_it_alike(lab: Any) -> None:
    plan = plan_of(lab, train_clip=1.0)
    steps = [lab.split(lab.batch(plan, seed), 2) for seed in range(6)]
    runs = [lab.trainer(plan, backend) for backend in BACKENDS]
    ours, theirs = (lab.losses(run, plan, steps) for run in runs)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for name, value in runs[0].arrays().items():
        if name.startswith("state."):
            np.testing.assert_allclose(runs[1].arrays()[name], value, atol=1e-5, err_msg=name)
