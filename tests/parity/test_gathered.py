"""Tests that the head at supervised positions only gives the loss and gradients of the head at all positions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from minillm_core import Module, PlanError, Plugin, TanhCap, option
from minillm_core.nn.block import GATHERED
from minillm_core.plugins.builders.loss import LEFT_OUT
from minillm_kit import materialise

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = pytest.mark.parametrize("backend", ["torch", "mlx"])
BUCKETS = 8  # of 32 positions: sizes 4, 8, 12, ...


class Gathers(Plugin, api=1):
    """Gathers."""

    def compute_loss(self, loss: Any) -> None:
        loss.gather(buckets=BUCKETS)


class Hard(Module):
    """Weights that differ by position: losses, x -> weights."""

    def forward(self, losses: Any, x: Any) -> Any:
        return 0.5 + self.ops.sigmoid(losses) + 0.1 * self.ops.tanh(self.ops.mean(x, -1))


class Mean(Module):
    """A term of every position: x (B, T, C) -> its mean square."""

    def forward(self, x: Any) -> Any:
        return self.ops.mean(self.ops.square(x))


class Demanding(Plugin, api=1):
    """All inputs of the loss except rows."""

    weighs: bool = option(False, help="by a node")
    staged: bool = option(False, help="the further targets leave halfway")

    def build_data(self, data: Any) -> None:
        data.field("other", "int32")
        data.field("share", "float32")

    def on_batch(self, batch: Any) -> Any:
        return batch

    def compute_loss(self, loss: Any) -> None:
        until = 0.5 if self.staged else None
        loss.logits(cap=TanhCap(5.0), scale=0.8, smoothing=0.1, z=1e-3)
        loss.target(0.5, offset=2, until=until)
        loss.target(0.25, offset=5)
        loss.target(0.3, field="other", weight_field="share", until=until)
        loss.term("size", Mean, weight=0.1)
        if self.weighs:
            loss.weights(Hard)


class Rows(Plugin, api=1):
    """Chooses rows."""

    def compute_loss(self, loss: Any) -> None:
        loss.rows(ByRow, keep=0.5)


class ByRow(Module):
    """losses (B, T) -> (B,)."""

    def forward(self, losses: Any) -> Any:
        return self.ops.sum(losses, 1)


def batch_of(lab: Any, plan: Any, share: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw a batch with this fraction of supervised positions, and the fields of Demanding."""
    batch, rng = lab.batch(plan, seed), np.random.default_rng(seed)
    shape, vocab = batch["ids"].shape, plan.config.model.vocab
    batch["labels"] = np.where(rng.random(shape) < share, batch["labels"], -1).astype(np.int32)
    batch["other"] = np.where(rng.random(shape) < share / 4, rng.integers(0, vocab, shape), -1)
    batch["other"] = batch["other"].astype(np.int32)
    batch["share"] = rng.random(shape).astype(np.float32)
    return batch


