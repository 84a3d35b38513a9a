"""FLOPs and bytes of one training step of a plan, counted instead of measured.

PyTorch's training step is run at full size on tensors without data (meta device), and every matrix
product in it is counted by torch's own formulas (``torch.utils.flop_counter``), including products of
plugins and Muon's orthogonalisation. Two ops have device-dependent kernels and are
counted by their contracts (benchmarks/counted_ops.py): attention (4 B T W H D FLOPs forward, W
the keys that a query sees) and the loss (2 N C V), each with twice that backward.

FLOPs are those of products only, two for a multiplication and its addition. Scores hidden by a causal
mask are counted, as in the plan's estimate; recomputation is not.

Bytes are counted in two ways, since they depend on the compiler's fusion:

- *least*: the operands and the result of every product, once each; reads and writes of lookups; and
  the optimizer's arrays. Everything else is assumed to be fused.
- *apart*: the operands and the results of every operation, each in a separate kernel, as in eager
  mode. A compiled step is between the two.

The optimizer's bytes, in both: each gradient once in float32, each master weight and each number of
optimizer state twice (read, written) as it is stored, each compute copy once. Products in its stages are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.counted_ops import attention, cross_entropy
from benchmarks.counting import PHASES, Counts, StepCounter
from minillm_core.backends.base import Batch, Binding
from minillm_core.backends.torch.model import TorchFramework
from minillm_core.backends.torch.ops import TorchOps
from minillm_core.backends.torch.trainer import TorchTrainer
from minillm_core.config.schema import Shape
from minillm_core.nn.decoder import decoder
from minillm_core.nn.module import materialising
from minillm_core.optim.update import cycles_of, due_at
from minillm_core.plan import Plan
from minillm_core.plan.estimate import ITEMSIZE

__all__ = ["Arithmetic", "arithmetic"]

MASTER = 4  # float32
POINTS = 100  # of the run at which schedules are sampled: window warm-ups, removed targets


@dataclass(frozen=True)
class Arithmetic:
    """The counts of one optimizer step on one device; the run's mean if steps differ."""

    flops: Mapping[str, float]  # phase -> FLOPs of products
    least: Mapping[str, float]  # phase -> bytes, all but products and lookups fused away
    apart: Mapping[str, float]  # phase -> bytes, every operation a kernel
    tokens: int

    @property
    def all_flops(self) -> float:
        """FLOPs of all three phases."""
        return sum(self.flops.values())

    @property
    def least_bytes(self) -> float:
        """Bytes of all three phases, fused."""
        return sum(self.least.values())

    @property
    def apart_bytes(self) -> float:
        """Bytes of all three phases, unfused."""
        return sum(self.apart.values())

    def data(self) -> dict[str, Any]:
        """Return the counts as JSON, in whole numbers."""
        return {
            "flops": _rounded(self.flops),
            "least_bytes": _rounded(self.least),
            "apart_bytes": _rounded(self.apart),
            "tokens": self.tokens,
        }


def arithmetic(plan: Plan, dtype: str = "bfloat16") -> Arithmetic:
    """Count a plan's step.

    Args:
        plan: the plan to count, with the core's kernels whatever it is bound to elsewhere.
        dtype: of the compute copies: bfloat16, float16 or float32.

    Raises:
        ValueError: the compute dtype is unknown.
    """
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype {dtype!r}: one of {', '.join(ITEMSIZE)}")
    shares: Counter[tuple[Any, ...]] = Counter()
    stages: dict[tuple[Any, ...], Mapping[str, float]] = {}
    steps = plan.config.train.steps or 1
    for index in range(POINTS):
        at = (index + 0.5) / POINTS
        values, shape = plan.values(at), plan.shape_at(max(1, round(at * steps)))
        key = (shape, *(values[name] for name in plan.staged))
        shares[key] += 1
        stages.setdefault(key, values)
    traffic = _updates(plan, ITEMSIZE[dtype])
    total = Counts()
    for key, share in shares.items():
        for step, of_these in _turns(plan).items():
            counts = _traced(plan, dtype, stages[key], key[0], step)
            total.add(counts, share / POINTS * of_these)
    return Arithmetic(
        flops=dict(total.flops),
        least={p: total.least[p] + (traffic if p == "optimizer" else 0) for p in PHASES},
        # The update is one kernel per rule when compiled or fused: only its products are
        # counted from the trace.
        apart={p: total.least[p] + traffic if p == "optimizer" else total.apart[p] for p in PHASES},
        tokens=plan.tokens_per_step,
    )


def _turns(plan: Plan) -> Mapping[int, float]:
    """Map steps, from 0, to fractions of all steps, grouped by the stages that are due."""
    cycles = cycles_of(plan.groups)
    steps = range(lcm(*cycles))
    due = [due_at(cycles, step) for step in steps]
    return {due.index(one): count / len(steps) for one, count in Counter(due).items()}


def _traced(plan: Plan, dtype: str, values: Mapping[str, float], shape: Shape, step: int) -> Counts:
    """Trace one step at these schedule values, on batches of one shape."""
    counter = StepCounter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = _trainer(plan, dtype, counter)
        trainer.step_timer = counter.mark
        optimizer: Any = trainer.optimizer
        optimizer.steps = step  # a number read on the host: these tensors have no data
        micro = [_batch(plan, shape)] * shape.accumulate
        with counter:
            trainer.step(micro, values, shape.tokens)
    return counter.counts


def _trainer(plan: Plan, dtype: str, counter: StepCounter) -> TorchTrainer:
    """Build the trainer of a GPU's step on tensors without data."""
    ops = TorchOps(
        {"attention": attention(counter), "linear_cross_entropy": cross_entropy(counter)}
    )
    ops.matmul_dtype = dtype  # as on an NVIDIA GPU
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
    return TorchTrainer(plan, binding, model, framework, fused=False)


def _batch(plan: Plan, of: Shape) -> Batch:
    """Build a micro-batch of the right shapes."""
    shape = (of.rows, of.seq_len)
    known = ("ids", "labels", "documents", "positions")
    declared = {name: np.zeros((*shape, *f.shape), f.dtype) for name, _, f in plan.batch_fields}
    return {name: np.zeros(shape, np.int32) for name in known} | declared


def _updates(plan: Plan, itemsize: int) -> float:
    """Count bytes of gradients, master weights, state and compute copies."""
    copies = itemsize if itemsize < MASTER else 0
    state = sum(
        one.nbytes
        for group in plan.groups
        for entries in group.state_arrays().values()
        for one in entries.values()
    )
    return plan.num_parameters * (MASTER + 2 * MASTER + copies) + 2 * state


def _rounded(numbers: Mapping[str, float]) -> dict[str, int]:
    return {name: round(number) for name, number in numbers.items()}
