"""The seam between the loop and a framework: as thin as it can be.

A backend turns a plan into native objects; a trainer runs steps. Neither the loop nor the plan
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

# Shows a piece of work, by its name, while it is entered.
Phase = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Binding:
    """The decisions that bind a plan to this machine: recorded in run.json, outside the plan's hash."""

    backend: str  # "torch", "mlx", "numpy"
    device: str  # "cpu", "cuda:0", "gpu"
    device_name: str  # "NVIDIA H100 80GB HBM3", "Intel Xeon ..."
    reason: str  # why this backend and device
    dtype: str  # compute dtype: "float32", "bfloat16", "float16"
    compile: bool
    checkpointing: bool
    deterministic: bool
    kernels: tuple[Choice, ...] = ()
    inputs: tuple[str, ...] = ()  # staged values that are inputs of the compiled step, not baked in
    notes: tuple[str, ...] = ()  # TF32 stated, leaves multiplied as one, ...
    peak_flops: float | None = None  # dense FLOP/s of the compute dtype, where known


@dataclass(frozen=True)
class Snapshot:
    """State at one moment. Call it once, in any thread, while training goes on."""

    bring: Callable[[], dict[str, np.ndarray]]  # waits until everything is on the host
    note: str | None = None  # how it was taken, where a user should know
    beside: Any = None  # other processes that write parts of the same checkpoint: see ``commit``

    def __call__(self) -> dict[str, np.ndarray]:
        """Return the arrays, on the host."""
        return self.bring()


@dataclass(frozen=True)
class StepResult:
    """A step's figures, read from the device."""

    loss: float  # main target, nats per supervised token, before the update
    grad_norm: float  # global, before clipping
    terms: Mapping[str, float] = field(default_factory=dict)  # loss terms and further targets
    skipped: bool = False  # something was not finite: nothing was updated
    overflow: bool = False  # ... because float16's range did not suffice: the loss scale was halved


class Decoding(ABC):
    """One sequence being continued: its KV cache, and the columns that nodes look back on."""

    @abstractmethod
    def feed(self, batch: Batch) -> np.ndarray:
        """Continue the sequence by some columns.

        Args:
            batch: one row of the columns that follow those fed so far, every field of it, with
                positions counted from the sequence's start.

        Returns:
            float32 (V,): the logits after the last column. Waits.
        """


