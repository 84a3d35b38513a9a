"""Tests of the calls of FlashAttention-4 and QuACK and of the use of their results, by minillm's contracts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import BackendError, LossForm, SigmoidCap, TanhCap
from minillm_core.ops.contract import CONTRACTS
from minillm_kit import reference

torch = pytest.importorskip("torch")

from torch._dynamo.backends.debugging import aot_eager  # noqa: E402

from minillm_core.backends.torch import loss as core_loss  # noqa: E402  (needs torch)
from minillm_core.backends.torch.ops import attention_composed  # noqa: E402


def normal(seed: int, *shapes: tuple[int, ...]) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made).requires_grad_() for shape in shapes]


def gradients(outputs: list[Any], arrays: list[Any], upstream: list[Any]) -> list[Any]:
    """Compute outputs and gradients, NumPy arrays in float64."""
    made = torch.autograd.grad(outputs, arrays, upstream)
    return [x.detach().double().numpy() for x in (*outputs, *made)]


def close(op: str, got: list[Any], exact: list[Any]) -> None:
    for mine, theirs in zip(got, exact, strict=True):
        off = np.linalg.norm(mine - theirs)
        limit = max(np.linalg.norm(theirs), theirs.size**0.5)
        assert off <= CONTRACTS[op].tolerance["float32"] * limit


@st.composite
def attentions(draw: Any) -> tuple[list[Any], dict[str, Any]]:
    """Draw ([q, k, v], the mask): rows of which the queries are the last positions, documents in runs."""
    B, T, K, groups = (draw(st.integers(1, 3)) for _ in range(4))
    T, S = 3 * T, 3 * T + draw(st.integers(0, 5))
    arrays = normal(
        draw(st.integers(0, 2**32 - 1)), (B, T, K * groups, 8), (B, S, K, 8), (B, S, K, 8)
    )
    mask: dict[str, Any] = {
        "scale": draw(st.sampled_from([None, 0.3])),
        "window": draw(st.none() | st.integers(1, S + 1)),
        "documents": None,
    }
    if draw(st.booleans()):
        new = np.array(draw(st.lists(st.booleans(), min_size=B * S, max_size=B * S)))
        ids = np.cumsum(new.reshape(B, S), axis=1, dtype=np.int32)
        padding = draw(st.integers(0, S - 1))
        ids[0, S - padding :] = -1
        mask["documents"] = torch.from_numpy(ids)
    return arrays, mask


@settings(max_examples=80)
@given(attentions(), st.booleans())
def test_attention_keeps_its_contract(kernels: Any, case: Any, changing: bool) -> None:
    arrays, mask = case
    kernel = kernels("attention").attention
    if changing and mask["window"]:
        mask["window"] = torch.tensor(float(mask["window"]))
    up = torch.randn_like(arrays[0])
    ours = gradients([kernel(*arrays, **mask)], arrays, [up])
    exact = [x.detach().double().requires_grad_() for x in arrays]
    theirs = gradients([attention_composed(*exact, **mask)], exact, [up.double()])
    host = [x.detach().double().numpy() for x in arrays]
    ids = mask["documents"]
    window = None if mask["window"] is None else float(mask["window"])
    masked = mask | {"window": window, "documents": None if ids is None else ids.numpy()}
    close("attention", ours, theirs)
    close("attention", ours[:1], [reference.attention(*host, **masked)])


@pytest.mark.parametrize("row", [[0, 1, 0], [1, -1, 0], [0, -1, 0]])
def test_documents_whose_tokens_lie_apart_are_refused(kernels: Any, row: Any) -> None:
    ids = torch.tensor([row], dtype=torch.int32)  # one again, behind another or padding
    with pytest.raises(BackendError, match="adjacent"):
        kernels("attention").attention(*normal(0, *3 * [(1, 3, 1, 8)]), documents=ids)


def test_every_token_may_be_a_document(kernels: Any) -> None:
    q, k, v = normal(0, *3 * [(2, 70, 1, 8)])
    ids = torch.arange(70, dtype=torch.int32).expand(2, -1).contiguous()
    torch.testing.assert_close(kernels("attention").attention(q, k, v, documents=ids), v)


@pytest.mark.parametrize("packed", [True, False])
def test_parts_of_wider_arrays_are_copied_where_they_cannot_be_loaded(
    kernels: Any, packed: bool
) -> None:
    kernel = kernels("attention").attention
    (whole,) = normal(0, (2, 5, 6, 11))
    q, k, v = (whole[:, :, 2 * i : 2 * i + 2, 1:9] for i in range(3))
    ids = torch.tensor(2 * [[0, 0, 1, 1, 1]], dtype=torch.int32) if packed else None
    y = kernel(q, k, v, documents=ids)
    torch.testing.assert_close(y, attention_composed(q, k, v, documents=ids))


@pytest.mark.parametrize("ordered", [True, False])
def test_sums_are_in_a_fixed_order_where_it_was_asked_for(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    module, arrays, asked = kernels("attention"), normal(0, *3 * [(1, 4, 1, 8)]), []
    library = module._library()
    theirs = library._flash_attn_bwd

    def note(*args: Any, deterministic: bool, **more: Any) -> Any:
        asked.append(deterministic)
        return theirs(*args, deterministic=deterministic, **more)

    monkeypatch.setattr(library, "_flash_attn_bwd", note)
    torch.use_deterministic_algorithms(ordered)
    try:
        module.attention(*arrays).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [ordered]


FORMS = (
    LossForm(),
    LossForm(cap=TanhCap(5.0)),
    LossForm(cap=TanhCap(64.0), scale=0.5),
    LossForm(cap=SigmoidCap(23.0, 5.0, 7.5)),
    LossForm(cap=SigmoidCap(64.0, 0.0, 2.0), scale=3.0),
)


@st.composite
def losses(draw: Any) -> tuple[list[Any], Any, Any]:
    """Draw ([hidden, weight], targets, weights): fewer positions than a chunk has in these tests, or more."""
    N, seed = draw(st.integers(1, 9) | st.just(300)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    targets = rng.integers(-1, 256, (1, N)).astype(np.int32)
    targets[targets < 0] = draw(st.sampled_from([-1, -100]))
    weights = draw(st.sampled_from([None, torch.tensor([0.25])]))
    return normal(seed, (N, 8), (256, 8)), torch.from_numpy(targets), weights


@settings(max_examples=60)
@given(
    losses(), st.sampled_from([(True, True), (True, False), (False, True)]), st.sampled_from(FORMS)
)
def test_the_loss_keeps_its_contract(
    kernels: Any, case: Any, learnt: tuple[bool, bool], form: LossForm
) -> None:
    arrays, targets, weights = case
    results = []
    for kernel, dtype in (
        (kernels("loss").linear_cross_entropy, torch.float32),
        (core_loss.dense, torch.float64),
    ):
        hidden, weight = (
            x.detach().to(dtype).requires_grad_(wanted)
            for x, wanted in zip(arrays, learnt, strict=True)
        )
        total, sums, count = kernel(hidden, weight, targets, weights, form)
        assert not sums.requires_grad
        free = [x for x in (hidden, weight) if x.requires_grad]
        found = gradients([total], free, [torch.tensor(0.375, dtype=total.dtype)])
        results.append([*found, sums.double().numpy(), count.double().numpy()])
        with torch.no_grad():
            again = kernel(hidden, weight, targets, weights, form)
        for with_, without in zip((total, sums, count), again, strict=True):
            torch.testing.assert_close(with_.detach(), without)
    close("linear_cross_entropy", *results)


def test_an_older_gpu_is_refused(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, attention = kernels("loss"), kernels("attention")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(BackendError, match=r"capability 9\.0, not 8\.6") as refused:
        loss.linear_cross_entropy(
            *normal(0, (3, 8), (128, 8)), torch.zeros((1, 3), dtype=torch.int32)
        )
    assert refused.value.fix == "cute.loss=false"
    with pytest.raises(BackendError, match=r"capability 9\.0, not 8\.6") as refused:
        attention.attention(*normal(0, *3 * [(1, 4, 1, 8)]))
    assert refused.value.fix == "cute.attention=false"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_compiled_step_takes_each_kernel_as_one_operation(kernels: Any) -> None:
    """Check that there is no graph break, and that layers share the places of their documents."""
    attention, loss = kernels("attention").attention, kernels("loss").linear_cross_entropy
    q, k, v, weight = normal(0, *3 * [(2, 6, 2, 8)], (128, 16))
    ids = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    targets = torch.arange(12, dtype=torch.int32)[None]

    def step(q: Any, k: Any, v: Any, weight: Any) -> Any:
        y = attention(q, k, v, window=3, documents=ids)
        y = attention(y, k, v, documents=ids)
        total, _, count = loss(y.flatten(2).flatten(0, 1), weight, targets)
        return total / count

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    arrays = [q, k, v, weight]
    for got, exact in zip(
        gradients([compiled(*arrays)], arrays, [torch.tensor(1.0)]),
        gradients([step(*arrays)], arrays, [torch.tensor(1.0)]),
        strict=True,
    ):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-7)


def test_windows_that_change_share_a_compiled_step(kernels: Any) -> None:
    kernel, arrays, graphs = kernels("attention").attention, normal(0, *3 * [(2, 12, 2, 8)]), []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(
        lambda q, k, v, window: kernel(q, k, v, window=window), fullgraph=True, backend=counted
    )
    up = torch.randn_like(arrays[0])
    for width in (3, 7, 12):
        window = torch.tensor(float(width))
        ours = gradients([compiled(*arrays, window)], arrays, [up])
        close("attention", ours, gradients([kernel(*arrays, window=width)], arrays, [up]))
    assert len(graphs) == 1


def test_a_compiled_step_finds_the_documents_once_for_all_layers(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, found = kernels("attention"), []
    theirs = module.np.flatnonzero
    monkeypatch.setattr(module.np, "flatnonzero", lambda x: found.append(x.shape) or theirs(x))

    def step(q: Any, k: Any, v: Any, documents: Any) -> Any:
        for window in (3, 5, None):
            q = module.attention(q, k, v, window=window, documents=documents)
        return q

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")
    arrays = normal(0, *3 * [(2, 12, 2, 8)])
    for ends in (4, 7):
        ids = (torch.arange(12, dtype=torch.int32) >= ends).int().expand(2, -1).contiguous()
        found.clear()
        compiled(*arrays, ids).sum().backward()
        assert found == [(2, 12)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "beta"), [((2, 16, 40), 0.0), ((3, 24, 24), -4.775), ((1, 9, 7), 0.0)]
)
@pytest.mark.parametrize("turned", [False, True])
def test_symmetric_products(
    kernels: Any, dtype: str, shape: tuple[int, int, int], beta: float, turned: bool
) -> None:
    (x,) = normal(0, shape)
    x = x @ x.mT if beta else x
    x = x.detach().to(getattr(torch, dtype))
    x = x.mT.contiguous().mT if turned else x
    gamma = 3.4445 if beta else 0.0
    for function in (
        kernels("gram").gram,
        torch.compile(kernels("gram").gram, backend="aot_eager"),
    ):
        made = function(x, 2.0315, beta, gamma)
        exact = 2.0315 * x.double() @ x.double().mT + (beta * x.double() if beta else 0.0)
        exact += gamma * torch.eye(shape[1])
        limit = max(exact.norm().item(), exact.numel() ** 0.5)
        assert (made.double() - exact).norm().item() <= CONTRACTS["gram"].tolerance[dtype] * limit
