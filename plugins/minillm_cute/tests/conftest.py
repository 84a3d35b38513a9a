"""FlashAttention-4's and QuACK's functions with their pinned signatures, computed by torch on a CPU."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from minillm_kit.triton_language import modules  # noqa: E402  (needs torch)


def seen_by(q: Any, k: Any, left: int | None, packing: dict[str, Any]) -> Any:
    """Compute which tokens of k (S, K, D) each of q (T, H, D) sees, bool (T, S), within packed sequences."""
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    ends = list(
        zip(packing["cu_seqlens_q"].tolist(), packing["cu_seqlens_k"].tolist(), strict=True)
    )
    assert (ends[0], ends[-1]) == ((0, 0), (len(q), len(k)))
    for (q0, k0), (q1, k1) in itertools.pairwise(ends):
        assert 0 <= q1 - q0 <= packing["max_seqlen_q"]
        assert 0 <= k1 - k0 <= packing["max_seqlen_k"]
        apart = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        seen[q0:q1, k0:k1] = (apart >= 0) & (apart <= (k1 - k0 if left is None else left))
    return seen


def sequences(arrays: Any, packing: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return (arrays without rows, their packing): the packed ones, or each row as one sequence."""
    if packing:
        return [(arrays, packing)]
    rows = []
    for one in zip(*arrays, strict=True):
        lengths = {"max_seqlen_q": len(one[0]), "max_seqlen_k": len(one[1])}
        ends = {"cu_seqlens_q": [0, len(one[0])], "cu_seqlens_k": [0, len(one[1])]}
        rows.append((one, lengths | {name: torch.tensor(at) for name, at in ends.items()}))
    return rows


def weights_of(q: Any, k: Any, scale: float, left: int | None, packing: Any) -> tuple[Any, Any]:
    """Compute the softmax (H, T, S) and the logarithms of its sums (H, T)."""
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    scores = scores.masked_fill(~seen_by(q, k, left, packing), float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1)


