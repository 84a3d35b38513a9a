"""Tests of the MLP with its activation in QuACK's products: calls, gradients, refusals; on a Hopper GPU QuACK's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import BackendError, Module, PlanError, Plugin, PluginError
from minillm_core.backends.bind import create_trainer
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_cute.cute import QUACK
from minillm_cute.fused_relu2 import FusedReLU2
from minillm_modded.relu2 import ReLU2

torch = pytest.importorskip("torch")

TINY = ("model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.hidden=64")
TINY += ("model.vocab=64", "train.rows=2", "train.seq_len=16", "train.accumulate=1")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def planned(*more: tuple[str, Plugin], settings: tuple[str, ...] = (), **options: Any) -> Plan:
    given_ = ("train.dtype=bfloat16", *TINY, *settings)
    config = load(preset="tiny", assignments=given_, default_preset=lambda: ("tiny", "test")).config
    named = [("fused_relu2", FusedReLU2(**options)), *more]
    return build_plan(config, [LoadedPlugin.of(name, plugin) for name, plugin in named])


def arrays_of(N: int, C: int, F: int, seed: int) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    shapes = (N, C), (F, C), (C, F)
    return [torch.randn(shape, generator=made).requires_grad_() for shape in shapes]


def exact(x: Any, up: Any, down: Any) -> Any:
    return (x @ up.T).relu().square() @ down.T


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(True, True, True), (True, False, False), (False, True, True)]),
)
def test_it_is_the_squared_relu_between_two_products(
    kernels: Any, N: int, C: int, F: int, seed: int, learnt: tuple[bool, ...]
) -> None:
    arrays = arrays_of(N, 8 * C, 8 * F, seed)
    free = [one.requires_grad_(wanted) for one, wanted in zip(arrays, learnt, strict=True)]
    free = [one for one in free if one.requires_grad]
    wide = [one.detach().double().requires_grad_(one.requires_grad) for one in arrays]
    y, theirs = kernels("mlp").relu2_mlp(*arrays), exact(*wide)
    torch.testing.assert_close(y.double(), theirs, rtol=1e-4, atol=1e-3)
    up = torch.randn_like(theirs)
    wide = [one for one in wide if one.requires_grad]
    for mine, other in zip(
        torch.autograd.grad(y, free, up.float()), torch.autograd.grad(theirs, wide, up), strict=True
    ):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=2e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_compiled_step_takes_it_without_a_break(kernels: Any) -> None:
    arrays = arrays_of(12, 16, 32, 0)
    compiled = torch.compile(kernels("mlp").relu2_mlp, fullgraph=True, backend="aot_eager")
    mine = torch.autograd.grad(compiled(*arrays).sum(), arrays)
    for one, other in zip(mine, torch.autograd.grad(exact(*arrays).sum(), arrays), strict=True):
        torch.testing.assert_close(one, other)


def test_an_older_gpu_is_refused(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels("mlp")
    module._quack.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(BackendError, match=r"capability 9\.0, not 8\.9") as refused:
        module.relu2_mlp(*arrays_of(3, 8, 8, 0))
    assert "relu2 in its place" in str(refused.value.fix)


def test_without_quack_it_is_refused_before_the_first_step() -> None:
    assert FusedReLU2.manifest.requires == (QUACK,)
    named = [LoadedPlugin.of("fused_relu2", FusedReLU2())]
    with pytest.raises(PluginError, match=r"needs quack-kernels==0\.6\.5: it is not installed"):
        check_support(named, "torch", "cuda:0")


def batch_of(plan: Plan) -> dict[str, Any]:
    train = plan.config.train
    shape = (train.rows, train.seq_len + 1)
    ids = np.random.default_rng(0).integers(0, plan.config.model.vocab, shape, np.int32)
    places = np.tile(np.arange(train.seq_len, dtype=np.int32), (train.rows, 1))
    fields = {"documents": np.zeros_like(places), "positions": places}
    return {"ids": ids[:, :-1].copy(), "labels": ids[:, 1:].copy(), **fields}


def test_it_has_the_parameters_of_relu2_and_computes_as_it_does_elsewhere(kernels: Any) -> None:
    """A CPU has no such products: a checkpoint is read there with the plain ones."""
    plan = planned()
    plain = build_plan(plan.config, [LoadedPlugin.of("relu2", ReLU2())])
    assert {n: i.shape for n, i in plan.parameters.items()} == {
        n: i.shape for n, i in plain.parameters.items()
    }
    losses = [create_trainer(one, "torch").evaluate([batch_of(one)]) for one in (plan, plain)]
    assert losses[0] == losses[1]


def test_what_it_cannot_multiply_is_refused(kernels: Any) -> None:
    with pytest.raises(PlanError, match="multiples of 8, and one side is 44") as refused:
        planned(hidden=44)
    assert "fused_relu2.hidden=48" in str(refused.value.fix)
    with pytest.raises(PlanError, match="one side is 20") as refused:
        planned(settings=("model.dim=20",))
    assert "model.dim=24" in str(refused.value.fix)
    plan = planned(settings=("train.dtype=float32",))
    run, batch = create_trainer(plan, "torch"), batch_of(plan)
    with pytest.raises(BackendError, match="multiplies bfloat16, not float32"):
        run.read(run.step([batch], plan.values(0.1), 32))
    total, count = run.evaluate([batch])  # evaluation is not training
    assert total / count == pytest.approx(np.log(64), rel=0.2)


class Twice(Module):
    """A custom matrix product."""

    def forward(self, x: Any, weight: Any) -> Any:
        return 2.0 * self.ops.linear(x, weight)


class Claims(Plugin, api=1):
    """Claims the product of a linear module."""

    def build_model(self, model: Any) -> None:
        model.linear("layers.0.mlp.up", Twice)


def test_a_claim_on_its_products_is_not_passed_over(kernels: Any) -> None:
    plan = planned(("claims", Claims()))
    with pytest.raises(PlanError, match="'claims' claims it"):
        create_trainer(plan, "torch").evaluate([batch_of(plan)])


def test_it_takes_the_place_of_relu2() -> None:
    with pytest.raises(PlanError, match=r"model\.mlp\[0\] is claimed by both") as refused:
        planned(("relu2", ReLU2()))
    assert "--plugins -relu2" in str(refused.value.fix)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("N", "C", "F"), [(4096, 768, 3072), (300, 128, 392)])
def test_quack_computes_it(N: int, C: int, F: int, compiled: bool) -> None:
    """Compare with float64, by bfloat16's rounding; two calls give the same bits."""
    pytest.importorskip("quack.gemm_interface")
    from minillm_cute.kernels.mlp import relu2_mlp

    made = torch.compile(relu2_mlp, fullgraph=True) if compiled else relu2_mlp
    scales = 1.0, C**-0.5, F**-0.5
    arrays = [
        (one.detach() * by).bfloat16().cuda().requires_grad_()
        for one, by in zip(arrays_of(N, C, F, 0), scales, strict=True)
    ]
    wide = [one.detach().double().requires_grad_() for one in arrays]
    theirs = exact(*wide)
    by = torch.randn_like(theirs)

    def results() -> list[Any]:
        y = made(*arrays)
        return [y, *torch.autograd.grad(y, arrays, by.bfloat16())]

    found = results()
    for mine, other in zip(found, [theirs, *torch.autograd.grad(theirs, wide, by)], strict=True):
        assert (mine.double() - other).norm() <= 1e-2 * other.norm()
    assert all(torch.equal(one, two) for one, two in zip(found, results(), strict=True))
