"""Tests of the MLP in fp8: products against float64 of the rounded operands, saved scales, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minillm_core import BackendError, Module, PlanError, Plugin, install
from minillm_core.backends.bind import create_trainer
from minillm_core.config.load import load
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_triton.fp8_mlp import Fp8MLP

torch = pytest.importorskip("torch")

from minillm_triton.kernels import fp8, mlp  # noqa: E402  (needs torch)

TINY = ("model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.hidden=64")
TINY += ("model.vocab=64", "train.rows=2", "train.seq_len=16", "train.accumulate=2")


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver show no GPU: on one that the MLP does not support its plugin is refused on a CPU too."""
    monkeypatch.setattr(install, "gpu_capabilities", tuple)


def planned(*more: tuple[str, Plugin], settings: tuple[str, ...] = (), **options: Any) -> Plan:
    given_ = ("train.dtype=bfloat16", *TINY, *settings)
    config = load(preset="tiny", assignments=given_, default_preset=lambda: ("tiny", "test")).config
    named = [("fp8_mlp", Fp8MLP(**options)), *more]
    return build_plan(config, [LoadedPlugin.of(name, plugin) for name, plugin in named])


def batches(plan: Plan, seed: int = 0) -> list[dict[str, np.ndarray]]:
    train = plan.config.train
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(train.accumulate):
        ids = rng.integers(0, plan.config.model.vocab, (train.rows, train.seq_len + 1), np.int32)
        places = np.tile(np.arange(train.seq_len, dtype=np.int32), (train.rows, 1))
        fields = {"documents": np.zeros_like(places), "positions": places}
        made.append({"ids": ids[:, :-1].copy(), "labels": ids[:, 1:].copy(), **fields})
    return made


def stepped(run: Any, plan: Plan, seed: int) -> float:
    micro = batches(plan, seed)
    supervised = sum(int((one["labels"] >= 0).sum()) for one in micro)
    return run.read(run.step(micro, plan.values(0.1), supervised)).loss


def rounded(x: Any, by: float, bits: int = 3, lowest: int = -6, most: float = 448.0) -> Any:
    """Round to e4m3 times a power of two, float64: three mantissa bits, maximum 448; or to e5m2."""
    x = np.asarray(x, np.float64) / by
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**lowest)))
    unit = 2.0 ** (exponent - bits)
    return np.clip(np.round(x / unit) * unit, -most, most) * by


def scale(most: float) -> float:
    return 2.0 ** np.ceil(np.log2(most))


