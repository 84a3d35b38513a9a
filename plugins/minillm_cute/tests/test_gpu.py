"""Tests of FlashAttention-4 and QuACK themselves against minillm's reference, on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import LossForm, SigmoidCap, TanhCap

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="torch sees no Hopper GPU",
    ),
    pytest.mark.filterwarnings("default"),  # inductor recommends TF32
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("shape", "window", "documents"),
    [
        ((2, 300, 300, 6, 2, 64), None, False),
        ((2, 300, 300, 4, 4, 128), 128, False),
        ((1, 7, 131, 4, 2, 64), 40, False),
        ((2, 300, 300, 6, 6, 128), None, True),
        ((2, 300, 300, 4, 2, 64), 100, True),
        ((2, 40, 131, 4, 4, 64), 50, True),
    ],
)
def test_attention(
    check_on_gpu: Any, shape: Any, window: int | None, documents: bool, compiled: bool
) -> None:
    pytest.importorskip("flash_attn.cute")
    from minillm_cute.kernels.attention import attention

    B, T, S, H, K, D = shape
    torch.manual_seed(0)
    arrays = [torch.randn(B, n, heads, D) for n, heads in ((T, H), (S, K), (S, K))]
    ids = np.cumsum(np.random.default_rng(0).random((B, S)) < 0.05, axis=1, dtype=np.int32)
    host = torch.from_numpy(ids) if documents else None

    def kernel(q: Any, k: Any, v: Any, *, window: int | None, documents: Any) -> Any:
        return attention(q, k, v, window=window, documents=host)  # the same, on the CPU

    made = torch.compile(kernel, fullgraph=True) if compiled else kernel
    held = None if host is None else host.cuda()
    check_on_gpu("attention", made, arrays, window=window, documents=held)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 128])
def test_attention_gives_the_same_bits_in_deterministic_mode(
    window: int | None, documents: bool
) -> None:
    pytest.importorskip("flash_attn.cute")
    from minillm_cute.kernels.attention import attention

    torch.manual_seed(0)
    q, k, v, up = (torch.randn(8, 1024, 6, 128, device="cuda").bfloat16() for _ in range(4))
    ids = (torch.arange(1024, dtype=torch.int32) // 300).expand(8, -1)
    mask = {"window": window, "documents": ids.contiguous() if documents else None}
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(4):
            given = [x.clone().requires_grad_() for x in (q, k, v)]
            found.append(torch.autograd.grad(attention(*given, **mask), given, up))
    finally:
        torch.use_deterministic_algorithms(False)
    for again in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(again, found[0], strict=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("positions", [3, 300, 9000])
@pytest.mark.parametrize("cap", [None, TanhCap(15.0), SigmoidCap(23.0, 5.0, 7.5)])
def test_loss(
    check_on_gpu: Any,
    positions: int,
    weighted: bool,
    compiled: bool,
    cap: TanhCap | SigmoidCap | None,
) -> None:
    pytest.importorskip("quack")
    from minillm_cute.kernels.loss import linear_cross_entropy

    torch.manual_seed(0)
    C, V = 64, 1280
    targets = torch.randint(-1, V, (1, positions), device="cuda", dtype=torch.int32)
    weights = torch.tensor([0.5], device="cuda") if weighted else None
    kernel = (
        torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
    )
    arrays = [torch.randn(positions, C), 0.1 * torch.randn(V, C)]
    form = LossForm(cap=cap)
    check_on_gpu(
        "linear_cross_entropy", kernel, arrays, targets=targets, weights=weights, form=form
    )


@pytest.mark.parametrize("cap", [None, TanhCap(15.0)])
def test_loss_gives_the_same_bits(cap: TanhCap | SigmoidCap | None) -> None:
    pytest.importorskip("quack")
    from minillm_cute.kernels.loss import linear_cross_entropy

    torch.manual_seed(0)
    hidden = torch.randn(20_000, 256, device="cuda").bfloat16()
    weight = (0.1 * torch.randn(12_800, 256, device="cuda")).bfloat16()
    targets = torch.randint(-1, 12_800, (1, 20_000), device="cuda", dtype=torch.int32)
    found = []
    for _ in range(4):
        given = [x.clone().requires_grad_() for x in (hidden, weight)]
        total = linear_cross_entropy(*given, targets, form=LossForm(cap=cap))[0]
        found.append((total.detach(), *torch.autograd.grad(total, given)))
    for again in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(again, found[0], strict=True))
