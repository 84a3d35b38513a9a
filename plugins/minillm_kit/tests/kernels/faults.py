"""A plugin of faulty kernels: each is a correct kernel with one typical fault.

``minillm kernels check --plugins ./faults.py:Faults --kernel NAME`` must find each, and must find
no fault in the kernels named ``right``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from minillm_core import Candidate, LossForm, Plugin

PLAIN = LossForm()
CHUNK = 64


class Fault(NamedTuple):
    """A fault, and the property that exposes it."""

    name: str
    op: str
    what: str
    caught_by: str  # a key of PROPERTIES; "": it is missed
    dtype: str = "float32"  # the first dtype in which it is visible
    backend: str = "torch"
    within_tolerance: bool = True


FAULTS = (
    # linear_cross_entropy
    Fault("lost_tail", "linear_cross_entropy", "the last, partial chunk is dropped", "output"),
    Fault(
        "lost_weight_tail",
        "linear_cross_entropy",
        "the last chunk's gradient of the weight is lost",
        "gradient",
    ),
    Fault(
        "one_chunk_scratch",
        "linear_cross_entropy",
        "a chunk reads the scratch memory of the one before it",
        "output",
    ),
    Fault(
        "only_100_ignored",
        "linear_cross_entropy",
        "negative targets other than -100 are counted",
        "output",
    ),
    Fault(
        "count_of_all",
        "linear_cross_entropy",
        "all targets are counted, not only the first",
        "output",
    ),
    Fault("cap_slope", "linear_cross_entropy", "the cap is left out of the gradient", "gradient"),
    Fault("z_slope", "linear_cross_entropy", "z is left out of the gradient", "gradient"),
    Fault(
        "smoothing_slope",
        "linear_cross_entropy",
        "smoothing is left out of the gradient",
        "gradient",
    ),
    Fault("no_scale", "linear_cross_entropy", "the form's scale is ignored", "output"),
    Fault(
        "mean_weight",
        "linear_cross_entropy",
        "weights by position are used as weights by target",
        "output",
    ),
    Fault(
        "upstream_ignored",
        "linear_cross_entropy",
        "the upstream gradient is assumed to be one",
        "gradient",
    ),
    Fault(
        "sum_in_half",
        "linear_cross_entropy",
        "exponentials are summed in the compute dtype",
        "output",
        "bfloat16",
    ),
    Fault(
        "no_maximum",
        "linear_cross_entropy",
        "exponentials are computed without subtracting the maximum",
        "finite",
    ),
    Fault(
        "sums_attached", "linear_cross_entropy", "the reported sums carry a gradient", "constant"
    ),
    Fault(
        "frozen_weight",
        "linear_cross_entropy",
        "with a frozen weight the other gradient is 0",
        "alone",
    ),
    Fault(
        "unweighted_inference",
        "linear_cross_entropy",
        "without gradients the weights are ignored",
        "forward",
    ),
    Fault("stale", "linear_cross_entropy", "results are cached by shape", "fresh"),
    Fault(
        "zeros",
        "linear_cross_entropy",
        "`within_tolerance=False`, and all results are 0",
        "output",
        within_tolerance=False,
    ),
    Fault(
        "zero_gradients",
        "linear_cross_entropy",
        "`within_tolerance=False`, and all gradients are 0",
        "gradient",
        within_tolerance=False,
    ),
    # token_losses
    Fault("unwritten", "token_losses", "unsupervised positions are not written", "finite"),
    # attention
    Fault("window_off_by_one", "attention", "a query sees one key too many", "output"),
    Fault("documents_ignored", "attention", "documents see each other", "output"),
    Fault(
        "upper_left",
        "attention",
        "if there are fewer queries than keys, the mask is aligned to the upper left",
        "output",
    ),
    Fault("heads_interleaved", "attention", "head h reads key-value head h mod K", "output"),
    Fault("scale_ignored", "attention", "the scale is always D^-1/2, whichever is given", "output"),
    Fault("unmasked_sum", "attention", "the softmax sums over masked keys", "output"),
    Fault(
        "no_maximum",
        "attention",
        "exponentials are computed without subtracting the maximum",
        "finite",
    ),
    # the others
    Fault("short_offsets", "embedding", "ids are read as 16 bits", "output"),
    Fault(
        "lost_repeats",
        "embedding",
        "an id that occurs twice adds only one gradient (a race)",
        "gradient",
    ),
    Fault("no_eps", "rms_norm", "eps is ignored", "output"),
    Fault("over_read", "rms_norm", "reads past the end of a row", "finite"),
    Fault(
        "raced_sum",
        "rms_norm",
        "the gradient of the weight misses a row (a missing barrier)",
        "gradient",
    ),
    Fault(
        "row_positions", "rotate", "the positions of the first row are used for all rows", "output"
    ),
    Fault("in_place", "swiglu", "the result is written over an argument", "inputs"),
    Fault(
        "over_write", "swiglu", "the element after the end of an argument is overwritten", "inputs"
    ),
    Fault("noisy", "swiglu", "two calls differ in the last bit", "repeats"),
    Fault("wide_output", "swiglu", "the result is float32 for every dtype", "shape", "bfloat16"),
    Fault("contiguous", "swiglu", "arguments are read as if they were contiguous", "layout"),
    Fault(
        "contiguous_upstream",
        "swiglu",
        "upstream gradients are read as if they were contiguous",
        "layout",
    ),
    Fault("hangs_up", "logits", "an odd vocabulary raises an error", "runs"),
    # on MLX
    Fault(
        "mlx_window", "attention", "a window of 1 is treated as no window", "output", backend="mlx"
    ),
    Fault(
        "mlx_lost_tail",
        "linear_cross_entropy",
        "the last chunk has no gradient",
        "gradient",
        backend="mlx",
    ),
    Fault("mlx_stale", "token_losses", "results are cached by shape", "fresh", backend="mlx"),
    Fault(
        "mlx_upstream",
        "swiglu",
        "the upstream gradient is assumed to be one",
        "gradient",
        backend="mlx",
    ),
    Fault("mlx_over_read", "rms_norm", "reads past the end of the array", "finite", backend="mlx"),
    Fault(
        "mlx_in_place", "swiglu", "the result is written over an argument", "inputs", backend="mlx"
    ),
    # faults that no case exposes
    Fault("int32_offsets", "linear_cross_entropy", "offsets of more than 31 bits wrap", ""),
    Fault("slow_drift", "swiglu", "the thousandth call is wrong", ""),
)
"""Each kernel's fault, and the property that exposes it."""