def double(x: Any) -> Any:
    return x.detach().double().numpy()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 5),
    outputs=st.integers(1, 5),
    expected=st.sampled_from([0.5, 3.0, 16.0, 1000.0]),
    seed=st.integers(0, 2**32 - 1),
)
@example(rows=17, width=3, outputs=2, expected=0.01, seed=0)  # most values are clipped
def test_a_product_is_that_of_its_rounded_operands(
    rows: int, width: int, outputs: int, expected: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, weight, dy = (
        torch.from_numpy(rng.standard_normal(shape, np.float32)).bfloat16()
        for shape in ((rows, 16 * width), (16 * outputs, 16 * width), (rows, 16 * outputs))
    )
    by = torch.tensor(scale(expected / 64.0))
    small = rounded(double(weight), scale(float(weight.abs().max()) / 448.0))
    for found, a, b in (
        (
            mlp.rounded_product(x, weight, torch.tensor(expected)),
            rounded(double(x), scale(2.0 * expected / 448.0)),
            small.T,
        ),
        (
            mlp.input_gradient(dy, weight, by),
            rounded(double(dy), float(by), bits=2, lowest=-14, most=57344.0),
            small,
        ),
        (
            mlp.weight_gradient(dy, x, by, torch.tensor(expected)),
            rounded(double(dy), float(by), bits=2, lowest=-14, most=57344.0).T,
            rounded(double(x), scale(2.0 * expected / 448.0)),
        ),
    ):
        off = np.abs(double(found) - a @ b)  # to one rounding to bfloat16
        assert (off <= 2.0**-8 * np.abs(a @ b) + 2e-6 * (np.abs(a) @ np.abs(b))).all()
    assert torch.equal(mlp.input_gradient(dy, weight, None), dy @ weight)
    assert torch.equal(mlp.weight_gradient(dy, x, None, torch.tensor(expected)), dy.T @ x)


@pytest.mark.parametrize("narrow", [False, True])
def test_the_mlp_is_made_of_these_products(narrow: bool) -> None:
    """Without fp8 gradients all four are bfloat16's, of operands that are not rounded to 8 bits."""
    torch.manual_seed(0)
    x, dy = torch.randn(3, 20, 32).bfloat16(), 1e-6 * torch.randn(60, 32).bfloat16()
    up, down = (0.3 * torch.randn(shape).bfloat16() for shape in ((48, 32), (32, 48)))
    expected = torch.tensor(4.0), torch.tensor(20.0)
    leaves = [one.requires_grad_() for one in (x, up, down)]
    y, *found = mlp.relu2_mlp(*leaves, *expected, narrow=narrow)
    gradients = torch.autograd.grad(y, leaves, dy.view(3, 20, 32))
    assert not any(one.requires_grad for one in found)
    with torch.no_grad():
        rows = x.view(60, 32)
        before = mlp.rounded_product(rows, up, expected[0])
        h = before.relu().square()
        by = fp8.power_of_two(dy.abs().max() / 64.0) if narrow else None
        dh = mlp.input_gradient(dy, down, by) * (2.0 * before.relu())
        dx = mlp.input_gradient(dh, up, by).view(3, 20, 32)
        assert torch.equal(y.view(60, 32), mlp.rounded_product(h, down, expected[1]))
        assert [one.item() for one in found] == [x.abs().max().item(), h.max().item()]
        of_up = mlp.weight_gradient(dh, rows, by, expected[0])
        of_down = mlp.weight_gradient(dy, h, by, expected[1])
        for mine, theirs in zip(gradients, (dx, of_up, of_down), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    not torch.cuda.is_available(), reason="torch sees no CUDA device"
                ),
                pytest.mark.filterwarnings("default"),
            ],
        ),
    ],
)
@pytest.mark.parametrize(
    ("narrow", "bounds"), [(False, (0.05, 0.05, 0.06)), (True, (0.1, 0.1, 0.08))]
)
@pytest.mark.parametrize("rows", [512, 300])
def test_the_mlp_is_off_by_what_eight_bits_are(
    rows: int, narrow: bool, bounds: tuple[float, float, float], device: str
) -> None:
    """Compare with relu(x Wup^T)^2 Wdown^T in float64, compiled on a GPU: the tolerances in the README."""
    torch.manual_seed(0)
    x = torch.randn(rows, 128)
    up, down = torch.randn(384, 128) * 128**-0.5, torch.randn(128, 384) * 384**-0.5
    arrays = [one.bfloat16().to(device).requires_grad_() for one in (x, up, down)]
    kernel: Any = mlp.relu2_mlp
    if device == "cuda":
        kernel = torch.compile(kernel, fullgraph=True)
    y, *most = kernel(*arrays, *torch.tensor([5.0, 20.0], device=device), narrow=narrow)
    wide = [one.detach().double().requires_grad_() for one in arrays]
    before = wide[0] @ wide[1].T
    exact = before.relu().square() @ wide[2].T
    by = torch.randn_like(exact)
    found = [y, *torch.autograd.grad(y, arrays, by.bfloat16())]
    expected = [exact, *torch.autograd.grad(exact, wide, by)]
    for mine, theirs, bound in zip(found, expected, (0.06, *bounds), strict=True):
        off = (mine.double() - theirs).norm() / theirs.norm()
        assert off <= bound, off
    assert most[0] == x.bfloat16().abs().max()
    assert float(most[1]) == pytest.approx(float(before.detach().max() ** 2), rel=0.1)