def _flash_attn_fwd(
    q, k, v, *, softmax_scale, causal, window_size_left, window_size_right, return_lse, **packing
):
    assert causal
    assert return_lse
    assert window_size_right == (None if window_size_left is None else 0)
    assert set(packing) <= {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert all(step % 8 == 0 for step in x.stride()[:-1])
    ys, logs = [], []
    for (q_, k_, v_), one in sequences((q, k, v), packing):
        k_, v_ = (x.repeat_interleave(q_.shape[1] // x.shape[1], 1) for x in (k_, v_))
        p, log = weights_of(q_, k_, softmax_scale, window_size_left, one)
        ys.append(torch.einsum("hts,shd->thd", p, v_).contiguous())
        logs.append(log)
    if packing:
        return ys[0], logs[0], None, None, None
    return torch.stack(ys), torch.stack(logs), None, None, None


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale,
    causal,
    *,
    window_size_left,
    window_size_right,
    deterministic,
    **packing,
):
    assert causal
    assert window_size_right == (None if window_size_left is None else 0)
    found = []
    for (q_, k_, v_, y, up, log), one in sequences((q, k, v, out, dout, lse), packing):
        H, K = q_.shape[1], k_.shape[1]
        k_, v_ = (x.repeat_interleave(H // K, 1) for x in (k_, v_))
        p, again = weights_of(q_, k_, softmax_scale, window_size_left, one)
        torch.testing.assert_close(again, log)
        of_p = torch.einsum("thd,shd->hts", up, v_)
        of_scores = p * (of_p - (up * y).sum(-1).T[..., None]) * softmax_scale
        of_k = torch.einsum("hts,thd->shd", of_scores, q_)
        of_v = torch.einsum("hts,thd->shd", p, up)
        of_k, of_v = (x.unflatten(1, (K, H // K)).sum(2) for x in (of_k, of_v))
        found.append((torch.einsum("hts,shd->thd", of_scores, k_), of_k, of_v))
    if packing:
        return tuple(x.contiguous() for x in found[0])
    return tuple(torch.stack(x) for x in zip(*found, strict=True))


def scaled_exp_linear_cross_entropy_fwd(
    x, weight, target, chunk_size, ignore_index=-100, *, need_dx=True, need_dw=True
):
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert len(weight) % 128 == 0
    assert chunk_size % 128 == 0
    supervised = (target != ignore_index)[:, None]
    logs = (x @ weight.T).float().log_softmax(-1)
    wanted = torch.nn.functional.one_hot(target.clamp(min=0).long(), len(weight))
    losses = -(supervised * wanted * logs).sum(-1)
    d = supervised * (logs.exp() - wanted)
    padded = -len(x) % 128  # behind the last row
    pad = torch.nn.functional.pad
    return (
        pad(losses, (0, padded)),
        pad((d @ weight.float()).to(x.dtype), (0, 0, 0, padded)) if need_dx else None,
        d.T @ x.float() if need_dw else None,
    )


def gated(activation, before):
    """Return the activation of an array of QuACK's layout, and its slopes."""
    if activation == "relu_sq":
        relu = before.relu()
        return relu.square(), lambda d: 2.0 * relu * d
    assert activation == "swiglu"
    gate, up = before.unflatten(-1, (-1, 2)).unbind(-1)  # gates and ups in turn
    sigmoid = gate.sigmoid()
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return gate * sigmoid * up, lambda d: torch.stack(
        (d * up * slope, d * gate * sigmoid), -1
    ).flatten(-2)


def gemm_act(A, B, *, activation, tuned):
    assert not tuned  # it would compile dozens of kernels at the first call
    assert A.is_contiguous()
    before = A @ B
    return before, gated(activation, before)[0]


def gemm_dact(A, B, PreAct, *, activation, tuned):
    assert not tuned
    assert A.is_contiguous()
    assert PreAct.is_contiguous()
    h, sloped = gated(activation, PreAct)
    return sloped(A @ B), h


def gemm_symmetric(
    A, B, D, C, tile_count_semaphore, *, tile_M, tile_N, cluster_M, cluster_N, pingpong, alpha, beta
):
    assert (tile_M, tile_N, cluster_M, cluster_N, pingpong) == (128, 128, 1, 1, True)
    assert A.is_contiguous() or A.mT.is_contiguous()
    assert D.is_contiguous()
    assert A.dtype in (torch.bfloat16, torch.float16)
    assert all(size % 8 == 0 for size in A.shape[1:])
    made = alpha * (A.float() @ B.float().mT)
    D.copy_(made if C is None else made + beta * C.float())


class F2(tuple):
    """Two numbers that QuACK computes at once: here an epilogue is called with a single one."""


class ColVecLoad(str):
    """An argument with a number per row."""


class ColVecReduce(str):
    """A result with a sum per row and tile."""


class ColVecSelect:
    """A result with the number of a column per row."""

    def __init__(self, name, *, idx_op):
        self.name, self.columns = name, idx_op


def gemm_epilogue(*, reduces, outs, extra_ops):
    """Compute the epilogue of a whole product, as float32, in the place of a tile's."""

    def made(function):
        def gemm(A, B, D, *, epi_args, tile_M, tile_N, cluster_M, cluster_N, pingpong):
            assert (tile_M, cluster_M, cluster_N, pingpong) == (128, 2, 1, True)
            assert A.is_contiguous()
            assert B.is_contiguous()
            assert len(B) % tile_N == 0  # it would sum exp(0) of columns that do not exist
            assert set(epi_args) == {*reduces, *outs, *extra_ops}
            found = function((A @ B.mT).float())
            D.copy_(found["D"])
            for name in reduces:
                epi_args[name].copy_(found[name].unflatten(1, (-1, tile_N)).sum(-1))
            for name, one in outs.items():
                columns = epi_args[one.columns].long()
                inside = (columns >= 0) & (columns < len(B))  # others are not written
                chosen = found[name].gather(1, columns.clamp(min=0)[:, None])[:, 0]
                epi_args[name].copy_(torch.where(inside, chosen, epi_args[name]))

        return SimpleNamespace(gemm=gemm)

    return made


def tanh(x):
    return x.tanh()


def pexp2(x):
    return x.exp2()


FAKE = {
    "quack.activation": (tanh,),
    "quack.epilogue.frontend": (gemm_epilogue,),
    "quack.epilogue.math": (F2, pexp2),
    "quack.epilogue.ops": (ColVecLoad, ColVecReduce, ColVecSelect),
    "quack.gemm_symmetric": (gemm_symmetric,),
    "flash_attn.cute.interface": (_flash_attn_fwd, _flash_attn_bwd),
    "quack.gemm_interface": (gemm_act, gemm_dact),
    "quack.linear_cross_entropy": (scaled_exp_linear_cross_entropy_fwd,),
}


def faked(patch: pytest.MonkeyPatch) -> None:
    """Put the functions above in the place of FlashAttention-4 and QuACK."""
    for name in ("flash_attn", "flash_attn.cute", "quack", "quack.epilogue"):
        patch.setitem(sys.modules, name, ModuleType(name))
    for name, functions in FAKE.items():
        module = ModuleType(name)
        vars(module).update({function.__name__: function for function in functions})
        patch.setitem(sys.modules, name, module)
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, module)


@pytest.fixture(scope="session")
def imported() -> Any:
    """Import the kernels on top of the functions above, which no later test finds as modules."""
    with pytest.MonkeyPatch.context() as patch:
        faked(patch)
        for name, module in modules(random.Random(0)).items():
            patch.setitem(sys.modules, name, module)
        names = ("attention", "capped_loss", "gram", "loss", "mlp")
        found = {name: importlib.import_module(f"minillm_cute.kernels.{name}") for name in names}
    for module in found.values():
        del sys.modules[module.__name__]
    return found


@pytest.fixture(scope="module")
def kernels(imported: Any) -> Iterator[Any]:
    """Return a function that gives an op's kernel module, on a machine whose GPU says that it is a Hopper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        faked(patch)  # fused_relu2 imports QuACK when it first multiplies
        patch.setattr(imported["capped_loss"], "CHUNK_BYTES", 2**17)  # 128 rows of 256 numbers
        for module in imported.values():  # Dynamo imports the modules of what it traces
            patch.setitem(sys.modules, module.__name__, module)
        yield imported.__getitem__