RIGHT = ("linear_cross_entropy", "attention", "swiglu", "rms_norm")
"""Ops with a correct kernel here, named ``right``."""


class Faults(Plugin, api=1, backends=("torch", "mlx")):
    """Wrong kernels."""

    def kernel_provider(self, kernels: Any) -> None:
        right = (Fault("right", op, "", "") for op in RIGHT)
        for one in (*FAULTS, *right):
            at = f"{__name__}:{one.op}__{one.name}"
            kernels.candidate(
                Candidate(
                    *(one.op, one.name, (one.backend,), at, ("cpu",)),
                    within_tolerance=one.within_tolerance,
                    provider="faults",
                )
            )


def __getattr__(name: str) -> Any:
    """Build the kernel ``op__fault``."""
    op, _, fault = name.partition("__")
    if fault in ON_MLX:
        return ON_MLX[fault]()
    if not fault or op not in MAKERS:
        raise AttributeError(name)
    return MAKERS[op](fault)


# linear_cross_entropy


class _Loss(Function):
    """(hidden, weight) -> (total, sums), chunk by chunk; ``fault`` selects the fault."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, by, form, fault, learnt):
        targets, by = targets.clone(), by.clone()
        losses, dh, dw = [], [], torch.zeros(weight.shape)
        starts = range(0, len(hidden), CHUNK)
        scratch = torch.zeros(CHUNK, len(weight))
        for start in starts:
            part = slice(start, start + CHUNK)
            h, t, b = hidden[part], targets[:, part], by[:, part]
            n = len(h)
            if fault == "lost_tail" and n < CHUNK and len(hidden) > CHUNK:
                losses.append(torch.zeros(t.shape))
                dh.append(torch.zeros(h.shape))
                continue
            logits = form.logits(torch, (h.float() @ weight.float().T))
            if fault == "one_chunk_scratch" and start:
                logits = (logits + scratch[:n]) / 2
            scratch[:n] = logits
            lse = _lse(logits, h.dtype, fault)
            log_p = logits - lse[:, None]
            picked = log_p.gather(1, t.clamp(min=0).long().T).T
            losses.append(form.loss(picked, log_p.mean(-1), lse))
            rows = b.sum(0)
            z = 0.0 if fault == "z_slope" else form.z
            smoothing = 0.0 if fault == "smoothing_slope" else form.smoothing
            d = log_p.exp() * (rows * (1 + 2 * z * lse))[:, None]
            d = d - (rows * smoothing / len(weight))[:, None]
            d.scatter_add_(1, t.clamp(min=0).long().T, -(1 - smoothing) * b.T)
            d = d * form.scale if fault == "cap_slope" else form.pull_back(logits, d)
            dh.append(d @ weight.float())
            if not (fault == "lost_weight_tail" and start == starts[-1] and start):
                dw += d.T @ h.float()
        loss = torch.cat(losses, 1)
        counted = targets >= 0
        ctx.save_for_backward(torch.cat(dh), dw)
        ctx.dtypes, ctx.fault, ctx.learnt = (hidden.dtype, weight.dtype), fault, learnt
        return torch.where(by != 0, loss * by, 0.0).sum(), torch.where(counted, loss, 0.0).sum(-1)

    @staticmethod
    def backward(ctx, up, _):
        dh, dw = ctx.saved_tensors
        up = 1.0 if ctx.fault == "upstream_ignored" else up
        if ctx.fault == "frozen_weight" and not ctx.learnt:
            dh = torch.zeros_like(dh)
        if ctx.fault in ("zeros", "zero_gradients"):
            up = 0.0
        return (dh * up).to(ctx.dtypes[0]), (dw * up).to(ctx.dtypes[1]), *[None] * 5


def _lse(logits: Tensor, dtype: Any, fault: str) -> Tensor:
    if fault == "sum_in_half":
        top = logits.amax(-1, keepdim=True)
        terms, total = (logits - top).exp().to(dtype), torch.zeros(len(logits), dtype=dtype)
        for columns in terms.split(8, -1):
            total = total + columns.sum(-1)
        return total.float().log() + top[:, 0]
    if fault == "no_maximum":
        return logits.exp().sum(-1).log()
    return logits.logsumexp(-1)


def _loss(fault: str) -> Any:
    kept: dict[Any, Any] = {}

    def kernel(hidden, weight, targets, weights=None, form=PLAIN):
        supervised = targets >= 0
        if fault == "only_100_ignored":
            supervised = targets != -100
        by = supervised.float()
        if weights is not None and not (
            fault == "unweighted_inference" and not torch.is_grad_enabled()
        ):
            if weights.ndim == 2 and fault == "mean_weight":
                weights = weights[:, 0]
            by = by * (weights if weights.ndim == 2 else weights[:, None])
        if fault == "no_scale":
            form = LossForm(form.cap, 1.0, form.smoothing, form.z)
        if fault == "int32_offsets" and len(hidden) * len(weight) > 2**31:
            hidden = hidden[torch.arange(len(hidden)) % (2**31 // len(weight))]
        total, sums = _Loss.apply(hidden, weight, targets, by, form, fault, weight.requires_grad)
        if fault == "zeros":
            total, sums = total * 0.0, sums * 0.0
        if fault != "sums_attached":
            sums = sums.detach()
        counted = supervised if fault == "count_of_all" else supervised[0]
        found = total, sums, counted.sum(dtype=torch.float32)
        if fault == "stale":
            return kept.setdefault((hidden.shape, weight.shape, torch.is_grad_enabled()), found)
        return found

    return kernel


def _token_losses(fault: str) -> Any:
    def kernel(hidden, weight, targets, form=PLAIN):
        found = torch.empty(len(hidden))
        for n in range(0, len(hidden), CHUNK):
            part = slice(n, n + CHUNK)
            logits = form.logits(torch, hidden[part].detach().float() @ weight.detach().float().T)
            lse, t = logits.logsumexp(-1), targets[part]
            log_p = logits - lse[:, None]
            picked = log_p.gather(1, t.clamp(min=0).long()[:, None])[:, 0]
            here = t >= 0
            found[part][here] = form.loss(picked, log_p.mean(-1), lse)[here]
        return found

    return kernel


# attention


def _attention(fault: str) -> Any:
    def kernel(q, k, v, *, scale=None, window=None, documents=None):
        T, S, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        if fault == "heads_interleaved":
            k, v = (x.repeat(1, 1, group, 1) for x in (k, v))
        else:
            k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        if scale is None or fault == "scale_ignored":
            scale = q.shape[-1] ** -0.5
        first = 0 if fault == "upper_left" else S - T
        distance = torch.arange(first, first + T)[:, None] - torch.arange(S)
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance < window + (fault == "window_off_by_one"))
        if documents is not None and fault != "documents_ignored":
            seen = seen & (documents[:, None, S - T :, None] == documents[:, None, None, :])
        scores = scale * torch.einsum("bthd,bshd->bhts", q.float(), k.float())
        if fault == "no_maximum":
            p = torch.where(seen, scores.exp(), 0.0)
            p = p / p.sum(-1, keepdim=True)
        elif fault == "unmasked_sum":
            p = torch.where(seen, scores.softmax(-1), 0.0)
        else:
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("bhts,bshd->bthd", p, v.float()).to(q.dtype)

    return kernel


# the others


def _embedding(fault: str) -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx, ids, weight):
            ctx.save_for_backward(ids)
            ctx.rows = len(weight)
            return weight[ids]

        @staticmethod
        def backward(ctx, dy):
            (ids,) = ctx.saved_tensors
            found = torch.zeros(ctx.rows, dy.shape[-1], dtype=dy.dtype)
            found[ids.reshape(-1)] = dy.reshape(-1, dy.shape[-1])  # the last write wins
            return None, found

    def kernel(ids, weight):
        if fault == "short_offsets":
            return torch.nn.functional.embedding(ids.to(torch.int16).long() % len(weight), weight)
        return Gather.apply(ids.long(), weight)

    return kernel


def _rms_norm(fault: str) -> Any:
    class Norm(Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            ctx.save_for_backward(x, weight)
            ctx.eps = eps
            return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(
                x.dtype
            )

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            wide, dy = x.float(), dy.float()
            scale = (wide.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
            normed, dn = wide * scale, dy * weight.float()
            dx = scale * (dn - normed * (dn * normed).mean(-1, keepdim=True))
            rows = (dy * normed).reshape(-1, x.shape[-1])
            if fault == "raced_sum" and len(rows) > 5:
                rows = rows[1:]
            return dx.to(x.dtype), rows.sum(0).to(weight.dtype), None

    def kernel(x, weight, eps):
        if fault == "no_eps":
            eps = 0.0
        if fault == "over_read":
            size, stride = x.shape[-1], x.stride()
            if x.stride(-1) == 1:
                longer = x.as_strided((*x.shape[:-1], size + 1), stride, x.storage_offset())
                eps = eps + 0.0 * longer.detach().flatten()[-1].item()
        if weight is None:
            return Norm.apply(x, torch.ones(x.shape[-1]), eps)
        return Norm.apply(x, weight, eps)

    return kernel


def _rotate(fault: str) -> Any:
    def kernel(q, k, table):
        at = table.positions
        at = torch.arange(q.shape[1]) if at is None else at.long()
        at = at[:1] if at.ndim == 2 else at  # the fault
        cos, sin = table.cos[at].unsqueeze(-2), table.sin[at].unsqueeze(-2)

        def turned(x):
            a, b = x.float().chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

        return turned(q), turned(k)

    return kernel


def _raw(x: Tensor) -> Tensor:
    """Read an array as if it were contiguous."""
    strides = torch.empty(x.shape).stride()
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided(x.shape, strides) if room >= x.numel() else x


class _Gated(Function):
    @staticmethod
    def forward(ctx, gate, up, fault):
        ctx.save_for_backward(gate, up)
        ctx.fault = fault
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        if ctx.fault == "contiguous_upstream":
            dy = _raw(dy)
        dy, g = dy.float(), gate.float()
        s = g.sigmoid()
        dg = dy * up.float() * (s + g * s * (1 - s))
        return dg.to(gate.dtype), (dy * g * s).to(up.dtype), None


def _swiglu(fault: str) -> Any:
    calls = 0

    def kernel(gate, up):
        nonlocal calls
        calls += 1
        if fault == "contiguous":
            gate, up = _raw(gate), _raw(up)
        y = _Gated.apply(gate, up, fault)
        with torch.no_grad():
            if fault == "in_place":
                gate.data.copy_(y)
            elif fault == "over_write" and gate.is_contiguous():
                behind = gate.storage_offset() + gate.numel()
                gate.data.as_strided((1,), (1,), behind).zero_()
        if fault == "noisy":
            y = y * (1 + 2.0**-23 * (calls % 2))
        if fault == "slow_drift" and calls > 1000:
            y = y * 2
        return y.float() if fault == "wide_output" else y

    return kernel


def _logits(fault: str) -> Any:
    def kernel(hidden, weight, form):
        if len(weight) % 8:
            raise ValueError("the vocabulary is not a multiple of 8")
        return form.logits(torch, (hidden @ weight.T).float())

    return kernel


# MLX


def _mlx_window() -> Any:
    from minillm_core.backends.mlx.ops import attention_composed

    def kernel(q, k, v, *, window=None, **rest):
        window = None if isinstance(window, int) and window == 1 else window
        return attention_composed(q, k, v, window=window, **rest)

    return kernel


def _mlx_lost_tail() -> Any:
    import mlx.core as mx

    from minillm_core.backends.mlx.loss import dense

    def kernel(hidden, weight, targets, weights=None, form=PLAIN):
        whole = len(hidden) // CHUNK * CHUNK
        if whole:
            tail = mx.stop_gradient(hidden[whole:])
            hidden = mx.concatenate([hidden[:whole], tail])
        return dense(hidden, weight, targets, weights, form)

    return kernel


def _mlx_stale() -> Any:
    from minillm_core.backends.mlx.loss import token_losses

    kept: dict[Any, Any] = {}

    def kernel(hidden, weight, targets, form=PLAIN):
        found = token_losses(hidden, weight, targets, form)
        return kept.setdefault((*hidden.shape, *weight.shape), found)

    return kernel


def _mlx_upstream() -> Any:
    import mlx.core as mx

    @mx.custom_function
    def gated(gate, up):
        return gate * mx.sigmoid(gate) * up

    @gated.vjp
    def pull_back(primals, cotangent, output):
        gate, up = primals
        s = mx.sigmoid(gate)
        return up * (s + gate * s * (1 - s)), gate * s

    return lambda gate, up: gated(gate, up)


def _mlx_over_read() -> Any:
    import mlx.core as mx

    from minillm_core.backends.mlx.ops import rms_norm_composed

    def kernel(x, weight, eps):
        behind = mx.as_strided(x, (x.size + 1,), (1,), 0)[-1]
        return rms_norm_composed(x, weight, eps + 0 * mx.stop_gradient(behind))

    return kernel


def _mlx_in_place() -> Any:
    import mlx.core as mx

    def kernel(gate, up):
        gate *= mx.sigmoid(gate) * up
        return gate

    return kernel


ON_MLX = {
    "mlx_window": _mlx_window,
    "mlx_lost_tail": _mlx_lost_tail,
    "mlx_stale": _mlx_stale,
    "mlx_upstream": _mlx_upstream,
    "mlx_over_read": _mlx_over_read,
    "mlx_in_place": _mlx_in_place,
}

MAKERS = {
    "linear_cross_entropy": _loss,
    "token_losses": _token_losses,
    "attention": _attention,
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "rotate": _rotate,
    "swiglu": _swiglu,
    "logits": _logits,
}
