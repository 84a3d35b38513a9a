"""A step on torch: one graph for a micro-batch's loss and gradients, one for the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm_core.backends.base import Batch, Binding, Snapshot, StepResult, Trainer
from minillm_core.backends.figures import TERM, step_result
from minillm_core.backends.torch import foreach, random
from minillm_core.backends.torch.compiling import own_code
from minillm_core.backends.torch.feed import Later, numbers_to
from minillm_core.backends.torch.guard import unsound
from minillm_core.backends.torch.inference import TorchModel
from minillm_core.backends.torch.module import TorchFramework
from minillm_core.backends.torch.optimizer import Optimizer
from minillm_core.backends.torch.random import Generators
from minillm_core.backends.torch.scaler import LossScaler
from minillm_core.backends.torch.snapshot import Snapshots
from minillm_core.errors import OutOfMemory
from minillm_core.nn.initial import initial_arrays
from minillm_core.plan import Plan
from minillm_core.plan.stages import stages_of

__all__ = ["TorchTrainer"]


class TorchTrainer(TorchModel, Trainer):
    """A model and its optimizer on one device.

    Args:
        plan: what to train.
        binding: how; recorded in run.json.
        model: materialised and filled, float32.
        framework: what the model stands on.
        join: multiply leaves that read the same input as one.
        fused: use torch's fused AdamW.
        compiler: see the backend.
    """

    def __init__(
        self,
        plan: Plan,
        binding: Binding,
        model: Any,
        framework: TorchFramework,
        *,
        join: bool,
        fused: bool,
        compiler: Callable[..., Any] = torch.compile,
    ) -> None:
        super().__init__(plan, binding, model, framework, join=join)
        self.optimizer = Optimizer(
            plan,
            self.weights,
            framework,
            compiler=compiler if binding.compile else None,
            fused=fused,
        )
        self.binding = replace(binding, notes=(*binding.notes, *self.optimizer.notes))
        self.compiler = compiler
        self.scaler = LossScaler(self.device) if binding.dtype == "float16" else None
        self.graphs: dict[tuple[float, ...], Any] = {}  # one a combination of staged values
        self.mark: Callable[[str], None] = _unmarked  # told of a step's parts: while benching
        self.gradients: list[Tensor] | None = None
        self.random, self.snapshots = Generators(self.device), Snapshots(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def step(
        self,
        micro: Sequence[Batch],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Later | None:
        """One optimizer step, queued."""
        try:
            return self._step(micro, values, supervised, cancelled)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the device's memory did not suffice (peak {self.peak_bytes()} bytes)"
            ) from error

    def _step(
        self,
        micro: Sequence[Batch],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Callable[[], bool],
    ) -> Later | None:
        staged = {name: int(values[name]) for name in self.staged}
        dynamic = {name: float(v) for name, v in values.items() if name not in staged}
        given: dict[str, Any] = dict(
            numbers_to(dynamic | {"normaliser": 1.0 / supervised}, self.device)
        )
        inverse = given["normaliser"]
        if self.scaler is not None:
            given["normaliser"] = inverse * self.scaler.scale
        drawn = self.random.states() if len(micro) > 1 else {}
        if self.binding.compile and self.staged and not self.graphs:
            with self.random.kept():
                self._warm_up(self.moved(micro[0]), given)
        graph = self._graph(staged)
        figures: dict[str, Tensor] = {}
        for index, host in enumerate(micro):
            if index and cancelled():
                self.random.restore(drawn)
                return None
            self.mark("forward")
            batch = self.moved(host)
            loss = graph(batch, given)
            self.mark("backward")
            self._accumulate(loss.objective, first=index == 0, only=len(micro) == 1)
            share = loss.count * inverse
            _add(figures, "loss", loss.sums[0].detach() * inverse)
            _add(figures, "objective", loss.objective.detach())
            present = self.plan.spec.loss.present(staged)
            for target, total in zip(present, loss.sums[1:], strict=True):
                _add(figures, TERM + target.key, total.detach() * inverse)
            for key, value in loss.terms.items():
                _add(figures, TERM + key, value * share)
            self.statistics.add(loss.statistics, first=index == 0)
        self.mark("optimizer")
        later = self._update(figures, given, len(micro))
        self.mark("")
        return later

    def _update(
        self, figures: dict[str, Tensor], given: dict[str, Tensor], micro_batches: int
    ) -> Later:
        """Everything that a step changes, unless a figure or the gradients' norm is not finite."""
        grads = self._named_gradients()
        norm, unscale = self.optimizer.norm(grads), None
        if self.scaler is not None:
            figures["scale"] = self.scaler.scale
            unscale = 1.0 / self.scaler.scale
            norm = norm * unscale
        figures["grad_norm"] = norm
        packed = torch.stack([figure.float() for figure in figures.values()])
        found = unsound(packed)
        if self.scaler is not None:
            self.scaler.judge(found)
        self.optimizer.step(grads, given, norm, unscale, found)
        self.statistics.write(micro_batches, found)
        return Later([*figures, "skipped"], torch.cat([packed, found.reshape(1)]))

    def _warm_up(self, batch: dict[str, Tensor], given: dict[str, Tensor]) -> None:
        """Compile every stage's step, forward and backward, and keep nothing of what it gives."""
        for stage in stages_of(self.plan):
            objective = self._graph(stage)(batch, given).objective
            torch.autograd.grad(
                objective, [leaf.tensor for leaf in self.weights.leaves], materialize_grads=True
            )

    def _graph(self, staged: Mapping[str, int]) -> Any:
        """The micro-batch's loss with these staged values baked in."""
        key = tuple(staged.values())
        if key not in self.graphs:

            def micro_loss(batch: dict[str, Tensor], given: dict[str, Tensor]) -> Any:
                return self.model(batch, {**given, **staged})

            self.graphs[key] = (
                self.compiler(own_code(micro_loss), fullgraph=True, dynamic=False)
                if self.binding.compile
                else micro_loss
            )
        return self.graphs[key]

    def _accumulate(self, objective: Tensor, *, first: bool, only: bool) -> None:
        """Gradients of one micro-batch, added up in float32."""
        leaves = [leaf.tensor for leaf in self.weights.leaves]
        fresh = torch.autograd.grad(objective, leaves, materialize_grads=True)
        with torch.no_grad():
            if only and fresh[0].dtype == torch.float32:
                self.gradients = list(fresh)
            elif self.gradients is None:
                self.gradients = [grad.float() for grad in fresh]
            elif first:
                foreach.copy_(self.gradients, fresh)
            else:
                foreach.add_(self.gradients, fresh)

    def _named_gradients(self) -> dict[str, Tensor]:
        """Parameter -> float32 gradient; row blocks of a joined leaf are views."""
        assert self.gradients is not None
        return {
            name: part
            for leaf, grad in zip(self.weights.leaves, self.gradients, strict=True)
            for name, part in leaf.split(grad)
        }

    def read(self, handle: Later) -> StepResult:
        """Wait for a step's figures."""
        return step_result(handle.read())

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Nats and predictions of the main target; training does not notice."""
        with self.random.kept():
            return super().evaluate(batches)

    def last_logits(self, batch: Batch, scope_of: Callable[..., Any]) -> np.ndarray:
        """float32 (V,) after the last column of one row; training does not notice."""
        with self.random.kept():
            return super().last_logits(batch, scope_of)

    def snapshot(self) -> Snapshot:
        """Everything to save."""
        drawn = {f"random.{name}": state for name, state in self.random.states().items()}
        return self.snapshots.take(self._everything() | drawn)

    def _everything(self) -> dict[str, Tensor]:
        tensors = self.held()
        tensors |= {f"optimizer.{name}": t for name, t in self.optimizer.arrays().items()}
        if self.scaler is not None:
            tensors |= {f"scaler.{name}": t for name, t in self.scaler.arrays().items()}
        return tensors

    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The inverse of :meth:`arrays`."""
        self.fill(self._everything(), arrays)
        self.random.load(arrays)

    def restart(self, seed: int) -> None:
        """Begin anew with the initial values of a seed."""
        fresh = initial_arrays(self.model, self.plan.inits, seed)
        with torch.no_grad():
            for tensor in self.optimizer.arrays().values():
                tensor.zero_()
        if self.scaler is not None:
            self.scaler.restart()
        self.fill(self.held(), fresh)
        random.seed(seed)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def witnesses(self) -> Mapping[str, int]:
        """What took part so far."""
        return dict(self.framework.seen)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def peak_bytes(self) -> int | None:
        """Largest memory that torch held; None on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return None


def _unmarked(part: str) -> None:
    """Nobody asks where the time goes."""


def _add(figures: dict[str, Tensor], name: str, value: Tensor) -> None:
    figures[name] = figures[name] + value if name in figures else value
