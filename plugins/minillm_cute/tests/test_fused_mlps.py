"""Tests of the MLPs with their activation in QuACK's products: calls, gradients, refusals; on a Hopper GPU QuACK's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import BackendError, Module, PlanError, Plugin, PluginError, install
from minillm_core.backends.bind import create_trainer
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_cute.cute import QUACK
from minillm_cute.fused_relu2 import FusedReLU2
from minillm_cute.fused_swiglu import FusedSwiGLU
from minillm_modded.relu2 import ReLU2

torch = pytest.importorskip("torch")

TINY = ("model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.hidden=64")
TINY += ("model.vocab=64", "train.rows=2", "train.seq_len=16", "train.accumulate=1")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


FUSED = {"fused_relu2": FusedReLU2, "fused_swiglu": FusedSwiGLU}
PLAIN = {"fused_relu2": [LoadedPlugin.of("relu2", ReLU2())], "fused_swiglu": []}
both = pytest.mark.parametrize("name", FUSED)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver show no GPU: on one that the MLP does not support its plugin is refused on a CPU too."""
    monkeypatch.setattr(install, "gpu_capabilities", tuple)


def planned(
    name: str, *more: tuple[str, Plugin], settings: tuple[str, ...] = (), **options: Any
) -> Plan:
    given_ = ("train.dtype=bfloat16", *TINY, *settings)
    config = load(preset="tiny", assignments=given_, default_preset=lambda: ("tiny", "test")).config
    named = [(name, FUSED[name](**options)), *more]
    return build_plan(config, [LoadedPlugin.of(name, plugin) for name, plugin in named])


def function(kernels: Any, name: str) -> Any:
    return getattr(kernels("mlp"), f"{name.removeprefix('fused_')}_mlp")


def arrays_of(name: str, N: int, C: int, F: int, seed: int) -> list[Any]:
    """Return x, the matrices in front of the activation, and the one behind it."""
    made = torch.Generator().manual_seed(seed)
    before = [(F, C)] * (2 if name == "fused_swiglu" else 1)
    shapes = (N, C), *before, (C, F)
    return [torch.randn(shape, generator=made).requires_grad_() for shape in shapes]


def exact(name: str, x: Any, *matrices: Any) -> Any:
    *before, up = (x @ one.T for one in matrices[:-1])
    down = matrices[-1]
    if name == "fused_relu2":
        return up.relu().square() @ down.T
    (gate,) = before
    return (gate / (1 + (-gate).exp()) * up) @ down.T


@both
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["all", "x", "matrices"]),
)
def test_it_is_the_activation_between_products(
    kernels: Any, name: str, N: int, C: int, F: int, seed: int, learnt: str
) -> None:
    arrays = arrays_of(name, N, 8 * C, 8 * F, seed)
    for at, one in enumerate(arrays):
        one.requires_grad_(learnt == "all" or (learnt == "x") == (at == 0))
    free = [one for one in arrays if one.requires_grad]
    wide = [one.detach().double().requires_grad_(one.requires_grad) for one in arrays]
    y, theirs = function(kernels, name)(*arrays), exact(name, *wide)
    torch.testing.assert_close(y.double(), theirs, rtol=1e-4, atol=1e-3)
    up = torch.randn_like(theirs)
    wide = [one for one in wide if one.requires_grad]
    for mine, other in zip(
        torch.autograd.grad(y, free, up.float()), torch.autograd.grad(theirs, wide, up), strict=True
    ):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=4e-3)


@pytest.mark.slow
@both
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_compiled_step_takes_it_without_a_break(kernels: Any, name: str) -> None:
    arrays = [one.detach().double().requires_grad_() for one in arrays_of(name, 12, 16, 32, 0)]
    compiled = torch.compile(function(kernels, name), fullgraph=True, backend="aot_eager")
    mine = torch.autograd.grad(compiled(*arrays).sum(), arrays)
    theirs = torch.autograd.grad(exact(name, *arrays).sum(), arrays)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@both
def test_an_older_gpu_is_refused(kernels: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kernels("mlp")._quack.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(BackendError, match=r"capability 9\.0, not 8\.9") as refused:
        function(kernels, name)(*arrays_of(name, 3, 8, 8, 0))
    assert "in place of fused_relu2" in str(refused.value.fix)
    assert name in str(refused.value.where)


def test_evaluation_needs_no_quack(kernels: Any) -> None:
    on_gpu: Any = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True)
    served = kernels("mlp").served
    assert served(on_gpu, "fused_relu2", "relu2")
    with torch.no_grad():
        assert not served(on_gpu, "fused_relu2", "relu2")


@both
def test_without_quack_it_is_refused_before_the_first_step(name: str) -> None:
    assert FUSED[name].manifest.requires == (QUACK,)
    named = [LoadedPlugin.of(name, FUSED[name]())]
    with pytest.raises(PluginError, match=r"needs quack-kernels==0\.6\.5: it is not installed"):
        check_support(named, "torch", "cuda:0")


