"""Training on MLX: steps are queued from arrays to new arrays, and the old ones kept until a step is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from minillm_core.backends.base import Batch, Binding, Snapshot, StepResult, Trainer
from minillm_core.backends.figures import step_result
from minillm_core.backends.mlx import random, saving, scaler
from minillm_core.backends.mlx.graphs import Arrays, Figures, Graphs
from minillm_core.backends.mlx.inference import MLXModel
from minillm_core.backends.mlx.module import MLXFramework
from minillm_core.nn.initial import initial_arrays
from minillm_core.optim.update import initial_state
from minillm_core.plan import Plan
from minillm_core.plan.stages import stages_of

__all__ = ["MLXTrainer", "Queued"]

UNREAD = 2
"""Steps queued and not read at most: each keeps the arrays from before it."""


@dataclass(eq=False)
class Queued:
    """A step that may still be left out: what it was made from."""

    batches: list[Arrays]
    given: Arrays
    staged: Mapping[str, int]
    masters: Arrays  # before it
    state: dict[str, Any]  # before it
    key: mx.array  # before it
    figures: Figures = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)  # the figures, once it is read


class MLXTrainer(MLXModel, Trainer):
    """A model and its optimizer.

    Args:
        plan: what to train.
        binding: how; recorded in run.json.
        model: materialised and filled, float32.
        framework: what the model stands on.
        join: multiply leaves that read the same input as one.
    """

    def __init__(
        self, plan: Plan, binding: Binding, model: Any, framework: MLXFramework, *, join: bool
    ) -> None:
        super().__init__(plan, binding, model, framework, join=join)
        self.groups = {str(index): group for index, group in enumerate(plan.groups)}
        self.state = {**self.state, **self._at_first()}
        self.graphs = Graphs(
            plan,
            model,
            framework,
            self.weights,
            self.statistics,
            self.groups,
            compiled=binding.compile,
        )
        self.unread: list[Queued] = []  # oldest first
        mx.eval(self.masters, self.state)

    def step(
        self,
        micro: Sequence[Batch],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Queued | None:
        """One optimizer step, queued."""
        while len(self.unread) >= UNREAD:
            self._settle(self.unread[0])
        staged = {name: int(values[name]) for name in self.staged}
        given = {n: mx.array(float(v)) for n, v in values.items() if n not in staged}
        given["normaliser"] = mx.array(1.0 / supervised)
        batches = [self.moved(host) for host in micro]
        if self.binding.compile and self.staged and not self.graphs.made:
            with random.kept():
                self._warm_up(batches, given)
        queued = Queued(batches, given, staged, self.masters, self.state, random.key())
        if not self._advance(queued, cancelled):
            random.restore(queued.key)
            return None
        self.unread.append(queued)
        return queued

    def _advance(self, queued: Queued, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Queue the step behind what is queued; False where it was cancelled."""
        batches, given, staged = queued.batches, queued.given, queued.staged
        if len(batches) == 1:
            whole = self.graphs.part("whole", staged)
            stepped = whole(self.masters, self.state, batches[0], given)
        else:
            stepped = self._accumulated(batches, given, staged, cancelled)
            if stepped is None:
                return False
        self.masters, self.state, queued.figures = stepped
        mx.async_eval(self.masters, self.state, queued.figures, random.key())
        return True

    def _settle(self, first: Queued) -> None:
        """Wait for the oldest unread step; where it is not finite, make do without it.

        Choosing between old and new arrays within the graph cost 20 % of a step on an H100, since
        the update no longer was one pass. Old arrays cost nothing but room: they are kept until
        the step is read, and the steps behind it are queued again from there.
        """
        mx.eval(first.figures)
        first.numbers = {name: float(np.array(value)) for name, value in first.figures.items()}
        self.unread.remove(first)
        if first.numbers["skipped"]:
            after = self.unread[0].state if self.unread else self.state
            self.masters = first.masters
            self.state = {**first.state, "scaler": after["scaler"]}  # it learns from the overflow
            for later in self.unread:
                later.masters, later.state = self.masters, self.state
                random.restore(later.key)
                self._advance(later)
        first.masters, first.state = {}, {}

    def _settle_all(self) -> None:
        while self.unread:
            self._settle(self.unread[0])

    def _warm_up(self, batches: Sequence[Arrays], given: Arrays) -> None:
        """Trace and compile every stage's step, and keep nothing of what it gives."""
        for stage in stages_of(self.plan):
            if len(batches) == 1:
                whole = self.graphs.part("whole", stage)
                mx.eval(whole(self.masters, self.state, batches[0], given))
            else:
                mx.eval(self._accumulated(batches[:2], given, stage))

    def _accumulated(
        self,
        batches: Sequence[Arrays],
        given: Arrays,
        staged: Mapping[str, int],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[Arrays, dict[str, Any], Figures] | None:
        copies = self.weights.copies(self.masters)  # once a step, for all micro-batches
        adds, sums = self.graphs.part("adds", staged), None
        for batch in batches:
            if sums is None:
                sums = self.graphs.part("first", staged)(copies, self.state, batch, given)
            elif cancelled():
                return None
            else:
                sums = adds(copies, self.state, batch, given, sums)
            mx.async_eval(sums)  # a graph that spans micro-batches would hold all activations
        mean = mx.array(1.0 / len(batches))
        return self.graphs.part("update", {})(self.masters, self.state, sums, given, mean)

    def read(self, handle: Queued) -> StepResult:
        """Wait for a step's figures, and for those of the steps before it."""
        while handle in self.unread:
            self._settle(self.unread[0])
        return step_result(handle.numbers)

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Nats and predictions of the main target; training does not notice."""
        self._settle_all()
        with random.kept():
            return super().evaluate(batches)

    def last_logits(self, batch: Batch, scope_of: Callable[..., Any]) -> np.ndarray:
        """float32 (V,) after the last column of one row; training does not notice."""
        self._settle_all()
        with random.kept():
            return super().last_logits(batch, scope_of)

    def snapshot(self) -> Snapshot:
        """Everything to save; waits for steps that nobody has read."""
        self._settle_all()
        masters, state, key = saving.copies((self.masters, self.state, random.key()))
        return Snapshot(
            lambda: saving.arrays(masters, state, self.groups) | {random.NAME: np.array(key)}
        )

    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The inverse of :meth:`arrays`."""
        self._settle_all()
        self.masters = saving.masters(arrays, self.masters)
        self.state = saving.state(arrays, self.state, self.groups)
        mx.eval(self.masters, self.state)
        random.load(arrays)

    def restart(self, seed: int) -> None:
        """Begin anew with the initial values of a seed."""
        self._settle_all()
        fresh = initial_arrays(self.model, self.plan.inits, seed)
        self.load(fresh)
        self.state = {**self.state, **self._at_first()}
        mx.eval(self.state)
        random.seed(seed)
        mx.reset_peak_memory()

    def _at_first(self) -> dict[str, Any]:
        """All of the state that no seed draws."""
        return {
            "optimizer": initial_state(self.groups, mx.zeros),
            "scaler": scaler.start() if self.binding.dtype == "float16" else {},
            "updates": mx.array(0.0),
        }

    @property
    def traces(self) -> int:
        """How often a part of a step was traced."""
        return self.graphs.traces

    def witnesses(self) -> Mapping[str, int]:
        """What took part so far."""
        return dict(self.framework.seen)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        mx.synchronize()

    def peak_bytes(self) -> int | None:
        """Largest memory that MLX held."""
        return mx.get_peak_memory()
