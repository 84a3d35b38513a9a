"""The interface between the training loop and a framework, kept as thin as possible.

A backend builds native objects from a plan; a trainer runs steps. Neither the loop nor the plan
imports a framework. Nothing here waits for the device unless its docstring says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from minillm_core.backends.ranks import ALONE, Ranks
from minillm_core.ops.select import Choice

if TYPE_CHECKING:
    from minillm_core.plan import Plan

Batch = Mapping[str, np.ndarray]
"""ids, labels, documents, positions: int32 (rows, T); weights: float32 (rows, T), optional; declared fields."""

# Displays a piece of work, by its name, while the context is open.
Phase = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Binding:
    """The decisions that bind a plan to this machine; recorded in run.json, not part of the plan's hash."""

    backend: str  # "torch", "mlx", "numpy"
    device: str  # "cpu", "cuda:0", "gpu"
    device_name: str  # "NVIDIA H100 80GB HBM3", "Intel Xeon ..."
    reason: str  # why this backend and device
    dtype: str  # compute dtype: "float32", "bfloat16", "float16"
    compile: bool
    checkpointing: bool | str  # "selective"
    deterministic: bool
    kernels: tuple[Choice, ...] = ()
    inputs: tuple[str, ...] = ()  # staged values that are inputs of the compiled step, not baked in
    host_masks: bool = False  # attention is given these, and documents, on the host
    notes: tuple[str, ...] = ()  # for the user: TF32 off, kernels passed over, ...
    peak_flops: float | None = None  # dense FLOP/s of the compute dtype, if known


@dataclass(frozen=True)
class Snapshot:
    """The training state at one moment. Call it once, in any thread, while training continues."""

    to_host: Callable[[], dict[str, np.ndarray]]  # waits until everything is on the host
    note: str | None = None  # how it was taken, if the user should know
    beside: Any = None  # other processes that write parts of the same checkpoint: see ``commit``

    def __call__(self) -> dict[str, np.ndarray]:
        """Return the arrays on the host. Waits."""
        return self.to_host()


@dataclass(frozen=True)
class StepResult:
    """The metrics of a step, read from the device."""

    loss: float  # main target, nats per supervised token, before the update
    grad_norm: float  # global, before clipping
    terms: Mapping[str, float] = field(default_factory=dict)  # loss terms and further targets
    skipped: bool = False  # a NaN or infinity occurred: nothing was updated
    overflow: bool = False  # ... because of float16's range: the loss scale was halved


class Decoding(ABC):
    """The decoding of one sequence: its KV cache, and the earlier columns that nodes look back on."""

    @abstractmethod
    def feed(self, batch: Batch) -> np.ndarray:
        """Append some columns to the sequence. Waits.

        Args:
            batch: one row with the columns that follow those fed so far, all fields, and positions
                counted from the sequence's start.

        Returns:
            float32 (V,): the logits after the last column.
        """


