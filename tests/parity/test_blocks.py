"""Tests of block-sparse attention: skipped blocks, results, and masks shared by layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core.backends.candidates import TORCH
from minillm_core.config.kernels import parse_policy
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.select import Request, choose
from minillm_kit import reference

torch = pytest.importorskip("torch")
blocks = pytest.importorskip("minillm_core.backends.torch.blocks")
attention = pytest.importorskip("minillm_core.backends.torch.ops")

# Uncompiled it is slow, but sufficient on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

BLOCK = blocks.BLOCK
CPU = torch.device("cpu")


@st.composite
def masks(draw: Any) -> tuple[int, int | None, Any, int]:
    """Draw (S, window, documents (2, S), keys before the first query): documents in any order, with padding."""
    T = draw(st.sampled_from([BLOCK, 2 * BLOCK, 300, 4 * BLOCK, 515]))
    window = draw(st.none() | st.sampled_from([1, 2, 127, 128, 129, 255, 256, 300, T]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = np.cumsum(rng.random((2, T)) < draw(st.sampled_from([0.0, 0.004, 0.5])), axis=1)
    documents = draw(st.sampled_from([None, ends, np.where(ends == ends[:, -1:], -1, ends)]))
    before = draw(st.sampled_from([0, BLOCK, T - BLOCK])) if T % BLOCK == 0 and T > BLOCK else 0
    return T, window, None if documents is None else documents.astype(np.int32), before


def tensor(array: Any) -> Any:
    return None if array is None else torch.from_numpy(np.array(array))


def entered(window: int | None) -> Any:
    """Return a window in the form of a step's input."""
    return None if window is None else torch.tensor(float(window))


def in_blocks(visible: Any) -> Any:
    """Reshape bool (B, T, S) to (B, m, BLOCK, n, BLOCK), padded with False."""
    missing = -visible.shape[2] % BLOCK
    visible = np.pad(visible, [(0, 0), (0, missing), (0, missing)])
    _, m, n = (size // BLOCK for size in visible.shape)
    return visible.reshape(-1, m, BLOCK, n, BLOCK)


@settings(max_examples=40)
@given(masks(), st.booleans())
def test_blocks_are_listed_once_and_none_is_missed(
    mask: tuple[int, int | None, Any, int], as_input: bool
) -> None:
    T, window, documents, before = mask
    given_window = entered(window) if as_input else window
    made = blocks.block_mask(T, given_window, tensor(documents), CPU, before=before)
    visible = reference.visible(T, T, window, documents).reshape(-1, T, T)[:, before:]
    tiles = in_blocks(visible)
    some, every = tiles.any(axis=(2, 4)), tiles.all(axis=(2, 4))
    partial = listed(made.kv_num_blocks, made.kv_indices)
    full = listed(made.full_kv_num_blocks, made.full_kv_indices)
    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any(), "a block that is seen is skipped"
    assert not (full & ~every).any(), "a block that is seen in part is taken as a whole"
    if documents is None or (np.diff(documents) >= 0).all():
        assert (full == every).all(), "a whole block is masked"
        assert ((partial | full) == some).all(), "a hidden block is computed"


def listed(count: Any, indices: Any) -> Any:
    """Mark the first ``count`` of each row's indices: (B, 1, m), (B, 1, m, n) -> bool (B, m, n)."""
    first = np.arange(indices.shape[-1]) < count.numpy()[:, 0, :, None]
    chosen = np.zeros(first.shape, bool)
    np.put_along_axis(chosen, indices.numpy()[:, 0], first, axis=-1)
    return chosen


@pytest.mark.slow
@settings(max_examples=15)
@given(
    masks(), st.sampled_from([(2, 1), (3, 3), (4, 2)]), st.sampled_from([None, 0.1]), st.booleans()
)
def test_it_gives_what_the_reference_gives(
    mask: tuple[int, int | None, Any, int],
    heads: tuple[int, int],
    scale: float | None,
    as_input: bool,
) -> None:
    T, window, documents, before = mask
    rng = np.random.default_rng(T)
    q, k, v = (rng.standard_normal((2, T, n, 16)) for n in (heads[0], heads[1], heads[1]))
    q = q[:, before:]
    masked = {"scale": scale, "window": window}
    given_window = entered(window) if as_input else window
    asked_for = {"scale": scale, "window": given_window, "documents": tensor(documents)}
    got = blocks.flex(*map(tensor, (q, k, v)), **asked_for)
    expected = reference.attention(q, k, v, **masked, documents=documents)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("queries", [1, 5])
def test_columns_that_follow_others_see_what_the_reference_sees(queries: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 16)) for n in (queries, 200, 200))
    documents = np.repeat([0, 1], 100)[None].astype(np.int32)
    got = blocks.flex(*map(tensor, (q, k, v)), window=64, documents=tensor(documents))
    expected = reference.attention(q, k, v, window=64, documents=documents)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)