class Model(ABC):
    """A model on one device, to be evaluated and sampled from."""

    plan: Plan
    binding: Binding
    model: Any  # the framework's own module: torch.nn.Module, mlx.nn.Module

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Sum the nats of the main target over all batches, and count the predictions. Waits."""

    def losses(self, batch: Batch) -> np.ndarray:
        """Return the nats of each label of a batch, float32 (rows, T), 0 where it is -1. Waits."""
        raise NotImplementedError

    def scores(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the nats of each label, and how far its logit is below the likeliest, float32 (rows, T). Waits.

        All logits of the batch are held at once. Where a label is -1, what is returned means nothing.
        """
        raise NotImplementedError

    @abstractmethod
    def next_logits(self, batch: Batch) -> np.ndarray:
        """Return the logits after the last column of a batch of one row, float32 (V,). Waits."""

    @abstractmethod
    def decoding(self) -> Decoding:
        """Begin a sequence of no columns, to be continued with the weights that are loaded now."""

    @abstractmethod
    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take ``model.<parameter>`` and ``state.<name>``; other names are left alone.

        Raises:
            KeyError: a parameter, or a state, of the model is missing.
            ValueError: a shape differs.
        """


class Trainer(Model):
    """A model, its optimizer state and its compiled step."""

    step_timer: Callable[[str], None] | None = None
    """Called while a step is queued, where it is set: with the name of each part of the step as that
    begins (on torch forward, backward, optimizer; on MLX, which then runs gradients and optimizer
    as two graphs, those), and with "" at its end. It takes the time, and waits where it has to."""

    phase: Phase = nullcontext  # around each variant of the step that is compiled by its name

    ranks: Ranks = ALONE

    compile_seconds: float = 0.0
    """Of steps: for sizes that are not known before they are met. No clock of a run counts them."""

    @abstractmethod
    def step(
        self,
        micro: Sequence[Batch],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Queue one optimizer step and return a handle for :meth:`read`; never waits.

        A step whose loss, a term of it, or whose gradients' norm is not finite changes nothing but
        float16's loss scale and the random numbers drawn; the device finds that out.

        Args:
            micro: the step's micro-batches.
            values: dynamic schedule values at this step (``lr``, ``weight_decay``, ...).
            supervised: labels >= 0 over all micro-batches and ranks; losses are divided by it.
            cancelled: called before each micro-batch but the first.

        Returns:
            None where it was cancelled: nothing has changed.
        """

    @abstractmethod
    def read(self, handle: Any) -> StepResult:
        """Wait for the step behind ``handle`` and give its figures."""

    def join(self, ranks: Ranks) -> None:
        """Train together with other processes from here on: each steps its part of the micro-batches.

        Gradients, figures and statistics are added up over all of them before the update, which each
        makes by itself, unless they :meth:`shard` it.
        """
        self.ranks = ranks

    def shard(self, what: str) -> None:
        """Make a share of each update alone from here on, and keep the state of that alone; the others do too.

        Every rank calls it at the same moment, and :meth:`snapshot`, whose arrays rank 0 alone gets.

        Args:
            what: ``updates``, or ``weights`` too, of which each rank then has a part.
        """
        raise NotImplementedError

    def lent(self) -> AbstractContextManager[None]:
        """Let any rank evaluate and sample by itself inside; at the end wait until none does."""
        return nullcontext()

    def like(self) -> dict[str, Any]:
        """Return a snapshot's arrays, of all processes, for :meth:`load` and :meth:`resume` to take where no others are.

        Each has shape and dtype of the whole array; of divided ones this process can read its part alone.
        """
        return self.arrays()

    def own(self) -> dict[str, np.ndarray]:
        """Return what of a snapshot's arrays this process updates: without shares everything. Waits."""
        return self.arrays()

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Take everything to save as it is after the steps queued so far.

        Does not wait for them, where the framework and the device's memory allow it; else the note
        says so.

        By name: ``model.<parameter>`` in float32 (the master weights),
        ``optimizer.<stage>.<entry>.<parameter>``, ``optimizer.updates``, where stages have turns
        ``optimizer.steps`` (int64), ``state.<name>``,
        ``scaler.<name>``, all float32, but for entries that a stage keeps narrow: int8, and int16 the
        bits of bfloat16; of the framework's own generators ``random.torch.cpu`` and
        ``random.torch.cuda`` (uint8), ``random.mlx`` (uint32).
        """

    def arrays(self) -> dict[str, np.ndarray]:
        """Return a snapshot's arrays. Waits."""
        return self.snapshot()()

    @abstractmethod
    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore what :meth:`arrays` gave; generators that are not there stay as they are.

        Raises:
            KeyError: anything else that :meth:`arrays` would give is missing.
            ValueError: a shape differs.
        """

    @abstractmethod
    def restart(self, seed: int) -> None:
        """Begin anew with the initial values that a seed draws, as a fresh trainer would.

        Weights, State, optimizer, loss scale and the framework's generators; what is compiled
        stays, so that runs that differ in their seed alone are compiled once. Waits.
        """

    @abstractmethod
    def witnesses(self) -> Mapping[str, int]:
        """Return the evidence of plugins so far -> how often (at trace time, or in eager).

        ``node:<path>``, ``stage:<rule>.<stage>``; ``kernel:<op>=<name>`` where it is a plugin's;
        ``init:<parameter>`` where it started as the plugin that claimed it declares.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Return the largest memory in use since the start; None where that is not known.

        Of what the framework allocated, since :meth:`restart` at the latest; torch does not count
        that on a CPU, so there it is the resident memory of the whole process, which never falls:
        Python, libraries, data and every model before are in it.
        """


class Backend(ABC):
    """A framework on a device."""

    name: str
    binding: Binding

    @abstractmethod
    def model(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> Model:
        """Materialise the plan's model with its seeded initial values, without an optimizer.

        Args:
            max_positions: longest row that will ever be fed; default: the plan's seq_len.
        """

    @abstractmethod
    def trainer(
        self, plan: Plan, seed: int, *, max_positions: int | None = None, ranks: Ranks = ALONE
    ) -> Trainer:
        """Materialise the plan's model with its seeded initial values, ready to step.

        Seeds the framework's own generators too, for modules of plugins that draw from them; on
        MLX these belong to a thread: the one that made a trainer has to step it.

        Args:
            max_positions: longest row that will ever be fed; default: the plan's seq_len.
            ranks: the processes that train together, each of which calls it: joined, and divided (see
                :meth:`Trainer.shard`) as they say. Of ``weights`` a process never has more than its
                part, and one parameter whole while that is drawn.
        """


def lone_row(ids: np.ndarray) -> Batch:
    """Make a batch of one row of ``ids`` (T,), with no prediction in it."""
    row = np.asarray(ids, np.int32)[None]
    return {
        "ids": row,
        "labels": np.full_like(row, -1),
        "documents": np.zeros_like(row),
        "positions": np.arange(row.shape[1], dtype=np.int32)[None],
    }
