"""What one training step of a plan computes and moves, counted and not measured.

The step that trains on PyTorch is run on tensors without contents, at its full size, and every
product in it is counted by torch's own formulas (``torch.utils.flop_counter``): what plugins add to
the model, and Muon's orthogonalisation, too. Two ops have kernels that differ by device and stand
here as their contracts say: attention (4 B T W H D FLOPs forward, W the keys that a query sees) and
the loss (2 N C V), each with twice that backward.

FLOPs are those of products alone, two for a multiplication and its addition. What a causal mask
hides is counted, as in the plan's estimate; recomputation is not.

Bytes are counted twice, since they depend on what a compiler makes one kernel of:

- *least*: the operands and the result of every product, once each; what lookups read and write; and
  the optimizer's arrays. All else is taken to be done on the way.
- *apart*: the operands and the results of every operation, each a kernel of its own, as in eager
  mode. A compiled step lies between the two.

The optimizer moves, in both: each gradient once in float32, each master weight and each number of
its state twice (read, written), each compute copy once. Products in its stages come on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from minillm_core.backends.base import Batch, Binding
from minillm_core.backends.torch.module import TorchFramework
from minillm_core.backends.torch.ops import TorchOps
from minillm_core.backends.torch.trainer import TorchTrainer
from minillm_core.nn.decoder import decoder
from minillm_core.nn.module import materialising
from minillm_core.plan import Plan
from minillm_core.plan.estimate import ITEMSIZE

__all__ = ["PHASES", "Arithmetic", "arithmetic"]

PHASES: tuple[str, ...] = ("forward", "backward", "optimizer")
MASTER = 4  # float32
POINTS = 100  # of the run, at which staged values are asked: window warm-ups, targets that leave

aten = torch.ops.aten
LOOKUPS = (aten.embedding, aten.index_select, aten.index, aten.gather)
"""They read what they give, and not the whole table."""

FREE = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)


@dataclass(frozen=True)
class Arithmetic:
    """Of one optimizer step on one device; the run's mean where steps differ."""

    flops: Mapping[str, float]  # phase -> FLOPs of products
    least: Mapping[str, float]  # phase -> bytes, all but products and lookups fused away
    apart: Mapping[str, float]  # phase -> bytes, every operation a kernel
    tokens: int

    @property
    def all_flops(self) -> float:
        """Of the three phases."""
        return sum(self.flops.values())

    @property
    def least_bytes(self) -> float:
        """Of the three phases, fused."""
        return sum(self.least.values())

    @property
    def apart_bytes(self) -> float:
        """Of the three phases, unfused."""
        return sum(self.apart.values())

    def data(self) -> dict[str, Any]:
        """As JSON: whole numbers."""
        return {
            "flops": _rounded(self.flops),
            "least_bytes": _rounded(self.least),
            "apart_bytes": _rounded(self.apart),
            "tokens": self.tokens,
        }


def arithmetic(plan: Plan, dtype: str = "bfloat16") -> Arithmetic:
    """Count a plan's step.

    Args:
        plan: what to count. Its kernels are the core's, whatever it is bound to elsewhere.
        dtype: of the compute copies: bfloat16, float16 or float32.

    Raises:
        ValueError: there is no such compute dtype.
    """
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(ITEMSIZE)}")
    shares: Counter[tuple[float, ...]] = Counter()
    stages: dict[tuple[float, ...], Mapping[str, float]] = {}
    for index in range(POINTS):
        values = plan.values((index + 0.5) / POINTS)
        key = tuple(values[name] for name in plan.staged)
        shares[key] += 1
        stages.setdefault(key, values)
    traffic = _updates(plan, ITEMSIZE[dtype])
    total = _Counts()
    for key, share in shares.items():
        total.add(_traced(plan, dtype, stages[key]), share / POINTS)
    return Arithmetic(
        flops=dict(total.flops),
        least={p: total.least[p] + (traffic if p == "optimizer" else 0) for p in PHASES},
        # The update is one kernel a rule wherever it runs compiled or fused: only its products are
        # counted by what was traced.
        apart={p: total.least[p] + traffic if p == "optimizer" else total.apart[p] for p in PHASES},
        tokens=plan.tokens_per_step,
    )


class _Counts:
    """Numbers by phase."""

    def __init__(self) -> None:
        self.flops, self.least, self.apart = (dict.fromkeys(PHASES, 0.0) for _ in range(3))

    def add(self, other: _Counts, share: float) -> None:
        """Add a part of others."""
        for ours, theirs in zip(
            (self.flops, self.least, self.apart),
            (other.flops, other.least, other.apart),
            strict=True,
        ):
            for phase, number in theirs.items():
                ours[phase] += share * number


