"""Tests of Liger itself against minillm's reference, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from minillm_core import LossForm, Rotary, TanhCap

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("default"),  # inductor recommends TF32
]


def loaded(op: str) -> Any:
    pytest.importorskip("liger_kernel")
    from minillm_liger.kernels import loss, rms_norm, rope, swiglu

    return {
        "linear_cross_entropy": loss.linear_cross_entropy,
        "rms_norm": rms_norm.rms_norm,
        "rotate": rope.rotate,
        "swiglu": swiglu.swiglu,
    }[op]


FORMS = (
    LossForm(),
    LossForm(cap=TanhCap(15.0), scale=0.5),
    LossForm(smoothing=0.1, z=1e-3),
)


def check_loss(check: Any, form: LossForm, weighted: str, dtype: str, *, compiled: bool) -> None:
    torch.manual_seed(0)
    N, C, V = 300, 64, 1000
    targets = torch.randint(-1, V, (1, N), device="cuda", dtype=torch.int32)
    shape = {"none": None, "target": (1,), "position": (1, N)}[weighted]
    weights = None if shape is None else torch.rand(shape, device="cuda")
    kernel = loaded("linear_cross_entropy")
    kernel = torch.compile(kernel, fullgraph=True) if compiled else kernel
    arrays = [torch.randn(N, C), 0.1 * torch.randn(V, C)]
    check("linear_cross_entropy", kernel, arrays, targets, weights, form, dtype=dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighted", ["none", "target", "position"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loss(check_on_gpu: Any, form: LossForm, weighted: str, dtype: str) -> None:
    check_loss(check_on_gpu, form, weighted, dtype, compiled=False)


@pytest.mark.parametrize("weighted", ["none", "position"])
def test_loss_in_a_compiled_step(check_on_gpu: Any, weighted: str) -> None:
    check_loss(check_on_gpu, FORMS[1], weighted, "bfloat16", compiled=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_ops(check_on_gpu: Any, dtype: str) -> None:
    torch.manual_seed(0)
    x, up, weight = torch.randn(4, 50, 96), torch.randn(4, 50, 96), torch.randn(96)
    check_on_gpu("swiglu", loaded("swiglu"), [x, up], dtype=dtype)
    check_on_gpu("rms_norm", loaded("rms_norm"), [x, weight], 1e-5, dtype=dtype)
    angles = torch.outer(torch.arange(50.0), 100.0 ** -torch.linspace(0, 1, 32)).cuda()
    for positions in (None, torch.randint(0, 50, (4, 50), device="cuda", dtype=torch.int32)):
        table = Rotary(angles.cos(), angles.sin(), angles[1], positions)
        heads = [torch.randn(4, 50, n, 64) for n in (6, 2)]
        check_on_gpu("rotate", loaded("rotate"), heads, table, dtype=dtype)
