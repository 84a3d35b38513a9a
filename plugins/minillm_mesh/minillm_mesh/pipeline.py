"""Pipeline parallel on torch: each process computes a run of layers, by torch.distributed.pipelining.

Which layers, and what crosses a border, is stages.py's; this is what runs them. Parameters are whole in every
process: gradients of those that a stage does not compute are 0 there, and are added up over all processes
as gradients of other rows are. So are the sums of losses, which the last stage alone has, and statistics.
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

from minillm_core.inspection import Loss
from minillm_mesh.collectives import met
from minillm_mesh.stages import GPIPE, ONE_F_ONE_B, Stage, stages

SCHEDULES: Mapping[str, Any] = {GPIPE: ScheduleGPipe, ONE_F_ONE_B: Schedule1F1B}

Arrays = tuple[Tensor, ...]


class Pipeline:
    """A process's stage, and those beside it.

    Args:
        stage: of this process, from 0.
        count: how many there are.
        group: the processes that have them, in their order.
    """

    def __init__(self, stage: int, count: int, group: dist.ProcessGroup) -> None:
        self.stage, self.count, self.group = stage, count, group
        self.run: _Run | None = None

    def losses(
        self,
        trainer: Any,
        micro: Sequence[Any],
        staged: Mapping[str, int],
        given: Mapping[str, Tensor],
        timer: Callable[[str], None],
    ) -> Iterator[Loss]:
        """Compute a step's losses, and add up the gradients of this stage: see Ranks.pipelined."""
        timer("forward")  # forward and backward passes of micro-batches are not apart
        last = self.stage + 1 == self.count
        batches = [trainer.fields(one, staged) if last else trainer.moved(one) for one in micro]
        key = (*staged.values(), batches[0]["ids"].shape, len(batches))
        if self.run is None or self.run.trainer is not trainer or self.run.key != key:
            self.run = None  # its buffers are freed first
            self.run = _Run(self, trainer, key, staged, batches[0], given)
        yield from self.run.step(batches, given)


class _Run:
    """A stage for batches of one size and number, and one set of staged values."""

    def __init__(
        self,
        pipeline: Pipeline,
        trainer: Any,
        key: tuple[Any, ...],
        staged: Mapping[str, int],
        batch: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
    ) -> None:
        self.trainer, self.key, self.staged = trainer, key, staged
        self.parts = stages(trainer.plan, trainer.model, staged, pipeline.count)
        self.part = self.parts[pipeline.stage]
        self.graphs: dict[int, Callable[..., Any]] = {}
        borders, self.statistics = self._tried(batch, given)
        module = _Called(self._forward)
        stage = _Stage(
            module,
            pipeline.stage,
            pipeline.count,
            trainer.device,
            input_args=borders[pipeline.stage],
            output_args=borders[pipeline.stage + 1],
            group=pipeline.group,
        )
        stage.after = self._collect
        self.schedule = SCHEDULES[trainer.plan.config.mesh.schedule](
            stage, n_microbatches=key[-1], loss_fn=lambda output, _: output[0], scale_grads=False
        )
        self.failure: Exception | None = None

    def _tried(
        self, batch: Mapping[str, Tensor], given: Mapping[str, Tensor]
    ) -> tuple[list[Arrays], dict[str, Tensor]]:
        """Compute all stages here, without gradients, to see what is sent: shapes at each border, and statistics."""
        borders, statistics = list[Arrays](), dict[str, Tensor]()
        outputs: Arrays = ()
        with torch.no_grad(), self.trainer.random.kept():
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
        """Run a stage: x (B, T, C) behind it, the scope, and its statistics."""
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
        x, statistics = model.through(part.blocks, x, scope)
        if part.last:
            x = model.ended(x, scope)
        return x, scope, statistics | earlier | model.emitted(scope)

    def _compute(
        self, batch: Mapping[str, Tensor], given: Mapping[str, Tensor], received: Arrays
    ) -> tuple[Arrays, Loss | dict[str, Tensor]]:
        """Compute what the stage sends; of the last one the objective (1,) and the loss, else statistics."""
        x, scope, statistics = self._through(self.part, batch, given, received)
        if not self.part.last:
            return _outputs(self.part, x, scope), statistics
        values = {**given, **self.staged}
        loss = self.trainer.model.loss_of(batch, values, x, scope, statistics)
        return (loss.objective.reshape(1),), loss

    def _forward(self, *received: Tensor) -> Arrays:
        """Compute the next micro-batch: both schedules take them in their order."""
        batch = self.batches[len(self.found)]
        if received:
            received = _Received.apply(*received)
        positions = batch.get("loss.gather", batch["ids"]).numel()
        if positions not in self.graphs:
            self.graphs[positions] = self.trainer.compiled(self._compute)
        try:
            outputs, found = self.graphs[positions](batch, self.given, received)
        except Exception as error:  # torch hands on a RuntimeError of its own
            self.failure = error
            raise
        self.found.append(found)
        return tuple(one if one.requires_grad else _ended(one) for one in outputs)

    def step(
        self, batches: Sequence[Mapping[str, Tensor]], given: Mapping[str, Tensor]
    ) -> Iterator[Loss]:
        """Run a step's micro-batches through the stage."""
        self.batches, self.given, self.found = batches, given, []
        trainer = self.trainer
        if trainer.gradients is None:
            trained = trainer.weights.trained.values()
            trainer.gradients = [torch.zeros_like(one, dtype=torch.float32) for one in trained]
        else:
            foreach_zero_(trainer.gradients)
        target = {"target": torch.empty(len(batches))} if self.part.last else {}
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
        """Make the loss of a micro-batch: of other stages than the last its sums are 0."""
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
        """Add a micro-batch's gradients, which torch leaves in the parameters, to the step's in float32."""
        trainer = self.trainer
        parameters = [*trainer.weights.trained.values()]
        fresh = [one.grad for one in parameters]
        if trainer.share is not None:
            fresh = trainer.share.cut(fresh)
        pairs = [pair for pair in zip(trainer.gradients, fresh, strict=True) if pair[1] is not None]
        if pairs:  # not of frozen layers
            foreach_add_([held for held, _ in pairs], [one for _, one in pairs])
        for one in parameters:
            one.grad = None


class _Called(nn.Module):
    """A function as torch's stages take one."""

    def __init__(self, function: Callable[..., Arrays]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *received: Tensor) -> Arrays:
        """Call it."""
        return self.function(*received)


class _Stage(PipelineStage):
    """torch's stage, which says when it has computed the gradients of a micro-batch."""

    after: Callable[[], None]

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> None:
        """Compute them."""
        super().backward_one_chunk(*arguments, **named)
        self.after()


class _Received(Function):
    """Arrays as they are; the gradient of one that is not read is 0, which torch's stages do not send."""

    @staticmethod
    def forward(ctx: Any, *x: Tensor) -> Arrays:
        return tuple(one.view_as(one) for one in x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Arrays:
        return upstream


def _outputs(part: Stage, x: Tensor, scope: Any) -> Arrays:
    """List what a stage sends: x, and the arrays that later ones read."""
    held = {**scope.reads, **scope.emitted}
    return tuple(one.contiguous() for one in (x, *(held[name] for name in part.sent)))


def _described(x: Tensor) -> Tensor:
    """Return an array of its shape and dtype without numbers, which gradients come back for."""
    return torch.empty_like(x, device="meta", requires_grad=True)


def _ended(x: Tensor) -> Tensor:
    """Return an array of which no parameter has a gradient as one that takes the next stage's."""
    return x.detach().requires_grad_()


__all__ = ["Pipeline"]