class _Counter(TorchDispatchMode):
    """Sees every operation of a step; ``phase`` is what the trainer marks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.phase = _Counts(), ""

    def mark(self, phase: str) -> None:
        """Take the place of a trainer's ``mark``."""
        self.phase = phase

    def product(self, flops: float, *arrays: Tensor) -> None:
        """A kernel of products that moves these arrays."""
        if self.phase:
            moved = sum(_bytes(array) for array in arrays)
            self.counts.flops[self.phase] += flops
            self.counts.least[self.phase] += moved
            self.counts.apart[self.phase] += moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if not self.phase or func.is_view or packet in FREE:
            return out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if packet in LOOKUPS:
            operands = results + operands[1:]
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            self.product(flops, *operands, *results)
            return out
        moved = sum(_bytes(array) for array in (*operands, *results))
        self.counts.apart[self.phase] += moved
        if packet in LOOKUPS or packet is aten.embedding_dense_backward:
            self.counts.least[self.phase] += moved
        return out


def _traced(plan: Plan, dtype: str, values: Mapping[str, float]) -> _Counts:
    """One step at these schedule values."""
    counter = _Counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = _trainer(plan, dtype, counter)
        trainer.mark = counter.mark
        micro = [_batch(plan)] * plan.config.train.accumulate
        with counter:
            trainer.step(micro, values, plan.tokens_per_step)
    return counter.counts


def _trainer(plan: Plan, dtype: str, counter: _Counter) -> TorchTrainer:
    """The trainer of a GPU's step, but that its tensors hold nothing."""
    ops = TorchOps(
        {"attention": _attention(counter), "linear_cross_entropy": _cross_entropy(counter)}
    )
    ops.matmul_dtype = dtype  # as on a GPU of NVIDIA's
    framework = TorchFramework(ops)
    with materialising(framework):
        model = decoder(plan.spec, checkpointing=False)
    binding = Binding(
        backend="torch",
        device="cpu",
        device_name="none",
        reason="counted",
        dtype=dtype,
        compile=False,
        checkpointing=False,
        deterministic=False,
    )
    return TorchTrainer(plan, binding, model, framework, join=False, fused=False)


def _batch(plan: Plan) -> Batch:
    """A micro-batch of the right shapes."""
    shape = (plan.config.train.rows, plan.config.train.seq_len)
    known = ("ids", "labels", "documents", "positions")
    declared = {name: np.zeros((*shape, *f.shape), f.dtype) for name, _, f in plan.batch_fields}
    return {name: np.zeros(shape, np.int32) for name in known} | declared


def _attention(counter: _Counter) -> Callable[..., Tensor]:
    """A kernel of the op ``attention`` that counts, and computes nothing."""

    class Attention(Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flops: int) -> Tensor:
            y = torch.empty_like(q)
            ctx.save_for_backward(q, k, v, y)
            ctx.flops = flops
            counter.product(flops, q, k, v, y)
            return y

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            grads = tuple(torch.empty_like(array) for array in saved[:3])
            counter.product(2 * ctx.flops, *saved, upstream[0], *grads)
            return *grads, None

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        rows, queries, heads, head_dim = q.shape
        seen = k.shape[1] if window is None else min(window, k.shape[1])
        return Attention.apply(q, k, v, 4 * rows * queries * seen * heads * head_dim)

    return attention


def _cross_entropy(counter: _Counter) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A kernel of the loss that counts, and computes nothing; logits in the compute dtype."""

    class Loss(Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
            logits = hidden.new_empty((hidden.shape[0], weight.shape[0]))
            ctx.save_for_backward(hidden, weight)
            counter.product(2 * hidden.numel() * weight.shape[0], hidden, weight, logits, logits)
            return hidden.new_empty((), dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
            hidden, weight = ctx.saved_tensors
            logits = hidden.new_empty((hidden.shape[0], weight.shape[0]))
            grads = torch.empty_like(hidden), torch.empty_like(weight)
            flops = 4 * hidden.numel() * weight.shape[0]
            # their gradient is written once and read by both products
            counter.product(flops, hidden, weight, logits, logits, logits, *grads)
            return grads

    def cross_entropy(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        form: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        zero = hidden.new_zeros((), dtype=torch.float32)
        return Loss.apply(hidden, weight), zero.expand(targets.shape[0]), zero

    return cross_entropy


def _updates(plan: Plan, itemsize: int) -> float:
    """Bytes of gradients, masters, state and compute copies."""
    copies = itemsize if itemsize < MASTER else 0
    state = sum(
        prod(shape)
        for group in plan.groups
        for entries in group.state_shapes().values()
        for shape in entries.values()
    )
    return plan.num_parameters * (MASTER + 2 * MASTER + copies) + state * 2 * MASTER


def _bytes(array: Tensor) -> int:
    """What of it lies in memory: a broadcast axis once."""
    held = prod(n for n, step in zip(array.shape, array.stride(), strict=True) if step or n == 0)
    return held * array.element_size()


def _rounded(numbers: Mapping[str, float]) -> dict[str, int]:
    return {name: round(number) for name, number in numbers.items()}