def test_scales_follow_the_largest_numbers_of_the_step_before_and_are_resumed() -> None:
    plan = planned()
    run, again = create_trainer(plan, "torch"), create_trainer(plan, "torch")
    names = [f"state.layers.{n}.mlp.largest_{of}" for n in (0, 1) for of in ("x", "h")]
    assert [float(run.arrays()[name]) for name in names] == [16.0, 64.0] * 2
    stepped(run, plan, 0)
    saved = {name: np.array(array) for name, array in run.arrays().items()}
    first = [float(saved[name]) for name in names]
    assert all(0 < one < 16 for one in first)
    losses = [stepped(run, plan, seed) for seed in (1, 2)]
    assert [float(run.arrays()[name]) for name in names] != first
    again.resume(saved)
    assert [stepped(again, plan, seed) for seed in (1, 2)] == losses
    for name, array in run.arrays().items():
        np.testing.assert_array_equal(again.arrays()[name], array, err_msg=name)
    without = create_trainer(plan, "torch")
    without.resume({**saved, **{name: np.array(1e-4, np.float32) for name in names}})
    assert [stepped(without, plan, seed) for seed in (1, 2)] != losses  # the scales have an effect


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["bfloat16", "fp8"])
def test_a_step_is_one_graph_and_gives_the_losses_of_eager(backward: str) -> None:
    graphs = 0

    def counted(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def compiler(function: Any, **options: Any) -> Any:
        return torch.compile(function, backend=counted, **options)

    plan = planned(settings=("train.compile=on",), backward=backward)
    plain = planned(backward=backward)
    run = create_trainer(plan, "torch", compiler=compiler)
    eager = create_trainer(plain, "torch")
    losses = [[stepped(one, plan, seed) for seed in range(3)] for one in (run, eager)]
    assert graphs == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    torch.compiler.reset()


@pytest.mark.parametrize("backward", ["bfloat16", "fp8"])
def test_it_learns_as_relu2_does(backward: str) -> None:
    relu2 = pytest.importorskip("minillm_modded.relu2")
    plan = planned(backward=backward)
    plain = build_plan(plan.config, [LoadedPlugin.of("relu2", relu2.ReLU2())])
    assert {n: i.shape for n, i in plan.parameters.items()} == {
        n: i.shape for n, i in plain.parameters.items()
    }
    runs = [create_trainer(one, "torch") for one in (plan, plain)]
    ends = [[stepped(run, plain, 0) for _ in range(30)][-1] for run in runs]
    assert ends[1] < 4.0 < np.log(64)
    assert ends[0] == pytest.approx(ends[1], rel=0.02)
    held = runs[0].arrays()
    runs[1].resume({name: np.array(held[name]) for name in runs[1].arrays()})
    assert runs[0].evaluate(batches(plan)) == runs[1].evaluate(batches(plan))  # in bfloat16, both


def test_what_it_cannot_multiply_is_refused() -> None:
    with pytest.raises(PlanError, match="multiples of 16, but one side is 40") as refused:
        planned(hidden=40)
    assert "fp8_mlp.hidden=48" in str(refused.value.fix)
    with pytest.raises(PlanError, match="one side is 24") as refused:
        planned(settings=("model.dim=24",))
    assert "model.dim=32" in str(refused.value.fix)
    plan = planned(settings=("train.dtype=float32",))
    run = create_trainer(plan, "torch")
    with pytest.raises(BackendError, match="rounds from bfloat16, not from float32"):
        stepped(run, plan, 0)
    total, count = run.evaluate(batches(plan))  # evaluation is not training
    assert total / count == pytest.approx(np.log(64), rel=0.2)


class Twice(Module):
    """A custom matrix product."""

    def forward(self, x: Any, weight: Any) -> Any:
        return 2.0 * self.ops.linear(x, weight)


class Claims(Plugin, api=1):
    """Claims the product of a linear module."""

    def build_model(self, model: Any) -> None:
        model.linear("layers.0.mlp.up", Twice)


def test_a_claim_on_its_leaves_is_not_passed_over() -> None:
    plan = planned(("claims", Claims()))
    with pytest.raises(PlanError, match="so 'claims' cannot replace it"):
        stepped(create_trainer(plan, "torch"), plan, 0)


def test_it_takes_the_place_of_relu2() -> None:
    relu2 = pytest.importorskip("minillm_modded.relu2")
    with pytest.raises(PlanError, match=r"model\.mlp\[0\] is claimed by both") as refused:
        planned(("relu2", relu2.ReLU2()))
    assert "--plugins -relu2" in str(refused.value.fix)


def test_numbers_beyond_the_range_are_its_largest() -> None:
    x = torch.tensor([1e4, -1e4, 3.0], dtype=torch.bfloat16)
    assert fp8.to_e4m3(x, torch.tensor(1.0)).float().tolist() == [448.0, -448.0, 3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize("backward", ["bfloat16", "fp8"])
def test_steps_on_a_gpu_are_those_of_a_cpu(compiled: str, backward: str) -> None:
    plans = [
        planned(settings=(f"train.compile={one}",), backward=backward) for one in (compiled, "off")
    ]
    runs = [create_trainer(plans[0], "torch", device="cuda"), create_trainer(plans[1], "torch")]
    losses = [[stepped(run, plans[1], seed) for seed in range(4)] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