class Model(ABC):
    """A model on one device, for evaluation and generation."""

    plan: Plan
    binding: Binding
    model: Any  # the framework's own module: torch.nn.Module, mlx.nn.Module

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Return the sum of nats of the main target over all batches, and the number of predictions. Waits."""

    def losses(self, batch: Batch) -> np.ndarray:
        """Return the nats of each label of a batch, float32 (rows, T), 0 where it is -1. Waits."""
        raise NotImplementedError

    def scores(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the nats of each label, and the largest logit minus its own, float32 (rows, T) each. Waits.

        All logits of the batch are held at once. Results at labels of -1 have no meaning.
        """
        raise NotImplementedError

    @abstractmethod
    def next_logits(self, batch: Batch) -> np.ndarray:
        """Return the logits after the last column of a batch of one row, float32 (V,). Waits."""

    @abstractmethod
    def decoding(self) -> Decoding:
        """Start an empty sequence, to be decoded with the weights that are loaded now."""

    @abstractmethod
    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load ``model.<parameter>`` and ``state.<name>``; ignore other names.

        Raises:
            KeyError: a parameter or State of the model is missing.
            ValueError: a shape differs.
        """


class Trainer(Model):
    """A model, its optimizer state and its compiled step."""

    step_timer: Callable[[str], None] | None = None
    """If set, called while a step is queued, with the name of each part of the step as it begins, and with
    "" at the end: forward, backward, optimizer on torch; gradients, optimizer on MLX, which then runs
    these as two graphs. It measures the time, and may synchronise."""

    phase: Phase = nullcontext  # entered with a name around each compilation of the step

    ranks: Ranks = ALONE

    compile_seconds: float = 0.0
    """Seconds spent on compiling graphs in the middle of a run, for new sizes; not counted as training time."""

    @abstractmethod
    def step(
        self,
        micro: Sequence[Batch],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Queue one optimizer step and return a handle for :meth:`read`; never waits.

        If the loss, a loss term, or the gradient norm is not finite, the step changes only float16's
        loss scale and the state of the random generators; the check runs on the device.

        Args:
            micro: the step's micro-batches.
            values: dynamic schedule values at this step (``lr``, ``weight_decay``, ...).
            supervised: labels >= 0 over all micro-batches and ranks; losses are divided by it.
            cancelled: called before each micro-batch except the first.

        Returns:
            The handle; None if the step was cancelled: nothing has changed.
        """

    @abstractmethod
    def read(self, handle: Any) -> StepResult:
        """Wait for the step of ``handle`` and return its metrics."""

    def join(self, ranks: Ranks) -> None:
        """Train together with other processes from now on: each computes its part of the micro-batches.

        Gradients, metrics and statistics are all-reduced before the update, which every process
        computes in full, unless they :meth:`shard` it.
        """
        self.ranks = ranks

    def shard(self, what: str) -> None:
        """Shard the update from now on: this process updates its share, and holds only that optimizer state.

        Every rank calls this at the same moment, and also :meth:`snapshot`, whose arrays only rank 0 gets.

        Args:
            what: ``updates``, or ``weights`` to shard the parameters as well.
        """
        raise NotImplementedError

    def inference_context(self) -> AbstractContextManager[None]:
        """Return a context in which any rank may evaluate and sample on its own; on exit wait for all ranks."""
        return nullcontext()

    def placeholders(self) -> dict[str, Any]:
        """Return a snapshot's arrays, as defaults for :meth:`load` and :meth:`resume` if others are missing.

        Each has the shape and dtype of the whole array; of a sharded one this process can read only its part.
        """
        return self.arrays()

    def local_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of a snapshot that this process updates; all of them without sharding. Waits."""
        return self.arrays()

    def local_tensors(self) -> Mapping[str, Any]:
        """Return :meth:`local_arrays` as they are on the device, if the framework can do so without a copy."""
        return self.local_arrays()

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Take a snapshot of everything to save, as it is after the steps queued so far.

        Does not wait for these steps if the framework and the device's memory allow it; otherwise the
        snapshot has a note.

        Names: ``model.<parameter>`` in float32 (the master weights),
        ``optimizer.<stage>.<entry>.<parameter>``, ``optimizer.updates``, if a stage has ``every`` > 1
        ``optimizer.steps`` (int64), ``state.<name>``, ``scaler.<name>``; all float32, except for
        quantised state: int8, and int16 with the bits of bfloat16. The framework's own random generators:
        ``random.torch.cpu`` and ``random.torch.cuda`` (uint8), ``random.mlx`` (uint32).
        """

    def arrays(self) -> dict[str, np.ndarray]:
        """Return a snapshot's arrays. Waits."""
        return self.snapshot()()

    @abstractmethod
    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the arrays of :meth:`arrays`; random generators missing there stay unchanged.

        Raises:
            KeyError: any other array of :meth:`arrays` is missing.
            ValueError: a shape differs.
        """

    @abstractmethod
    def restart(self, seed: int) -> None:
        """Reset to the initial values of a seed, like a new trainer. Waits.

        Resets weights, State, optimizer state, loss scale and the framework's random generators, but
        keeps compiled graphs, so that runs that differ only in their seed are compiled once.
        """

    @abstractmethod
    def witnesses(self) -> Mapping[str, int]:
        """Return the evidence so far that plugins' code ran: key -> count (at trace time, or in eager mode).

        Keys: ``node:<path>``, ``stage:<rule>.<stage>``; ``kernel:<op>=<name>`` for a plugin's kernel;
        ``init:<parameter>`` for a parameter that started with its claimed initial values.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Return the peak memory in bytes since the start, or the last :meth:`restart`; None if unknown.

        It counts the framework's allocations. torch does not count these on a CPU, so there it is the
        peak resident memory of the whole process, which never falls and includes Python, libraries,
        data and all earlier models.
        """


class Backend(ABC):
    """A framework on a device."""

    name: str
    binding: Binding

    @abstractmethod
    def model(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> Model:
        """Materialise the plan's model with its seeded initial values, without an optimizer.

        Args:
            max_positions: length of the longest row to come; default: the plan's seq_len.
        """

    @abstractmethod
    def trainer(
        self, plan: Plan, seed: int, *, max_positions: int | None = None, ranks: Ranks = ALONE
    ) -> Trainer:
        """Materialise the plan's model with its seeded initial values, and its optimizer, ready to step.

        Also seeds the framework's own random generators, for plugins' modules that draw from them. On
        MLX these belong to a thread: the thread that creates a trainer has to run its steps.

        Args:
            max_positions: length of the longest row to come; default: the plan's seq_len.
            ranks: the processes that train together, each of which calls this; the trainer joins them,
                and is sharded (:meth:`Trainer.shard`) by ``ranks.shard``. With sharded ``weights`` a
                process never holds more than its part, plus one whole parameter while it is drawn.
        """


def lone_row(ids: np.ndarray) -> Batch:
    """Make a batch of one row of ``ids`` (T,), without labels to predict."""
    row = np.asarray(ids, np.int32)[None]
    return {
        "ids": row,
        "labels": np.full_like(row, -1),
        "documents": np.zeros_like(row),
        "positions": np.arange(row.shape[1], dtype=np.int32)[None],
    }
