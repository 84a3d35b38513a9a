"""Liger's functions with their signatures of 0.8.5, computed by torch: for machines without Triton.

Like Liger's, those of RoPE and SwiGLU overwrite their arguments.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional


def fused_linear_cross_entropy_forward(
    _input,
    weight,
    target,
    ce_weight=None,
    bias=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    accum_dtype=None,
    use_token_scaling=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    ce_impl=None,
    ce_mode=None,
    token_grad_output=None,
    compute_gradients=None,
    weight_requires_grad=None,
    chunk_mem_const=1,
):
    assert reduction == "none"
    assert not torch.is_grad_enabled(), "Liger multiplies into buffers only without gradients"
    logits = (_input @ weight.T).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kept, lse = (target != ignore_index).float(), logits.logsumexp(-1)
    smooth = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    loss = F.cross_entropy(logits, target, reduction="none", **smooth)
    loss = loss + kept * lse_square_scale * lse * lse
    if not compute_gradients:
        return loss, None, None, None, torch.zeros_like(_input), None, None
    wanted = F.one_hot(target.clamp(min=0), len(weight)) * (1 - label_smoothing)
    wanted = wanted + label_smoothing / len(weight)
    d = logits.softmax(-1) * (1 + 2 * lse_square_scale * lse[:, None]) - wanted
    d = d if softcap is None else d * (1 - (logits / softcap) ** 2)
    d = d * (kept if token_grad_output is None else kept * token_grad_output)[:, None]
    assert accum_dtype == torch.float32
    assert weight_requires_grad
    return loss, None, None, None, d @ weight, d.T @ _input, None


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        assert casting_mode == "gemma"
        assert not in_place
        ctx.save_for_backward(X, W)
        ctx.eps = eps
        return F.rms_norm(X, X.shape[-1:], W, eps)

    @staticmethod
    def backward(ctx, dY):
        X, W = (x if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            assert X is not None
            y = F.rms_norm(X, X.shape[-1:], W, ctx.eps)
        grads = torch.autograd.grad(y, [x for x in (X, W) if x is not None], dY)
        return grads[0], (grads[1] if W is not None else None), None, None, None, None, None


def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, sign=1.0):
    assert rotary_dim == q.shape[-1] == 2 * cos.shape[-1]
    q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()  # usually no copies
    cos, sin = cos[..., None, :], sign * sin[..., None, :]
    for x in (q, k):
        a, b = (half.clone() for half in x.chunk(2, -1))
        x.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    return q.transpose(1, 2), k.transpose(1, 2), cos, sin


def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return rope_forward(dq, dk, cos, sin, rotary_dim=rotary_dim, sign=-1.0)[:2]


def swiglu_forward(a, b, gate_multiplier=1.0):
    assert a.is_contiguous()
    assert b.is_contiguous()
    return a, b, F.silu(a) * b


def swiglu_backward(a, b, dc, gate_multiplier=1.0):
    sigmoid = a.sigmoid()
    da, db = dc * (a * sigmoid * (1 - sigmoid) + sigmoid) * b, dc * a * sigmoid
    return a.copy_(da), b.copy_(db)


FAKE = {
    "fused_linear_cross_entropy": (fused_linear_cross_entropy_forward,),
    "rms_norm": (LigerRMSNormFunction,),
    "rope": (rope_forward, rope_backward),
    "swiglu": (swiglu_forward, swiglu_backward),
}


@pytest.fixture(scope="session")
def kernels() -> Iterator[Any]:
    """Return a function that imports an op's kernel module, on top of the functions above."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("liger_kernel", "liger_kernel.ops"):
            patch.setitem(sys.modules, name, ModuleType(name))
        for name, functions in FAKE.items():
            module = ModuleType(f"liger_kernel.ops.{name}")
            vars(module).update({function.__name__: function for function in functions})
            patch.setitem(sys.modules, module.__name__, module)
        ours = [name for name in sys.modules if name.startswith("minillm_liger.kernels.")]
        for name in ours:
            patch.delitem(sys.modules, name)
        yield lambda name: importlib.import_module(f"minillm_liger.kernels.{name}")
    for name in [name for name in sys.modules if name.startswith("minillm_liger.kernels.")]:
        del sys.modules[name]