def asked(device: str = "cuda", **facts: Any) -> Request:
    known = {"window": None, "documents": False, "head_dim": 64}
    return Request("attention", "torch", device, "bfloat16", True, known | facts)


@pytest.mark.parametrize(
    ("request_", "kernel", "why"),
    [
        (asked(), "sdpa", "the mask is only causal"),
        (asked(window="static"), "flex", None),
        (asked(documents=True), "flex", None),
        (asked(window="dynamic"), "flex", None),
        (asked(window="static", head_dim=8), "sdpa", "16 features or more, not 8"),
        (asked("cpu", window="static"), "sdpa", "serves cuda, not cpu"),
    ],
)
def test_it_serves_windows_and_documents_on_cuda(
    request_: Request, kernel: str, why: str | None
) -> None:
    choice = choose(request_, TORCH)
    assert choice.kernel == kernel
    assert why is None or why in choice.refused["flex"]


def test_strict_does_not_ask_for_blocks_where_there_is_nothing_to_skip() -> None:
    assert choose(asked(), TORCH, parse_policy("strict")).kernel == "sdpa"


@pytest.mark.slow
def test_layers_of_a_compiled_step_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of layer has one mask, and documents are shared by all of them."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *a: None)  # no gradients on CPU
    graphs: list[Counter[str]] = []

    def note(graph: Any, example: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def layers(x: Any, documents: Any) -> Any:
        for window in (128, 256, 128, 128, 256):
            x = x + blocks.flex(x, x, x, window=window, documents=documents)
        return x.square().mean()

    backend = aot_autograd(fw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    step = torch.compile(layers, fullgraph=True, backend=backend, dynamic=False)
    x = torch.randn(1, 512, 2, 16, requires_grad=True)
    step(x, torch.zeros((1, 512), dtype=torch.int32)).backward()
    forward = graphs[0]
    assert forward["flex_attention"] == 5
    assert forward["aten.amin.default"] == 1
    assert forward["aten.sort.stable"] == 2 * 4  # partial and full blocks, by queries and by keys


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # inductor recommends TF32
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize(
    ("head_dim", "dtype"),  # each is compiled
    [(16, "float32"), (64, "bfloat16"), (64, "float32"), (96, "bfloat16"), (128, "bfloat16")],
)
def test_gradients_on_a_gpu(side: Any, head_dim: int, dtype: str) -> None:
    documents = torch.arange(300, device="cuda").div(70, rounding_mode="floor").int()[None]
    rng = np.random.default_rng(0)
    floats = [rng.standard_normal((1, 300, n, head_dim)) for n in (4, 2, 2, 4)]
    *qkv, upstream = (torch.tensor(x, device="cuda").to(getattr(torch, dtype)) for x in floats)
    results = {}
    for name, kernel, wide in (
        ("flex", torch.compile(blocks.flex, fullgraph=True), False),
        ("exact", attention.attention_composed, True),
    ):
        given = [(x.double() if wide else x).requires_grad_() for x in qkv]
        y = kernel(*given, window=128, documents=documents)
        results[name] = [y, *torch.autograd.grad(y, given, upstream.to(y.dtype))]
    tolerance = CONTRACTS["attention"].tolerance[dtype]
    for got, exact in zip(results["flex"], results["exact"], strict=True):
        found, wanted = (x.detach().double().cpu().numpy() for x in (got, exact))
        side.assert_close(found, wanted, tolerance, "y, q, k or v")


@pytest.mark.parametrize(("rows", "columns", "compiled"), [(1, 70, 0), (1, 2048, 0), (8, 1024, 1)])
def test_short_texts_outside_of_a_compiled_step_need_no_kernel_for_their_length(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, compiled: int
) -> None:
    """Prompts of any length are read at once; "meta" stands for a GPU."""
    calls = []

    def attend(q: Any, *_: Any, **__: Any) -> Any:
        calls.append(q.shape)
        return q

    monkeypatch.setattr(blocks, "_compiled", lambda: attend)
    q = torch.empty(rows, columns, 2, 8, device="meta")
    assert blocks.flex(q, q, q, window=16).shape == q.shape
    assert len(calls) == compiled
