"""Linear cross-entropy: losses and both gradients chunk by chunk, each chunk's logits in one buffer.

A chunk is four launches: cuBLAS computes the logits of some rows; one program per row reads them twice and
overwrites them with their gradient; two more products compute both gradients from it. Memory besides the
gradients: one chunk of logits and the weight's gradient in float32, 0.5 GiB for 65,536
positions of 50,304, where the logits alone take 6. (One pass for both gradients: Hsu et al.,
arXiv:2410.10989; chunks: Wijmans et al., arXiv:2411.09009.)

In fp8 (Micikevicius et al., arXiv:2209.05433; modded-nanogpt's record of 2025-01-13 has such a head) the
logits are products of e4m3, both gradients of e5m2 and e4m3. Each array has one scale, a power of two from its own
largest value, so that there is no state between steps. Hopper multiplies fp8 only where both operands are
contiguous along the summed axis: for the weight's gradient a chunk's rounded gradient is transposed in memory,
into the place of its logits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library
from torch.autograd import Function

from minillm_core import LossForm, SigmoidCap, TanhCap
from minillm_triton.kernels.fp8 import (
    E5M2,
    check_device,
    multiplied,
    power_of_two,
    scale_of,
    to_e4m3,
    transposed,
)

__all__ = ["chunk_rows", "fp8_linear_cross_entropy", "linear_cross_entropy"]

PLAIN = LossForm()
CHUNK_BYTES = 400 * 2**20  # largest logits of a chunk, in the compute dtype
TILE = 128  # rows of a cuBLAS tile: chunks are whole tiles
BLOCK, WARPS = 4096, 16  # of a program: logits of a row that it loads at once
UNROLL = 1
PROGRAMS = 3  # per multiprocessor; with more of fewer warps their rows no longer fit the cache
NO_CAP, TANH, SIGMOID = 0, 1, 2
FP8_CHUNK_BYTES = 800 * 2**20  # an fp8 product needs more rows to be worth its launch
BOUNDED = 40.0  # for a cap below it exp(x - cap) is finite in float32, and no maximum is needed


def linear_cross_entropy(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (K, N) int32
    weights: Tensor | None = None,  # (K,) or (K, N)
    form: LossForm = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total, sums (K,), count): see minillm's contract of the op.

    6 N C V FLOPs with the backward pass, a third less with a frozen head, 2 N C V without
    gradients.
    """
    return _loss(hidden, weight, targets, weights, form, fp8=False)


def fp8_linear_cross_entropy(
    hidden: Tensor,  # (N, C) bfloat16, C a multiple of 16
    weight: Tensor,  # (V, C), V a multiple of 16
    targets: Tensor,  # (K, N) int32
    weights: Tensor | None = None,  # (K,) or (K, N)
    form: LossForm = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same from fp8 products; without gradients, as in evaluation, from those of bfloat16.

    Gradients are off by 6 %, losses by 5e-4 of themselves.

    Raises:
        BackendError: gradients are wanted, and the GPU does not support fp8 products.
    """
    if _trained(hidden, weight):
        check_device(hidden, "--kernels linear_cross_entropy=fp8", "leave plugin 'fp8_head' out")
    return _loss(hidden, weight, targets, weights, form, fp8=True)


def _loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    form: LossForm,
    *,
    fp8: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    supervised = targets >= 0  # (K, N)
    scale = supervised.float()
    if weights is not None:
        scale = scale * (weights if weights.ndim == 2 else weights[:, None])
    arguments = (hidden, weight, targets.contiguous(), scale, *_constants(form))
    if _trained(hidden, weight):
        total, losses = _Fused.apply(*arguments, fp8, weight.requires_grad)
    else:
        losses = _fused(*arguments, False, False, False)[0]
        total = (losses * scale).sum()
    return total, losses.sum(-1), supervised[0].sum(dtype=torch.float32)


def _trained(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether gradients are wanted."""
    return torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)


