"""Tests of what is kept for the backward pass where norms and SwiGLU are computed again."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402
from torch._functorch.partitioners import (  # noqa: E402
    min_cut_rematerialization_partition,
)

from minillm_core import build_plan, load  # noqa: E402
from minillm_core.backends.bind import bind  # noqa: E402
from minillm_core.backends.detect import Detected  # noqa: E402
from minillm_core.backends.torch import ops as core  # noqa: E402
from minillm_triton.kernels import recompute  # noqa: E402

N, C, F = 24, 16, 48


def arrays(dtype: Any = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    shapes = (N, C), (C,), (F, C), (F, C), (C, F)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def mlp(kernels: Any, norm: str) -> Any:
    """Return a feed-forward layer after a norm, as blocks have it."""

    def layer(x: Any, scale: Any, gate: Any, up: Any, down: Any) -> Any:
        h = getattr(kernels, norm)(x, scale, 1e-6)
        return x + core.linear(kernels.swiglu(core.linear(h, gate), core.linear(h, up)), down)

    return layer


def kept_by_a_compiled_step(layer: Any) -> int:
    """Return how many numbers the forward graph keeps per position, beside its arguments."""
    found = []

    def keeping(graph: Any, _: Any) -> Any:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        kept = [node for node in output.args[0][1:] if node.op != "placeholder"]
        shapes = [node.meta["val"].shape for node in kept]
        found.append(sum(shape.numel() // N for shape in shapes if shape[0] == N))  # no weights
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=keeping,
        bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )
    given = arrays()
    torch.compile(layer, backend=backend, fullgraph=True)(*given).sum().backward()
    expected = arrays()
    layer(*expected).sum().backward()
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    return found[0]


def test_a_compiled_step_keeps_neither_norms_nor_products() -> None:
    usual = kept_by_a_compiled_step(mlp(core, "rms_norm_fused"))
    again = kept_by_a_compiled_step(mlp(recompute, "rms_norm"))
    assert usual - again >= C + F  # the norm's result and SwiGLU's
    assert again == 2 * F  # gate and up


def test_an_eager_step_keeps_gate_and_up_alone() -> None:
    def kept(swiglu: Any) -> int:
        sizes = []
        gate, up = (torch.randn(N, F).requires_grad_() for _ in range(2))

        def pack(x: Any) -> Any:
            sizes.append(x.untyped_storage().data_ptr())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            swiglu(gate, up)
        return len({*sizes} - {gate.data_ptr(), up.data_ptr()})

    assert kept(core.swiglu) == 1  # silu(gate)
    assert kept(recompute.swiglu) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_have_the_bits_of_the_cores(dtype: Any) -> None:
    given, expected = arrays(dtype), arrays(dtype)
    made = mlp(recompute, "rms_norm")(*given)
    usual = mlp(core, "rms_norm_fused")(*expected)
    assert torch.equal(made, usual)
    made.sum().backward()
    usual.sum().backward()
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one.grad, other.grad)
    with torch.no_grad():
        assert torch.equal(mlp(recompute, "rms_norm")(*given), made)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_is_chosen_and_can_be_turned_off(device: str, compiled: bool) -> None:
    settings = {"train.compile": "on" if compiled else "off"}
    for off, expected in (({}, "recomputed"), ({"recompute.norms": False}, "fused")):
        loaded = load(preset="tiny", plugins="recompute", settings=settings | off)
        binding, _ = bind(Detected("torch", device, "test"), build_plan(loaded))
        chosen = {choice.op: choice.kernel for choice in binding.kernels}
        assert (chosen["rms_norm"], chosen["swiglu"]) == (expected, "recomputed")
