"""Pipeline parallelism on torch: each process computes consecutive layers, by torch.distributed.pipelining.

stages.py chooses the layers and the arrays sent between stages; this module runs them. Every process holds all
parameters: gradients of other stages' parameters are 0, and are summed over all processes like gradients
of other rows. So are loss sums, which only the last stage computes, and statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import _foreach_add_ as foreach_add_  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_zero_ as foreach_zero_  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from minillm_core.inspection import GATHERED, Loss, warmed
from minillm_mesh.collectives import met
from minillm_mesh.layout import Part
from minillm_mesh.stages import GPIPE, ONE_F_ONE_B, Stage, stages

SCHEDULES: Mapping[str, Any] = {GPIPE: ScheduleGPipe, ONE_F_ONE_B: Schedule1F1B}

Arrays = tuple[Tensor, ...]


class Pipeline:
    """The pipeline of a process: its stage and its neighbours.

    Args:
        stage: of this process, from 0.
        count: number of stages.
        group: the processes of the stages, in order.
    """

    def __init__(self, stage: int, count: int, group: dist.ProcessGroup) -> None:
        self.stage, self.count, self.group = stage, count, group
        self.runs: dict[tuple[Any, ...], _Run] = {}  # of one trainer
        self.current: _Run | None = None

    def losses(
        self,
        trainer: Any,
        micro: Sequence[Any],
        staged: Mapping[str, int],
        given: Mapping[str, Tensor],
    ) -> Iterator[Loss]:
        """Compute a step's losses and accumulate the gradients of this stage: see Ranks.pipeline_losses."""
        if trainer.step_timer is not None:  # forward and backward passes interleave
            trainer.step_timer("forward")
        if self.current is None or self.current.trainer is not trainer:
            self.current, self.runs = None, {}
            if trainer.binding.compile:  # every variant at once, before timing
                for those, count, host in warmed(trainer.plan, trainer.phase, micro[0]):
                    batch = self._moved(trainer, host, those, trained=False)
                    run = self._run(trainer, batch, count or len(micro), those, given)
                    run.compile(batch, given)
        batches = [self._moved(trainer, host, staged) for host in micro]
        run = self._run(trainer, batches[0], len(batches), staged, given)
        if self.current is not None and self.current is not run:
            self.current.schedule = None  # its buffers are freed first
        self.current = run
        yield from run.step(batches, given)

    def _moved(
        self, trainer: Any, host: Any, staged: Mapping[str, int], *, trained: bool = True
    ) -> Mapping[str, Tensor]:
        """Move a stage's inputs to its device; only the last stage needs the loss's reference models."""
        if self.stage + 1 == self.count:
            return trainer.fields(host, staged, trained=trained)
        return trainer.to_device(host)

    def _run(
        self,
        trainer: Any,
        batch: Mapping[str, Tensor],
        micro: int,
        staged: Mapping[str, int],
        given: Mapping[str, Tensor],
    ) -> _Run:
        key = (*staged.values(), batch["ids"].shape, micro)
        if key not in self.runs:
            self.runs[key] = _Run(self, trainer, micro, staged, batch, given)
        return self.runs[key]


