"""The seam between the loop and a framework: as thin as it can be.

A backend turns a plan into native objects; a trainer runs steps. Neither the loop nor the plan
imports a framework. Nothing here waits for the device unless its docstring says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from minillm_core.ops.select import Choice

if TYPE_CHECKING:
    from minillm_core.plan import Plan

__all__ = [
    "Backend",
    "Batch",
    "Binding",
    "Choice",
    "Decoding",
    "Model",
    "Snapshot",
    "StepResult",
    "Trainer",
    "lone_row",
]

Batch = Mapping[str, np.ndarray]
"""ids, labels, documents, positions: int32 (rows, T); weights: float32 (rows, T), optional; declared fields."""


@dataclass(frozen=True)
class Binding:
    """What a plan is bound to on this machine: recorded in run.json, outside the plan's hash."""

    backend: str  # "torch", "mlx", "numpy"
    device: str  # "cpu", "cuda:0", "gpu"
    device_name: str  # "NVIDIA H100 80GB HBM3", "Intel Xeon ..."
    reason: str  # why this backend and device
    dtype: str  # compute dtype: "float32", "bfloat16", "float16"
    compile: bool
    checkpointing: bool
    deterministic: bool
    kernels: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()  # TF32 stated, leaves multiplied as one, ...
    peak_flops: float | None = None  # dense FLOP/s of the compute dtype, where known


@dataclass(frozen=True)
class Snapshot:
    """State at one moment. Call it once, in any thread, while training goes on."""

    bring: Callable[[], dict[str, np.ndarray]]  # waits until everything is on the host
    note: str | None = None  # what a user should be told of how it was taken

    def __call__(self) -> dict[str, np.ndarray]:
        """The arrays, on the host."""
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
    """One sequence being continued: keys, values and what nodes look back on are kept."""

    @abstractmethod
    def feed(self, batch: Batch) -> np.ndarray:
        """Go on by some columns.

        Args:
            batch: one row of the columns that follow those fed so far, every field of it, with
                positions counted from the sequence's start.

        Returns:
            float32 (V,): the logits after the last column. Waits.
        """


class Model(ABC):
    """A model on one device, to be evaluated and sampled from."""

    binding: Binding

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Nats of the main target over all batches, and the number of predictions. Waits."""

    @abstractmethod
    def next_logits(self, batch: Batch) -> np.ndarray:
        """float32 (V,): the logits after the last column of a batch of one row. Waits."""

    @abstractmethod
    def decoding(self) -> Decoding:
        """A sequence of no columns yet, to be continued with the weights that are loaded now."""

    @abstractmethod
    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take ``model.<parameter>`` and ``state.<name>``; other names are left alone.

        Raises:
            KeyError: a parameter, or a state, of the model is missing.
            ValueError: a shape differs.
        """


class Trainer(Model):
    """A model, its optimizer state and its compiled step."""

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
            cancelled: asked before each micro-batch but the first.

        Returns:
            None where it was cancelled: nothing has changed.
        """

    @abstractmethod
    def read(self, handle: Any) -> StepResult:
        """Wait for the step behind ``handle`` and give its figures."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Everything to save as it is after the steps queued so far.

        Does not wait for them, where the framework and the device's memory allow it; else the note
        says so.

        By name: ``model.<parameter>`` in float32 (the master weights),
        ``optimizer.<stage>.<entry>.<parameter>``, ``optimizer.updates``, ``state.<name>``,
        ``scaler.<name>``, all float32; of the framework's own generators ``random.torch.cpu`` and
        ``random.torch.cuda`` (uint8), ``random.mlx`` (uint32).
        """

    def arrays(self) -> dict[str, np.ndarray]:
        """A snapshot's arrays. Waits."""
        return self.snapshot()()

    @abstractmethod
    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The inverse of :meth:`arrays`; generators that are not there go on as they are.

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
        """What was seen to take part so far -> how often (at trace time, or in eager).

        ``node:<path>``, ``stage:<rule>.<stage>``; ``kernel:<op>=<name>`` where it is a plugin's;
        ``init:<parameter>`` where it started as the plugin that claimed it said.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Largest memory in use since the start; None where the framework cannot say."""


class Backend(ABC):
    """A framework on a device."""

    name: str
    binding: Binding

    @abstractmethod
    def model(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> Model:
        """The plan's model with its seeded initial values, without an optimizer.

        Args:
            max_positions: longest row that will ever be fed; default: the plan's seq_len.
        """

    @abstractmethod
    def trainer(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> Trainer:
        """Materialise the plan's model with its seeded initial values, ready to step.

        Seeds the framework's own generators too, for modules of plugins that draw from them; on
        MLX these belong to a thread: the one that made a trainer has to step it.

        Args:
            max_positions: longest row that will ever be fed; default: the plan's seq_len.
        """


def lone_row(ids: np.ndarray) -> Batch:
    """``ids`` (T,) as a batch of one row that nothing is predicted for."""
    row = np.asarray(ids, np.int32)[None]
    return {
        "ids": row,
        "labels": np.full_like(row, -1),
        "documents": np.zeros_like(row),
        "positions": np.arange(row.shape[1], dtype=np.int32)[None],
    }