def both(lab: Any, *names: str, plugins: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Return the plan, and the same with the head at supervised positions only."""
    more = plugins or {}
    dense = lab.plan(*names, plugins=more, **settings)
    return dense, lab.plan(*names, plugins={**more, "gathers": Gathers()}, **settings)


CASES = {
    "plain": ({}, {}),
    "tied": ({"model_tied": True}, {}),
    "recomputed": ({"train_checkpointing": True}, {}),
    "demanding": ({}, {"demanding": Demanding()}),
    "weighed": ({}, {"demanding": Demanding(weighs=True)}),
    "staged": ({}, {"demanding": Demanding(staged=True)}),
}


@pytest.mark.broad(10)
@BACKENDS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_loss_and_gradients_are_those_of_every_position(
    lab: Any, backend: str, case: str, share: float
) -> None:
    settings, plugins = CASES[case]
    dense, sparse = both(lab, plugins=plugins, train_clip=0.0, **settings)
    check_gradients(lab, dense, sparse, share, lambda plan: lab.trainer(plan, backend))


@pytest.mark.slow
@BACKENDS
def test_a_compiled_step_has_those_gradients(lab: Any, backend: str, aot_trainer: Any) -> None:
    plugins = {"demanding": Demanding(weighs=True, staged=True)}
    settings = {"train_clip": 0.0, "train_compile": "on", "model_layers": 1}
    dense, sparse = both(lab, plugins=plugins, **settings)
    check_gradients(lab, dense, sparse, 0.25, lambda plan: aot_trainer(plan, backend))


def check_gradients(lab: Any, dense: Any, sparse: Any, share: float, make: Any) -> None:
    """Compare both with each other and with float64, on a step of two micro-batches."""
    # the first one always gathers, also for further targets
    micro = [batch_of(lab, dense, 0.15, 1), batch_of(lab, dense, share)]
    made = [make(plan) for plan in (dense, sparse)]
    pairs = zip(made, (dense, sparse), strict=True)
    (loss, expected), (found, got) = (lab.gradients(run, plan, micro) for run, plan in pairs)
    assert found == pytest.approx(loss, rel=1e-6)
    lab.assert_gradients(got, expected, overall=1e-6)
    _, exact = lab.exact_gradients(dense, micro)
    lab.assert_gradients(got, exact, overall=1e-6)
    assert 0 < made[1].witnesses()[LEFT_OUT] <= sum((one["labels"] < 0).sum() for one in micro)
    assert LEFT_OUT not in made[0].witnesses()


@BACKENDS
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_updates_are_those_of_every_position(
    lab: Any, backend: str, clip: float, compiled: str, aot_trainer: Any
) -> None:
    """Also with clip 0, gathered positions and compilation together."""
    plans = both(lab, train_clip=clip, train_compile=compiled, model_layers=1)
    micro = [[batch_of(lab, plans[0], share, seed)] for seed, share in enumerate((0.2, 0.5, 0.2))]
    made = [aot_trainer(plan, backend) for plan in plans]
    losses = [lab.losses(run, plan, micro) for run, plan in zip(made, plans, strict=True)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    dense, sparse = (run.arrays() for run in made)
    for name in plans[0].parameters:
        close = np.abs(dense[f"model.{name}"] - sparse[f"model.{name}"]).max()
        assert close < 1e-5, name  # a hundredth of a step: Adam divides by small numbers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_taken_and_their_gradient_is_written(
    side: Any, dtype: str, compiled: bool
) -> None:
    from minillm_core.backends.mlx.ops import MLXOps
    from minillm_core.backends.torch.ops import TorchOps

    rng = np.random.default_rng(0)
    x = side.rounded(rng.standard_normal((12, 3)), dtype)
    given = {"x": x, "indices": np.array([1, 2, 5, 11], np.int32)}
    found = [side.mlx(MLXOps().take_rows, given, ["x"], dtype=dtype, compiled=compiled)]
    if not compiled:
        found.append(side.torch(TorchOps().take_rows, given, ["x"], dtype=dtype))
    for ran in found:
        np.testing.assert_array_equal(ran.outputs[0], x[given["indices"]])
        assert np.flatnonzero(ran.grads["x"].any(1)).tolist() == given["indices"].tolist()
    assert all(np.array_equal(ran.grads["x"], found[0].grads["x"]) for ran in found)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # inductor recommends TF32
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_cuda_computes_the_same_bits_each_time(lab: Any) -> None:
    """Compiled, in bfloat16, without clipping: close to the dense result, and bitwise repeatable."""
    from minillm_core.backends.bind import create_backend
    from minillm_core.backends.detect import Detected

    settings = {"train_clip": 0.0, "train_dtype": "bfloat16", "train_compile": "on"}
    dense, sparse = both(lab, model_dim=64, model_hidden=128, train_seq_len=64, **settings)
    micro = [batch_of(lab, dense, 0.5, 1), batch_of(lab, dense, 0.2)]

    def ran(plan: Any) -> Any:
        run = create_backend(Detected("torch", "cuda", "test"), plan).trainer(plan, 0)
        return lab.gradients(run, plan, micro)

    (loss, expected), (found, got), (_, again) = ran(dense), ran(sparse), ran(sparse)
    assert found == pytest.approx(loss, rel=1e-3)
    for name, one in expected.items():
        assert np.linalg.norm(got[name] - one) <= 3e-2 * np.linalg.norm(one), name
        np.testing.assert_array_equal(got[name], again[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductor_computes_the_same_without_clipping(lab: Any, dtype: str) -> None:
    """With generated code: clip 0, gathered positions and compilation together."""
    torch.compiler.reset()
    settings = {"train_clip": 0.0, "train_dtype": dtype, "model_layers": 1}
    dense, sparse = both(lab, **settings)
    _, compiled = both(lab, train_compile="on", **settings)
    micro = [batch_of(lab, dense, 0.5, 1), batch_of(lab, dense, 0.2)]
    found = [lab.gradients(lab.trainer(one), one, micro) for one in (compiled, dense, sparse)]
    close = 1e-6 if dtype == "float32" else 2e-2
    for loss, gradients in found[1:]:
        assert found[0][0] == pytest.approx(loss, rel=close)
        for name, expected in gradients.items():
            error = np.linalg.norm(found[0][1][name] - expected)
            assert error <= 10 * close * np.linalg.norm(expected), name
    again = lab.gradients(lab.trainer(compiled), compiled, micro)
    assert all(np.array_equal(again[1][name], one) for name, one in found[0][1].items())


@BACKENDS
@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_a_resumed_trainer_computes_the_same_bits(
    lab: Any, backend: str, compiled: str, aot_trainer: Any
) -> None:
    _, plan = both(lab, train_compile=compiled, train_dtype="bfloat16", model_layers=1)
    steps = [[batch_of(lab, plan, 0.1 + 0.2 * seed, seed)] for seed in range(4)]
    whole, first, second = (aot_trainer(plan, backend) for _ in range(3))
    lab.losses(whole, plan, steps)
    lab.losses(first, plan, steps[:2])
    second.resume(first.arrays())
    for index, micro in enumerate(steps[2:], 3):
        second.read(second.step(micro, plan.values(index / 20), lab.supervised(micro)))
    ended, resumed = whole.arrays(), second.arrays()
    assert all(np.array_equal(ended[name], resumed[name]) for name in ended)


@pytest.mark.slow
def test_each_size_is_compiled_once_and_shown(lab: Any, aot_trainer: Any) -> None:
    _, plan = both(lab, train_compile="on", model_layers=1)
    run, shown, met = aot_trainer(plan), [], []

    def phase(what: str) -> Any:
        shown.append(what)
        return nullcontext()

    run.phase = phase
    for seed, share in enumerate((0.2, 0.5, 0.2, 1.0, 1.0)):
        met.append(batch_of(lab, plan, share, seed))
        run.step([met[-1]], plan.values(0.5), lab.supervised([met[-1]]))
    sizes = [-(-max(1, lab.supervised([one])) // 4) * 4 for one in met]
    assert shown == [f"compiling for {size} supervised positions" for size in dict.fromkeys(sizes)]
    assert run.compile_seconds > 0
    assert len(run.graphs) == len(set(sizes)) < len(sizes)


def test_the_oracle_gathers(lab: Any) -> None:
    dense, sparse = both(lab)
    batch = batch_of(lab, dense, 0.3)
    positions = np.flatnonzero(batch["labels"].reshape(-1) >= 0).astype(np.int32)
    values = lab.values_of(dense, [batch])
    whole = materialise(dense, 0)(batch, values)
    gathered = materialise(sparse, 0)({**batch, GATHERED: positions}, values)
    assert gathered.objective == pytest.approx(whole.objective, rel=1e-12)
    assert gathered.count == whole.count == len(positions)


def test_rows_chosen_on_the_device_are_refused(lab: Any) -> None:
    with pytest.raises(PlanError) as refused:
        lab.plan(plugins={"gathers": Gathers(), "keeps": Rows()})
    assert "'gathers' gathers supervised positions" in str(refused.value)
    assert "'keeps' chooses rows" in str(refused.value)
    assert "leave out 'gathers' or 'keeps'" in (refused.value.fix or "")


def test_two_that_gather_are_refused(lab: Any) -> None:
    class Another(Gathers, api=1):
        """Gathers as well."""

    with pytest.raises(PlanError, match=r"slot loss.gather is claimed by both 'a' and 'b'"):
        lab.plan(plugins={"a": Gathers(), "b": Another()})


def test_one_size_is_refused(lab: Any) -> None:
    class Whole(Plugin, api=1):
        """Gathers everything."""

        def compute_loss(self, loss: Any) -> None:
            loss.gather(buckets=1)

    with pytest.raises(PlanError, match="buckets=1 would compute every position"):
        lab.plan(plugins={"whole": Whole()})


def test_a_plan_says_so_only_where_it_is_claimed(lab: Any) -> None:
    dense, sparse = both(lab)
    assert "gather" not in dense.data()["model"]["spec"]["loss"]
    assert sparse.data()["model"]["spec"]["loss"]["gather"] == {"owner": "gathers", "buckets": 8}
    assert dense.hash != sparse.hash
    assert GATHERED not in dense.fields
    assert GATHERED in sparse.fields
    (placed,) = sparse.placements
    assert (placed.slot, placed.what) == ("loss.gather", "supervised positions, in 8 sizes")
    assert not placed.settled
    assert not placed.shapes
    assert sparse.export.layout == "llama"