class _Run:
    """A stage for one batch size, one number of micro-batches and one set of staged values."""

    def __init__(
        self,
        pipeline: Pipeline,
        trainer: Any,
        micro: int,
        staged: Mapping[str, int],
        batch: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
    ) -> None:
        self.pipeline, self.trainer, self.micro, self.staged = pipeline, trainer, micro, staged
        self.parts = stages(trainer.plan, trainer.model, staged, pipeline.count)
        self.part = self.parts[pipeline.stage]
        self.graphs: dict[int, Callable[..., Any]] = {}
        self.borders, self.statistics = self._tried(batch, given)
        self.schedule: Any = None
        self.failure: Exception | None = None

    def _scheduled(self) -> Any:
        """Build torch's pipeline schedule, with its receive buffers."""
        own, mesh = self.pipeline.stage, self.trainer.plan.config.mesh
        stage = _Stage(
            _Called(self._forward),
            own,
            self.pipeline.count,
            self.trainer.device,
            input_args=self.borders[own],
            output_args=self.borders[own + 1],
            group=self.pipeline.group,
        )
        stage.after = self._collect
        return SCHEDULES[mesh.schedule](
            stage, n_microbatches=self.micro, loss_fn=lambda output, _: output[0], scale_grads=False
        )

    def compile(self, batch: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        """Compile the stage, forward and backward, on zeros."""
        zeros = [
            torch.zeros_like(one, device=self.trainer.device, requires_grad=True)
            for one in self.borders[self.pipeline.stage]
        ]
        with self.trainer.random.preserved():
            outputs, _ = self._graph(batch)(batch, given, _handed(zeros))
            parameters = [*zeros, *self.trainer.weights.trained.values()]
            found = [one for one in outputs if one.requires_grad]
            if found:
                total = [torch.zeros_like(one) for one in found]
                torch.autograd.grad(found, parameters, total, allow_unused=True)

    def _graph(self, batch: Mapping[str, Tensor]) -> Callable[..., Any]:
        """Return the stage for a batch's number of gathered positions, compiled if the binding requires it."""
        positions = batch.get(GATHERED, batch["ids"]).numel()
        if positions not in self.graphs:
            self.graphs[positions] = self.trainer.compiled(self._compute)
        return self.graphs[positions]

    def _tried(
        self, batch: Mapping[str, Tensor], given: Mapping[str, Tensor]
    ) -> tuple[list[Arrays], dict[str, Tensor]]:
        """Run all stages locally without gradients, to find the shapes sent between stages, and the statistics."""
        borders, statistics = list[Arrays](), dict[str, Tensor]()
        outputs: Arrays = ()
        with torch.no_grad(), self.trainer.random.preserved():
            for part in self.parts:
                borders.append(tuple(_described(one) for one in outputs))
                x, scope, found = self._through(part, batch, given, outputs)
                outputs = _outputs(part, x, scope)
                statistics |= found
        objective = torch.empty(1, device="meta", requires_grad=True)
        return [*borders, (objective,)], statistics

    def _through(
        self,
        part: Stage,
        batch: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
        received: Arrays,
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """Run a stage; return its output x (B, T, C), the scope, and its statistics."""
        model: Any = self.trainer.model
        scope = model.scope(batch, {**given, **self.staged})
        if part.first:
            x = model.embedded(scope)
        else:
            x, *others = received
            arrays = dict(zip(part.received, others, strict=True))
            scope.reads |= arrays
            scope.emitted |= arrays  # terms are among them
        model.compute_streams(part.streams, scope)
        earlier = model.emitted(scope)
        x, statistics = model.run_blocks(part.blocks, x, scope)
        if part.last:
            x = model.before_head(x, scope)
        return x, scope, statistics | earlier | model.emitted(scope)

    def _compute(
        self, batch: Mapping[str, Tensor], given: Mapping[str, Tensor], received: Arrays
    ) -> tuple[Arrays, Loss | dict[str, Tensor]]:
        """Compute the stage's outputs and its statistics; for the last stage the objective (1,) and the loss."""
        x, scope, statistics = self._through(self.part, batch, given, received)
        if not self.part.last:
            return _outputs(self.part, x, scope), statistics
        values = {**given, **self.staged}
        loss = self.trainer.model.loss_of(batch, values, x, scope, statistics)
        return (loss.objective.reshape(1),), loss

    def _forward(self, *received: Tensor) -> Arrays:
        """Compute the next micro-batch: both schedules process them in order."""
        batch = self.batches[len(self.found)]
        try:
            outputs, found = self._graph(batch)(batch, self.given, _handed(received))
        except Exception as error:  # torch would replace it by a RuntimeError
            self.failure = error
            raise
        self.found.append(found)
        return tuple(one if one.requires_grad else _ended(one) for one in outputs)

    def step(
        self, batches: Sequence[Mapping[str, Tensor]], given: Mapping[str, Tensor]
    ) -> Iterator[Loss]:
        """Run a step's micro-batches through the pipeline."""
        self.batches, self.given, self.found = batches, given, []
        trainer = self.trainer
        trained = trainer.weights.trained.values()
        if trainer.share is not None:
            foreach_zero_(trainer.share.sums)
        elif trainer.gradients is None:
            trainer.gradients = trainer.optimizer.widened(map(torch.zeros_like, trained))
        else:
            foreach_zero_(trainer.gradients)
        target = {"target": torch.empty(len(batches))} if self.part.last else {}
        self.schedule = self.schedule or self._scheduled()
        try:
            with met():
                self.schedule.step(**target, return_outputs=False)
        except RuntimeError as error:
            if (failure := self.failure) is not None:
                raise failure from failure.__cause__
            raise error
        yield from map(self._loss, self.found)
        self.found = []

    def _loss(self, found: Loss | dict[str, Tensor]) -> Loss:
        """Build the loss of a micro-batch: in all stages but the last its sums are 0."""
        trainer = self.trainer
        if isinstance(found, Loss):
            own, loss = found.statistics, found._replace(objective=found.objective.detach())
        else:
            spec, zero = trainer.plan.spec.loss, torch.zeros((), device=trainer.device)
            sums = zero.expand(1 + len(spec.present(self.staged)))
            terms = {term.key: (zero, zero) for term in spec.terms}
            own, loss = found, Loss(zero, sums, zero, terms, {})
        kinds = trainer.statistics.kinds
        statistics = {
            name: own[name]
            if name in own
            else torch.full_like(one, float("-inf") if kinds[name] == "max" else 0.0)
            for name, one in self.statistics.items()
        }
        return loss._replace(statistics=statistics)

    @torch.no_grad()
    def _collect(self) -> None:
        """Accumulate a micro-batch's gradients, which torch leaves in the parameters, in float32."""
        trainer = self.trainer
        parameters = [*trainer.weights.trained.values()]
        if (share := trainer.share) is None:
            held = [*zip(trainer.gradients, (one.grad for one in parameters), strict=True)]
        else:  # the sums are per part, rank by rank
            found = zip(share.sums, share.pieces, strict=True)
            held = [(one, _part(part, parameters[at].grad)) for one, (at, part) in found]
        pairs = [(one, fresh) for one, fresh in held if fresh is not None]
        if pairs:  # not of frozen layers
            foreach_add_([one for one, _ in pairs], [fresh for _, fresh in pairs])
        for one in parameters:
            one.grad = None


class _Called(nn.Module):
    """A function wrapped as a module for torch's stages."""

    def __init__(self, function: Callable[..., Arrays]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *received: Tensor) -> Arrays:
        """Call the function."""
        return self.function(*received)


class _Stage(PipelineStage):
    """torch's pipeline stage, with a callback after each micro-batch's backward pass."""

    after: Callable[[], None]

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> None:
        """Run the backward pass of a micro-batch, then the callback."""
        super().backward_one_chunk(*arguments, **named)
        self.after()


class _Received(Function):
    """Identity; the gradient of an unused input is 0 instead of None, which torch's stages cannot send."""

    @staticmethod
    def forward(ctx: Any, *x: Tensor) -> Arrays:
        return tuple(one.view_as(one) for one in x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Arrays:
        return upstream


def _part(part: Part, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else part.of(gradient)


def _handed(received: Sequence[Tensor]) -> Arrays:
    """Return the received arrays as a stage's inputs; the first stage receives none."""
    return _Received.apply(*received) if received else ()


def _outputs(part: Stage, x: Tensor, scope: Any) -> Arrays:
    """List the arrays that a stage sends: x, and those that later stages read."""
    held = {**scope.reads, **scope.emitted}
    return tuple(one.contiguous() for one in (x, *(held[name] for name in part.sent)))


def _described(x: Tensor) -> Tensor:
    """Return an empty array of the same shape and dtype that requires gradients."""
    return torch.empty_like(x, device="meta", requires_grad=True)


def _ended(x: Tensor) -> Tensor:
    """Return an array that no trainable parameter affects such that it accepts the next stage's gradient."""
    return x.detach().requires_grad_()


__all__ = ["Pipeline"]