class _Fused(Function):
    """(hidden, weight) -> (total, losses (K, N)), with both gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        cap: int,
        constants: list[float],
        fp8: bool,
        learnt: bool,
    ) -> tuple[Tensor, Tensor]:
        losses, *grads = _fused(hidden, weight, targets, scale, cap, constants, fp8, True, learnt)
        ctx.save_for_backward(*grads)
        ctx.dtype, ctx.learnt = weight.dtype, learnt
        ctx.mark_non_differentiable(losses)
        return (losses * scale).sum(), losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        by = upstream[0]  # () float32: the only differentiable output is the total
        grad_hidden, grad_weight = ctx.saved_tensors
        of_weight = None
        if ctx.learnt:  # directly in its dtype: a float32 product would take 4 V C bytes more
            of_weight = torch.empty_like(grad_weight, dtype=ctx.dtype)
            torch.mul(grad_weight, by, out=of_weight)
        return (grad_hidden * by).to(grad_hidden.dtype), of_weight, *(6 * [None])


@library.custom_op(
    "minillm_triton::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor targets, Tensor scale, int cap, float[] constants, "
    "bool fp8, bool gradients, bool learnt) -> (Tensor, Tensor, Tensor)",
)
def _fused(
    hidden: Tensor,  # (N, C)
    weight: Tensor,  # (V, C)
    targets: Tensor,  # (K, N) int32
    scale: Tensor,  # (K, N) float32
    cap: int,
    constants: list[float],  # a, b, c of the cap; scale, smoothing, z
    fp8: bool,
    gradients: bool,
    learnt: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses float32 (K, N), 0 where unsupervised, and the weighted sum's gradients, or empty.

    One op for torch.compile, since Inductor would hold the logits of several chunks.
    """
    (N, C), V, K = hidden.shape, weight.shape[0], targets.shape[0]
    hidden, weight = hidden.contiguous(), weight.contiguous()
    losses = torch.empty((K, N), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if gradients else hidden.new_empty(0)
    shape = (V, C) if learnt else (0, C)
    grad_weight = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
    rows = chunk_rows(hidden, weight, FP8_CHUNK_BYTES if fp8 else CHUNK_BYTES)
    programs = _programs(hidden.device)
    most = min(rows, N)
    if fp8:
        products = _Fp8Products(hidden, weight, scale, most, cap, constants)
    else:
        products = _Products(weight, most)
    for start in range(0, N, rows):
        h = hidden[start : start + rows]  # (n, C)
        logits = products.logits(h)  # (n, V)
        d = products.gradient(
            logits
        )  # (n, V): written by the kernel, for the hidden state's gradient
        _rows[(min(len(h), programs),)](
            *(logits, d, targets, scale, losses, products.raised),
            *(start, len(h), N, *constants),
            V=V,
            targets=K,
            cap=cap,
            scaled=constants[3] != 1.0,
            bounded=cap != NO_CAP and constants[0] <= BOUNDED,
            narrow=hidden.dtype != torch.float32,
            smooth=constants[4] > 0,
            fp8=fp8,
            gradients=gradients,
            block=BLOCK,
            unroll=UNROLL,
            num_warps=WARPS,
        )
        del logits  # in fp8 its transposed gradient takes the place
        if gradients:
            products.hidden_gradient(d, grad_hidden[start : start + rows])
        if learnt:
            products.add_weight_gradient(grad_weight, d, h)
        del d  # before the next chunk's logits are allocated
    return losses, grad_hidden, grad_weight


@_fused.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    cap: int,
    constants: list[float],
    fp8: bool,
    gradients: bool,
    learnt: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    losses = torch.empty_like(scale)
    grad_hidden = hidden.new_empty(hidden.shape if gradients else (0,))
    rows = weight.shape[0] if learnt else 0
    return losses, grad_hidden, weight.new_empty((rows, weight.shape[1]), dtype=torch.float32)


def chunk_rows(hidden: Tensor, weight: Tensor, most: int) -> int:
    """Choose the rows of a chunk: whole tiles of the products, with ``most`` bytes of logits."""
    tile_bytes = TILE * weight.shape[0] * hidden.element_size()
    return TILE * max(1, most // tile_bytes)


class _Products:
    """Products in the compute dtype; a chunk's gradient overwrites its logits."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self.weight = weight  # (V, C)
        self.raised = weight  # no factor: the rows do not read it
        self.buffer = weight.new_empty((rows, len(weight)))

    def logits(self, h: Tensor) -> Tensor:
        """Multiply hidden states h (n, C) with the head: (n, V)."""
        return torch.mm(h, self.weight.T, out=self.buffer[: len(h)])

    def gradient(self, logits: Tensor) -> Tensor:
        """Return the buffer for the gradient of logits (n, V)."""
        return logits

    def hidden_gradient(self, d: Tensor, out: Tensor) -> None:
        """Multiply the logits' gradient d (n, V) with the head, into out (n, C)."""
        torch.mm(d, self.weight, out=out)

    def add_weight_gradient(self, total: Tensor, d: Tensor, h: Tensor) -> None:
        """Add d^T h to total (V, C), float32; d (n, V), h (n, C) in the compute dtype; sums in float32."""
        if d.dtype == total.dtype:
            total.addmm_(d.T, h)
        else:
            torch.addmm(total, d.T, h, out_dtype=total.dtype, out=total)


class _Fp8Products:
    """fp8 products: e4m3 for values, e5m2, of wider range, for gradients.

    Args:
        hidden: (N, C).
        weight: (V, C).
        scale: (K, N) float32, factors of the positions' losses.
        rows: of the largest chunk.
        cap: kind of cap.
        constants: as for :func:`_fused`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        scale: Tensor,
        rows: int,
        cap: int,
        constants: list[float],
    ) -> None:
        self.by_hidden = scale_of(hidden)
        self.by_weight = scale_of(weight)
        self.weight = to_e4m3(weight, self.by_weight)  # (V, C)
        self.transposed = self.weight.T.contiguous()  # (C, V)
        a, _, c, times, _, z = constants
        slope = times * (a / (4.0 * c) if cap == SIGMOID else 1.0)  # d logit / d product
        if z > 0.0:
            slope *= 2.0  # larger contributions of z-loss are clipped
        largest = scale.abs().sum(0).amax()  # a target's weight may be negative
        self.by_gradient = power_of_two(slope * largest / torch.finfo(E5M2).max)
        self.raised = 1.0 / self.by_gradient  # (): the rows are multiplied by it before rounding
        self.buffer = weight.new_empty((rows, len(weight)), dtype=E5M2)

    def logits(self, h: Tensor) -> Tensor:
        """Multiply hidden states h (n, C) with the head: (n, V)."""
        by = self.by_hidden, self.by_weight
        return multiplied(to_e4m3(h, self.by_hidden), self.weight.T, *by, h.dtype, fast=True)

    def gradient(self, logits: Tensor) -> Tensor:
        """Return the buffer for the rounded gradient of logits (n, V)."""
        return self.buffer[: len(logits)]

    def hidden_gradient(self, d: Tensor, out: Tensor) -> None:
        """Multiply the logits' gradient d (n, V) with the head, into out (n, C)."""
        by = self.by_gradient, self.by_weight
        out.copy_(multiplied(d, self.transposed.T, *by, out.dtype, fast=False))

    def add_weight_gradient(self, total: Tensor, d: Tensor, h: Tensor) -> None:
        """Add d^T h to total (V, C), float32; d (n, V) as :meth:`gradient` returns it, h (n, C)."""
        by = self.by_gradient, self.by_hidden
        rounded = to_e4m3(h, self.by_hidden)
        total += multiplied(transposed(d), transposed(rounded).T, *by, total.dtype, fast=False)


def _programs(device: torch.device) -> int:
    """Return the number of rows processed concurrently."""
    if device.type == "cpu":  # Triton's interpreter
        return PROGRAMS
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def _constants(form: LossForm) -> tuple[int, list[float]]:
    """Return the kind of cap, and [a, b, c, scale, smoothing, z]."""
    rest = [form.scale, form.smoothing, form.z]
    if isinstance(form.cap, TanhCap):
        return TANH, [form.cap.cap, 0.0, 1.0, *rest]
    if isinstance(form.cap, SigmoidCap):
        return SIGMOID, [form.cap.a, form.cap.b, form.cap.c, *rest]
    return NO_CAP, [1.0, 0.0, 1.0, *rest]


@triton.jit
def _tanh(x, narrow: tl.constexpr):
    if narrow:  # one instruction, with an error of 5e-4 at most: an eighth of bfloat16's rounding
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    # Below 1 this difference would cancel, and a cap multiplies its error: tanh(x / 4) by its series, to
    # 1e-8 of itself, and tanh(2 y) = 2 tanh(y) / (1 + tanh(y)^2) twice.
    y = 0.25 * x
    z = y * y
    y *= 1.0 + z * (-1.0 / 3.0 + z * (2.0 / 15.0 + z * (-17.0 / 315.0 + z * (62.0 / 2835.0))))
    y = 2.0 * y / (1.0 + y * y)
    y = 2.0 * y / (1.0 + y * y)
    return tl.where(x * x < 1.0, y, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _logits(product, a, b, c, scale, cap: tl.constexpr, scaled: tl.constexpr, narrow: tl.constexpr):
    """Compute the capped logits of products, float32."""
    x = product.to(tl.float32)
    if scaled:
        x *= scale
    if cap == 1:
        x = a * _tanh(x / a, narrow)
    elif cap == 2:
        x = a * (0.5 + 0.5 * _tanh(0.5 * (x + b) / c, narrow))
    return x


@triton.jit
def _sum_block(
    sums,  # (lanes,): of exp(x - largest)
    largest,  # (lanes,)
    added,  # (lanes,): sums of x, for smoothing
    at,  # (lanes, 8): addresses of the products
    inside,  # (lanes, 8): which of them belong to this row
    a,
    b,
    c,
    scale,
    cap: tl.constexpr,
    scaled: tl.constexpr,
    bounded: tl.constexpr,
    narrow: tl.constexpr,
    smooth: tl.constexpr,
    whole: tl.constexpr,
):
    """Add eight products to each lane's sums; lanes are independent."""
    if whole:
        x = _logits(tl.load(at), a, b, c, scale, cap, scaled, narrow)
    else:
        x = _logits(tl.load(at, mask=inside, other=0.0), a, b, c, scale, cap, scaled, narrow)
    if smooth:
        added += tl.sum(x if whole else tl.where(inside, x, 0.0), 1)
    if not whole:
        x = tl.where(inside, x, -float("inf"))
    if not bounded:
        fresh = tl.maximum(largest, tl.max(x, 1))
        sums *= tl.exp(largest - fresh)
        largest = fresh
    sums += tl.sum(tl.exp(x - largest[:, None]), 1)
    return sums, largest, added


@triton.jit
def _rows(
    logits,  # (n, V): products, overwritten by their gradient unless ``fp8``
    rounded,  # (n, V) e5m2, where ``fp8``: their gradient times ``raised``
    targets_at,  # (K, N) int32
    scale_at,  # (K, N) float32
    losses_at,  # (K, N) float32
    raised,  # () float32
    start,  # the first row's position
    n,
    N,
    a,
    b,
    c,
    scale,
    smoothing,
    z,
    V: tl.constexpr,
    targets: tl.constexpr,
    cap: tl.constexpr,
    scaled: tl.constexpr,
    bounded: tl.constexpr,
    narrow: tl.constexpr,
    smooth: tl.constexpr,
    fp8: tl.constexpr,
    gradients: tl.constexpr,
    block: tl.constexpr,
    unroll: tl.constexpr,
):
    """Compute row by row the losses, and the gradient of their weighted sum with respect to the products.

    Two passes per row: the first sums exp(x), the second writes the gradient from the softmax.
    """
    up = tl.load(raised) if fp8 else 1.0
    lanes: tl.constexpr = block // 8
    full: tl.constexpr = V // block * block
    columns = tl.arange(0, lanes)[:, None] * 8 + tl.arange(0, 8)[None, :]
    for row in range(tl.program_id(0), n, tl.num_programs(0)):
        here = logits + tl.full((), V, tl.int64) * row
        there = rounded + tl.full((), V, tl.int64) * row
        position = start + row
        by_row = 0.0  # the factor of p, the same for every target
        supervised = 0
        for k in tl.static_range(targets):
            by_row += tl.load(scale_at + k * N + position)
            supervised += (tl.load(targets_at + k * N + position) >= 0).to(tl.int32)
        if supervised == 0:
            for k in tl.static_range(targets):
                tl.store(losses_at + k * N + position, 0.0)
            if gradients:
                nothing = tl.zeros((lanes, 8), dtype=logits.dtype.element_ty)
                for first in range(0, V, block):
                    inside = first + columns < V
                    if fp8:
                        tl.store(there + first + columns, nothing.to(tl.float8e5), mask=inside)
                    else:
                        tl.store(here + first + columns, nothing, mask=inside)
        else:
            # Finite: a lane without products must not compute exp(-inf + inf).
            largest = tl.full((lanes,), a if bounded else -1e30, dtype=tl.float32)
            sums = tl.zeros((lanes,), dtype=tl.float32)
            added = tl.zeros((lanes,), dtype=tl.float32)
            for first in tl.range(0, full, block, loop_unroll_factor=unroll):
                sums, largest, added = _sum_block(
                    sums, largest, added, here + first + columns, columns, a, b, c, scale,
                    cap, scaled, bounded, narrow, smooth, True,
                )  # fmt: skip
            if full < V:
                sums, largest, added = _sum_block(
                    sums, largest, added, here + full + columns, full + columns < V, a, b, c, scale,
                    cap, scaled, bounded, narrow, smooth, False,
                )  # fmt: skip
            top = tl.max(largest, 0)
            lse = top + tl.log(tl.sum(sums * tl.exp(largest - top), 0))
            factor = by_row * (1.0 + 2.0 * z * lse)
            spread = by_row * smoothing / V
            mean = tl.sum(added, 0) / V - lse if smooth else 0.0  # mean of log p

            for k in tl.static_range(targets):
                target = tl.load(targets_at + k * N + position)
                wanted = tl.load(here + tl.maximum(target, 0))
                log_p = _logits(wanted, a, b, c, scale, cap, scaled, narrow) - lse
                loss = z * lse * lse - (1.0 - smoothing) * log_p - smoothing * mean
                tl.store(losses_at + k * N + position, tl.where(target >= 0, loss, 0.0))

            if gradients:
                tl.debug_barrier()  # every target's product is read before it is overwritten
                for first in tl.range(0, V, block, loop_unroll_factor=unroll):
                    inside = first + columns < V
                    product = tl.load(here + first + columns, mask=inside, other=0.0)
                    x = _logits(product, a, b, c, scale, cap, scaled, narrow)
                    d = factor * tl.exp(x - lse) - spread
                    for k in tl.static_range(targets):
                        target = tl.load(targets_at + k * N + position)
                        if (target >= first) & (target < first + block):
                            amount = tl.load(scale_at + k * N + position) * (1.0 - smoothing)
                            d -= tl.where(first + columns == target, amount, 0.0)
                    if cap == 1:
                        d *= 1.0 - (x / a) * (x / a)
                    elif cap == 2:
                        d *= x * (1.0 - x / a) / c
                    if scaled:
                        d *= scale
                    if fp8:
                        e = tl.minimum(tl.maximum(d * up, -57344.0), 57344.0)
                        tl.store(there + first + columns, e.to(tl.float8e5), mask=inside)
                    else:
                        tl.store(here + first + columns, d.to(product.dtype), mask=inside)