def batch_of(plan: Plan) -> dict[str, Any]:
    train = plan.config.train
    shape = (train.rows, train.seq_len + 1)
    ids = np.random.default_rng(0).integers(0, plan.config.model.vocab, shape, np.int32)
    places = np.tile(np.arange(train.seq_len, dtype=np.int32), (train.rows, 1))
    fields = {"documents": np.zeros_like(places), "positions": places}
    return {"ids": ids[:, :-1].copy(), "labels": ids[:, 1:].copy(), **fields}


@both
def test_it_has_the_parameters_of_the_plain_one_and_computes_as_it_does_elsewhere(
    kernels: Any, name: str
) -> None:
    """A CPU has no such products: a checkpoint is read there with the plain ones."""
    plan = planned(name)
    plain = build_plan(plan.config, PLAIN[name])
    assert {n: i.shape for n, i in plan.parameters.items()} == {
        n: i.shape for n, i in plain.parameters.items()
    }
    losses = [create_trainer(one, "torch").evaluate([batch_of(one)]) for one in (plan, plain)]
    assert losses[0] == losses[1]
    assert plan.export.layout == plain.export.layout


@both
def test_what_it_cannot_multiply_is_refused(kernels: Any, name: str) -> None:
    with pytest.raises(PlanError, match="one side is 20") as refused:
        planned(name, settings=("model.dim=20",))
    assert "model.dim=24" in str(refused.value.fix)
    plan = planned(name, settings=("train.dtype=float32",))
    run, batch = create_trainer(plan, "torch"), batch_of(plan)
    with pytest.raises(BackendError, match="multiplies bfloat16, not float32"):
        run.read(run.step([batch], plan.values(0.1), 32))
    total, count = run.evaluate([batch])  # evaluation is not training
    assert total / count == pytest.approx(np.log(64), rel=0.2)


def test_a_hidden_width_it_cannot_multiply_is_refused() -> None:
    with pytest.raises(PlanError, match="multiples of 8, but one side is 44") as refused:
        planned("fused_relu2", hidden=44)
    assert "fused_relu2.hidden=48" in str(refused.value.fix)
    with pytest.raises(PlanError, match="multiples of 8, but one side is 44") as refused:
        planned("fused_swiglu", settings=("model.hidden=44",))
    assert "model.hidden=48" in str(refused.value.fix)


class Twice(Module):
    """A custom matrix product."""

    def forward(self, x: Any, weight: Any) -> Any:
        return 2.0 * self.ops.linear(x, weight)


class Claims(Plugin, api=1):
    """Claims the product of a linear module."""

    def build_model(self, model: Any) -> None:
        model.linear("layers.0.mlp.up", Twice)


@both
def test_a_claim_on_its_products_is_not_passed_over(kernels: Any, name: str) -> None:
    plan = planned(name, ("claims", Claims()))
    with pytest.raises(PlanError, match="so 'claims' cannot replace it"):
        create_trainer(plan, "torch").evaluate([batch_of(plan)])


@both
def test_two_mlps_of_a_layer_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"model\.mlp\[0\] is claimed by both") as refused:
        planned(name, ("relu2", ReLU2()))
    assert "--plugins -relu2" in str(refused.value.fix)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")
@pytest.mark.filterwarnings("default")
@both
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("N", "C", "F"), [(4096, 768, 3072), (300, 128, 392)])
def test_quack_computes_it(name: str, N: int, C: int, F: int, compiled: bool) -> None:
    """Compare with float64, by bfloat16's rounding; two calls give the same bits."""
    pytest.importorskip("quack.gemm_interface")
    from minillm_cute.kernels import mlp

    plain = getattr(mlp, f"{name.removeprefix('fused_')}_mlp")
    made = torch.compile(plain, fullgraph=True) if compiled else plain
    given_ = arrays_of(name, N, C, F, 0)
    scales = 1.0, *[C**-0.5] * (len(given_) - 2), F**-0.5
    arrays = [
        (one.detach() * by).bfloat16().cuda().requires_grad_()
        for one, by in zip(given_, scales, strict=True)
    ]
    wide = [one.detach().double().requires_grad_() for one in arrays]
    theirs = exact(name, *wide)
    by = torch.randn_like(theirs)

    def results() -> list[Any]:
        y = made(*arrays)
        return [y, *torch.autograd.grad(y, arrays, by.bfloat16())]

    found = results()
    for mine, other in zip(found, [theirs, *torch.autograd.grad(theirs, wide, by)], strict=True):
        assert (mine.double() - other).norm() <= 1e-2 * other.norm()
    assert all(torch.equal(one, two) for one, two in zip(found, results(), strict=True))
