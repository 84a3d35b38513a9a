"""Training on torch: one compiled graph for a micro-batch's loss and gradients, one for the update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import _foreach_add_ as foreach_add_  # pyright: ignore[reportPrivateImportUsage]

from minillm_core.backends.base import Batch, Binding, Snapshot, StepResult, Trainer
from minillm_core.backends.memory import memory_or_error, process_peak
from minillm_core.backends.native import tables_of
from minillm_core.backends.ranks import Ranks
from minillm_core.backends.steps import TERM, loss_scale, next_loss_scale, step_result, warmed
from minillm_core.backends.torch import transfer
from minillm_core.backends.torch.model import TorchFramework, TorchModel
from minillm_core.backends.torch.optimizer import Optimizer, TorchTables
from minillm_core.backends.torch.share import Share
from minillm_core.backends.torch.transfer import PendingFigures, foreach_copy_, overwrite
from minillm_core.nn.block import GATHERED
from minillm_core.nn.decoder import Loss
from minillm_core.nn.initial import initial_arrays
from minillm_core.optim.follow import FOLLOW, tied
from minillm_core.optim.views import VIEWED
from minillm_core.plan import Plan

Access = tuple[Callable[[], Tensor], Callable[[Tensor], None]]


class TorchTrainer(TorchModel, Trainer):
    """A model and its optimizer on one torch device.

    Args:
        plan: the plan.
        binding: dtype, kernels and device; recorded in run.json.
        model: materialised, float32; filled, or with parameters to be sharded that have no memory yet.
        framework: the framework object of the model's modules.
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
        fused: bool,
        compiler: Callable[..., Any] = torch.compile,
    ) -> None:
        super().__init__(plan, binding, model, framework, compiler=compiler)
        self.weights.by_rows = frozenset(plan.by_rows)
        made_of = self.weights, framework, self.compiled
        self.tables: TorchTables = tables_of(plan, "torch", TorchTables, *made_of)
        self._optimizer = partial(
            Optimizer,
            plan,
            self.weights,
            framework,
            self.tables,
            compiler=compiler if binding.compile else None,
            fused=fused,
        )
        self.optimizer = self._optimizer()
        self.share: Share | None = None
        self.binding = replace(binding, notes=(*binding.notes, *self.optimizer.notes))
        self.scaler = loss_scale(framework.ops) if binding.dtype == "float16" else {}
        self.reduced: dict[str, Tensor] = {}  # the step's statistics
        self.graphs: dict[tuple[Any, ...], Any] = {}  # by staged values and changing sizes
        self.gradients: list[Tensor] | None = None
        self.random, self.snapshots = Generators(self.device), transfer.Snapshotter(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def join(self, ranks: Ranks) -> None:
        """Train together with other processes, with context or tensor parallelism if ``ranks`` has it."""
        super().join(ranks)
        self.framework.scope_of, self.part = ranks.scope_of, ranks.model_part(self)

    @memory_or_error()
    def step(
        self,
        micro: Sequence[Batch],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> PendingFigures | None:
        """Queue one optimizer step."""
        self.optimizer.restore_parameters()
        staged, given = self.values_at(values, 1.0 / supervised)
        inverse = given["normaliser"]
        if self.scaler:
            given["normaliser"] = inverse * self.scaler["scale"]
        drawn = self.random.states() if len(micro) > 1 else {}
        micro, rows = self.record_rows(micro)
        compiling = self._compiling if self.binding.compile else None
        moved = transfer.batch_to_device(rows, tuple(rows), self.device)
        self.tables.load_rows(moved, self.optimizer.updates, given, compiling)
        own = self.ranks.pipeline == 1  # no pipeline parallelism
        if own and self.binding.compile and (self.staged or self.sizes) and not self.graphs:
            with self.random.preserved():
                self._warm_up(micro[0], given)
        timer = self.step_timer or _untimed
        figures: dict[str, Tensor] = {}
        compute = self._losses if own else partial(self.ranks.pipeline_losses, self)
        losses = compute(micro, staged, given)
        for index in range(len(micro)):
            if index and cancelled():
                self.random.restore(drawn)
                return None
            loss = next(losses)
            _add(figures, "loss", loss.sums[0].detach() * inverse)
            _add(figures, "objective", loss.objective.detach())
            present = self.plan.spec.loss.present(staged)
            for target, total in zip(present, loss.sums[1:], strict=True):
                _add(figures, TERM + target.key, total.detach() * inverse)
            for key, (value, labels) in loss.terms.items():
                _add(figures, TERM + key, value * (labels * inverse))
            earlier = self.reduced if index else None
            self.reduced = self.statistics.accumulate(earlier, loss.statistics)
        timer("optimizer")
        later = self._update(figures, given, len(micro), tied(self.plan.follows, values))
        timer("")
        return later

    def _losses(
        self, micro: Sequence[Batch], staged: Mapping[str, int], given: dict[str, Tensor]
    ) -> Iterator[Loss]:
        """Yield the loss of each micro-batch, with gradient accumulation."""
        timer = self.step_timer or _untimed
        for index, host in enumerate(micro):
            timer("forward")
            batch = self.fields(host, staged)
            loss = self._graph(staged, batch, given)(batch, given)
            timer("backward")
            self._accumulate(loss.objective, first=index == 0, last=index == len(micro) - 1)
            yield loss

    @contextmanager
    def _compiling(self, what: str) -> Iterator[None]:
        """Display a compilation in the middle of a run, and add its time to ``compile_seconds``."""
        self.synchronize()  # queued work is training time
        began = time.perf_counter()
        with self.phase(f"compiling for {what}"), self.random.preserved():
            yield
            self.synchronize()
        self.compile_seconds += time.perf_counter() - began

    def _update(
        self,
        figures: dict[str, Tensor],
        given: dict[str, Tensor],
        micro_batches: int,
        one: Mapping[str, str],
    ) -> PendingFigures:
        """Update the training state, unless a figure or the gradient norm is not finite.

        ``one`` maps tied parameters to their leaders; the sum of their gradients counts once in the norm.
        """
        share, norms = self.share, None
        batches = micro_batches * self.ranks.size // self.ranks.pipeline  # of all ranks
        if share is None:
            grads = dict(zip(self.weights.trained, self.gradients or (), strict=True))
            if self.ranks.size > 1:
                self.statistics.reduce(self.ranks, grads, figures, self.reduced)
                self.gradients = [*grads.values()]  # frees the gradients before the all-reduce
        else:
            grads = share.reduce_scatter()
            one = {name: leader for name, leader in one.items() if name in grads}
        self.framework.evidence.update(f"{FOLLOW}{name}" for name in self.plan.follows)
        for name, leader in one.items():
            grads[leader].add_(grads[name])
        counted = {name: grad for name, grad in grads.items() if name not in one}
        for name, leader in one.items():
            grads[name].copy_(grads[leader])
        if share is None:
            norm = self.optimizer.norm(counted)
        else:  # one all-reduce for figures, statistics and norms
            squares = self.optimizer.squares(grads, counted)
            self.statistics.reduce(self.ranks, squares, figures, self.reduced)
            norms = {layer: torch.sqrt(square) for layer, square in squares.items()}
            norm = norms.pop("")
        unscale = None
        if self.scaler:
            figures["scale"] = self.scaler["scale"]
            unscale = 1.0 / self.scaler["scale"]
            norm = norm * unscale
        figures["grad_norm"] = norm
        packed = torch.stack([figure.float() for figure in figures.values()])
        found = transfer.non_finite(packed)
        with torch.no_grad():
            if self.scaler:
                for name, new in next_loss_scale(self.framework.ops, self.scaler, found).items():
                    self.scaler[name].copy_(new)
        due = self.optimizer.due
        staged = self.optimizer.cycles and self.optimizer.by_stages
        if staged and self.binding.compile and due not in self.optimizer.compiled:
            what = f"the update of each {min(due)} steps" if due else "the updates in between"
            with self._compiling(what):
                self.optimizer.warm(grads, given, norm.new_ones(()))
        self.optimizer.step(grads, given, norm, unscale, found, norms)
        with torch.no_grad():
            skip = found > 0
            fresh = self.statistics.next_states(self.reduced, lambda total: total / batches)
            for name, new in fresh.items():
                overwrite(self.states[name], new, skip)
        return PendingFigures([*figures, "skipped"], torch.cat([packed, found.reshape(1)]))

    def _warm_up(self, host: Batch, given: dict[str, Tensor]) -> None:
        """Compile every variant of the step, forward and backward, and drop the results."""
        for staged, _, sized in warmed(self.plan, self.phase, host, self.ranks.context):
            batch = self.fields(sized, staged, trained=False)
            self._warm(self._graph(staged, batch, given)(batch, given).objective)

    def _warm(self, objective: Tensor) -> None:
        """Run the backward pass to compile it, and drop its results."""
        (self._gradients_of if self.share is None else self.share.warm)(objective)

    def _graph(
        self, staged: Mapping[str, int], batch: dict[str, Tensor], given: dict[str, Tensor]
    ) -> Any:
        """Return the compiled loss of a micro-batch, with these staged values baked in, for one batch size.

        Windows that are inputs of the graph are not baked in, unless they cover a whole row: such a
        window masks nothing and is left out of the step. Under context parallelism all windows are
        baked in, since ranks slice keys by the window.

        Each graph has a code object of its own: torch compiles one for at most eight sizes. The numbers
        of gathered positions and of table rows are not known in advance: such a graph is compiled
        here, within a named phase.
        """
        sizes = batch["ids"].shape if self.sizes else ()
        gathers, tables = self.plan.spec.loss.gather is not None, self.tables
        positions = batch.get(GATHERED, batch["ids"]).numel()  # at which the head is computed
        row = batch["ids"].shape[1] if self.ranks.context == 1 else 0
        staged = {n: v for n, v in staged.items() if v >= row or n not in self.binding.inputs}
        key = (*staged.items(), *sizes, *((positions,) if gathers else ()), *tables.sizes)
        if key not in self.graphs:

            def micro_loss(batch: dict[str, Tensor], given: dict[str, Tensor]) -> Any:
                return self.part(batch, {**given, **staged})

            self.graphs[key] = self.compiled(micro_loss)
            if self.binding.compile and (gathers or tables.sizes):
                what = [f"{positions:,} supervised positions"] if gathers else []
                with self._compiling(", ".join([*what, *filter(None, [tables.words])])):
                    self._warm(self.graphs[key](batch, given).objective)
        return self.graphs[key]

    def _gradients_of(self, objective: Tensor) -> tuple[Tensor, ...]:
        parameters = [*self.weights.trained.values()]
        # materialize_grads: zeros for a parameter that a stage leaves out, so that the list stays aligned
        found = torch.autograd.grad(objective, parameters, materialize_grads=True)
        # the gradient of a transposed parameter is a transposed view, whose strides CPU fused AdamW ignores
        grads = [grad.contiguous() for grad in found]
        # those of a and b in a + b are one array, and the update writes to each
        places, first = [(g.untyped_storage(), g.storage_offset()) for g in grads], dict[Any, int]()
        alone = [first.setdefault(place, at) == at for at, place in enumerate(places)]
        return tuple(g if one else g.clone() for g, one in zip(grads, alone, strict=True))

    def _accumulate(self, objective: Tensor, *, first: bool, last: bool) -> None:
        """Compute gradients and accumulate them over micro-batches, in float32."""
        if self.share is not None:
            return self.share.accumulate(objective, first=first, last=last)
        fresh = self._gradients_of(objective)
        with torch.no_grad():
            if first and last and fresh[0].dtype == torch.float32:
                self.gradients = list(fresh)
            elif self.gradients is None:
                self.gradients = self.optimizer.widened(fresh)
            elif first:
                held = zip(self.gradients, fresh, strict=True)  # of tables, the row count changes
                self.gradients = [a if a.shape == b.shape else b.float() for a, b in held]
                foreach_copy_(self.gradients, fresh)
            else:
                foreach_add_(self.gradients, fresh)

    def read(self, handle: PendingFigures) -> StepResult:
        """Wait for a step's metrics and return them."""
        return step_result(handle.read())

    @contextmanager
    def inferring(self) -> Iterator[None]:
        """Return a context for inference: no gradients, views in place, random generators restored on exit."""
        self.optimizer.place_views()
        with self.random.preserved(), self.inference_context(), super().inferring():
            yield

    def inference_context(self) -> AbstractContextManager[None]:
        """Return a context in which ranks can get sharded weights from each other."""
        return super().inference_context() if self.share is None else self.share.inference_context()

    def fill(self, held: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
        """Copy arrays into the tensors of the same names, with the trained parameters in place."""
        self.optimizer.restore_parameters()
        self.tables.free_whole()
        super().fill(held, arrays)
        if self.share is not None:
            self.optimizer.place_views()

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Compute the views, float32, one by one."""
        return self.optimizer.views()

    def snapshot(self) -> Snapshot:
        """Take a snapshot of everything to save."""
        if self.share is not None:
            return self.share.snapshot(self._to_save(), self.snapshots.take)
        taken = self.snapshots.take(self._to_save() | self.tables.arrays(self.optimizer.updates))
        return replace(taken, to_host=lambda: self.tables.packed(taken.to_host()))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything to save; with sharding only on rank 0. Waits."""
        return super().arrays() if self.share is None else self.share.gather(self._to_save())

    def _to_save(self) -> dict[str, Tensor]:
        drawn = {f"random.{name}": state for name, state in self.random.states().items()}
        with torch.no_grad():
            views = {f"{VIEWED}{name}": view for name, view in self.views()}
        return self._all_tensors() | views | drawn

    def _all_tensors(self) -> dict[str, Tensor]:
        tensors = self.held() | self.tables.state_tensors()
        tensors |= {f"optimizer.{name}": t for name, t in self.optimizer.arrays().items()}
        return tensors | {f"scaler.{name}": tensor for name, tensor in self.scaler.items()}

    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the arrays of :meth:`arrays`."""
        self.fill(self._all_tensors(), self.tables.unpacked(arrays))
        self.random.load(arrays)

    def placeholders(self) -> dict[str, Any]:
        """Return the arrays to save, with whole shapes; of sharded ones only this rank's parts can be read."""
        return self.arrays() if self.share is None else self.share.placeholders(self._to_save())

    def local_arrays(self) -> dict[str, np.ndarray]:
        """Return the parameters that this process updates, and its optimizer state."""
        return self.arrays() if self.share is None else transfer.copy_to_host(self._all_tensors())

    def local_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of :meth:`local_arrays`, which training continues with."""
        return self._all_tensors()

    @torch.no_grad()
    def shard(self, what: str) -> None:
        """Shard the updates over the ranks."""
        self.optimizer.restore_parameters()
        old = self._all_tensors()
        self.share = share = self.ranks.shard_updates(what, self)
        self.compiler, self.graphs = share.compiler(self.compiler), {}
        self.weights.share, self.weights.masters = share, share.masters(self.weights.masters)
        self.optimizer = self._optimizer()
        for name, tensor in self._all_tensors().items():
            if name in old and not old[name].is_meta:  # else it is drawn later, or 0
                tensor.copy_(share.part(name, old[name]))
        del old
        self.optimizer.place_views()  # now, on all ranks: later one rank may sample without the others
        if self.device.type == "cuda":  # free the parts of other ranks
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def restart(self, seed: int) -> None:
        """Reset to the initial values of a seed."""
        fresh = initial_arrays(self.model, self.plan.inits, seed)
        with torch.no_grad():
            state = self.optimizer.arrays() | self.tables.state_tensors()
            for tensor in state.values():
                tensor.zero_()
            for name, start in (loss_scale(self.framework.ops) if self.scaler else {}).items():
                self.scaler[name].copy_(start)
        self.fill(held := self.held(), fresh)
        for name in self.plan.inits:
            if (share := self.share) is not None and (key := f"model.{name}") in held:
                drawn = share.part(key, fresh[key])
                if np.array_equal(self.framework.host(held[key]), drawn):
                    self.framework.witness(f"init:{name}")
        seed_generators(seed)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def peak_bytes(self) -> int | None:
        """Return the peak memory that torch allocated; on a CPU, the peak of the whole process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return process_peak() if self.device.type == "cpu" else None


def _untimed(part: str) -> None:
    """Do nothing: the step timer when none is set."""


def _add(figures: dict[str, Tensor], name: str, value: Tensor) -> None:
    figures[name] = figures[name] + value if name in figures else value


# torch's own random generators: the core does not draw from them, a plugin's native module may


def seed_generators(number: int) -> None:
    """Seed the random generators of every device with a run's seed."""
    torch.manual_seed(number % 2**64)


class Generators:
    """The random generators that modules on a device draw from: the CPU's, and the device's.

    Args:
        device: the model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._access: dict[str, Access] = {"torch.cpu": (torch.get_rng_state, torch.set_rng_state)}
        if device.type != "cpu":
            module = torch.get_device_module(device)
            which = (device,) if device.type == "cuda" else ()  # others have a single device
            self._access[f"torch.{device.type}"] = (
                lambda: module.get_rng_state(*which),
                lambda state: module.set_rng_state(state, *which),
            )

    def states(self) -> dict[str, Tensor]:
        """Return the states: ``torch.cpu``, ``torch.cuda`` -> uint8, on the host; does not wait."""
        return {name: get() for name, (get, _) in self._access.items()}

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Restore states; generators without one stay unchanged."""
        for name, (_, put) in self._access.items():
            if name in states:
                put(states[name])

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        """Restore the generators from ``random.<name>`` on the host.

        Raises:
            ValueError: a state has the wrong dtype or shape for its generator.
        """
        states = {}
        for name, now in self.states().items():
            if (array := saved.get(f"random.{name}")) is not None:
                if array.shape != tuple(now.shape) or array.dtype != np.uint8:
                    raise ValueError(
                        f"random.{name}: {array.dtype} {array.shape}, not uint8 {tuple(now.shape)}"
                    )
                states[name] = torch.from_numpy(np.array(array))
        self.restore(states)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the generators on exit, so that numbers drawn inside do not affect training."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)
