"""A step on torch: one graph for a micro-batch's loss and gradients, one for the update."""

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
from minillm_core.backends.ranks import Ranks
from minillm_core.backends.steps import (
    TERM,
    loss_scale,
    next_loss_scale,
    step_result,
    warmed,
)
from minillm_core.backends.tables import tables_of
from minillm_core.backends.torch import transfer
from minillm_core.backends.torch.model import TorchFramework, TorchModel
from minillm_core.backends.torch.optimizer import Optimizer
from minillm_core.backends.torch.share import Share
from minillm_core.backends.torch.tables import TorchTables
from minillm_core.backends.torch.transfer import Later, foreach_copy_, overwrite
from minillm_core.nn.block import GATHERED
from minillm_core.nn.decoder import Loss
from minillm_core.nn.initial import initial_arrays
from minillm_core.optim.follow import FOLLOW, tied
from minillm_core.optim.views import VIEWED
from minillm_core.plan import Plan

Access = tuple[Callable[[], Tensor], Callable[[Tensor], None]]


class TorchTrainer(TorchModel, Trainer):
    """A model and its optimizer on one device.

    Args:
        plan: the plan.
        binding: how; recorded in run.json.
        model: materialised, float32; filled, or with parameters of which a share is still to come.
        framework: the framework object that the model stands on.
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
        self.graphs: dict[tuple[Any, ...], Any] = {}  # by staged values, and sizes that change
        self.gradients: list[Tensor] | None = None
        self.random, self.snapshots = Generators(self.device), transfer.Snapshots(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def join(self, ranks: Ranks) -> None:
        """Train together with other processes, which may share rows."""
        super().join(ranks)
        self.framework.scope_of, self.part = ranks.scope, ranks.part(self)

    @memory_or_error()
    def step(
        self,
        micro: Sequence[Batch],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Later | None:
        """Queue one optimizer step."""
        self.optimizer.leave()
        staged, given = self.values_at(values, 1.0 / supervised)
        inverse = given["normaliser"]
        if self.scaler:
            given["normaliser"] = inverse * self.scaler["scale"]
        drawn = self.random.states() if len(micro) > 1 else {}
        micro, rows = self.seen_rows(micro)
        compiling = self._compiling if self.binding.compile else None
        moved = transfer.batch_to(rows, tuple(rows), self.device)
        self.tables.take(moved, self.optimizer.updates, given, compiling)
        own = self.ranks.pipeline == 1  # each process computes whole models
        if own and self.binding.compile and (self.staged or self.sizes) and not self.graphs:
            with self.random.kept():
                self._warm_up(micro[0], given)
        timer = self.step_timer or _untimed
        figures: dict[str, Tensor] = {}
        compute = self._losses if own else partial(self.ranks.pipelined, self)
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
            self.reduced = self.statistics.merged(earlier, loss.statistics)
        timer("optimizer")
        later = self._update(figures, given, len(micro), tied(self.plan.follows, values))
        timer("")
        return later

    def _losses(
        self, micro: Sequence[Batch], staged: Mapping[str, int], given: dict[str, Tensor]
    ) -> Iterator[Loss]:
        """Compute the loss of each micro-batch, and add up its gradients."""
        timer = self.step_timer or _untimed
        for index, host in enumerate(micro):
            timer("forward")
            batch = self.fields(host, staged)
            loss = self._graph(staged, batch, given)(batch, given)
            timer("backward")
            self._accumulate(loss.objective, first=index == 0, only=len(micro) == 1)
            yield loss

    @contextmanager
    def _compiling(self, what: str) -> Iterator[None]:
        """Show what is compiled in the course of a run, and keep it off the clocks."""
        self.synchronize()  # what was queued before belongs on the clocks
        began = time.perf_counter()
        with self.phase(f"compiling for {what}"), self.random.kept():
            yield
            self.synchronize()
        self.compile_seconds += time.perf_counter() - began

    def _update(
        self,
        figures: dict[str, Tensor],
        given: dict[str, Tensor],
        micro_batches: int,
        one: Mapping[str, str],
    ) -> Later:
        """Change the state of training, unless a figure or the gradients' norm is not finite.

        Parameters of ``one`` are those that they are mapped to; sums of gradients count once.
        """
        share, norms = self.share, None
        batches = micro_batches * self.ranks.size // self.ranks.pipeline  # of all ranks
        if share is None:
            grads = dict(zip(self.weights.trained, self.gradients or (), strict=True))
            if self.ranks.size > 1:
                self.statistics.over(self.ranks, grads, figures, self.reduced)
                self.gradients = [*grads.values()]  # those of this rank alone are freed
        else:
            grads = share.scattered()
            one = {name: leader for name, leader in one.items() if name in grads}
        self.framework.seen.update(f"{FOLLOW}{name}" for name in self.plan.follows)
        for name, leader in one.items():
            grads[leader].add_(grads[name])
        counted = {name: grad for name, grad in grads.items() if name not in one}
        for name, leader in one.items():
            grads[name].copy_(grads[leader])
        if share is None:
            norm = self.optimizer.norm(counted)
        else:  # figures, statistics and norms of all ranks in one collective
            squares = self.optimizer.squares(grads, counted)
            self.statistics.over(self.ranks, squares, figures, self.reduced)
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
        return Later([*figures, "skipped"], torch.cat([packed, found.reshape(1)]))

    def _warm_up(self, host: Batch, given: dict[str, Tensor]) -> None:
        """Compile every variant of the step, forward and backward, and drop its results."""
        for staged, _, sized in warmed(self.plan, self.phase, host, self.ranks.context):
            batch = self.fields(sized, staged, trained=False)
            self._warm(self._graph(staged, batch, given)(batch, given).objective)

    def _warm(self, objective: Tensor) -> None:
        """Compile the backward pass, and drop its results."""
        (self._gradients_of if self.share is None else self.share.warm)(objective)

    def _graph(
        self, staged: Mapping[str, int], batch: dict[str, Tensor], given: dict[str, Tensor]
    ) -> Any:
        """Return the micro-batch's loss with these staged values baked in, for batches of one size.

        Windows that are inputs are not, while they are shorter than a row: one that hides nothing is
        left out of the step. Ranks that share rows cut keys by a window, and need its number.

        Each has a code object of its own: torch compiles one for eight sizes at most. How many
        positions are gathered, and rows of tables seen, is not known before: such a graph is compiled
        here, under its name.
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
        # materialize_grads: zeros where a stage leaves a parameter out, so that sums keep their places
        found = torch.autograd.grad(objective, parameters, materialize_grads=True)
        # that of a transposed parameter is a transposed view, which the fused AdamW of a CPU reads as it lies
        return tuple(grad.contiguous() for grad in found)

    def _accumulate(self, objective: Tensor, *, first: bool, only: bool) -> None:
        """Add up the gradients of micro-batches, in float32."""
        if self.share is not None:
            return self.share.accumulate(objective, first=first)
        fresh = self._gradients_of(objective)
        with torch.no_grad():
            if only and fresh[0].dtype == torch.float32:
                self.gradients = list(fresh)
            elif self.gradients is None:
                self.gradients = [grad.float() for grad in fresh]
            elif first:
                held = zip(self.gradients, fresh, strict=True)  # of tables, another number of rows
                self.gradients = [a if a.shape == b.shape else b.float() for a, b in held]
                foreach_copy_(self.gradients, fresh)
            else:
                foreach_add_(self.gradients, fresh)

    def read(self, handle: Later) -> StepResult:
        """Wait for a step's figures."""
        return step_result(handle.read())

    @contextmanager
    def inferring(self) -> Iterator[None]:
        """Turn gradients off, and keep the random numbers that training would draw."""
        self.optimizer.place()
        with self.random.kept(), self.lent(), super().inferring():
            yield

    def lent(self) -> AbstractContextManager[None]:
        """Let ranks have parts of weights from others."""
        return super().lent() if self.share is None else self.share.lent()

    def fill(self, held: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
        """Copy arrays into the tensors of the same names."""
        self.optimizer.leave()
        self.tables.leave()
        super().fill(held, arrays)
        if self.share is not None:
            self.optimizer.place()

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Compute what is evaluated in the place of parameters, float32, one after the other."""
        return self.optimizer.views()

    def snapshot(self) -> Snapshot:
        """Take everything to save."""
        if self.share is not None:
            return self.share.saved(self._saved(), self.snapshots.take)
        tables = self.tables.arrays(self.optimizer.updates)
        taken = self.snapshots.take(self._saved() | tables)
        return replace(taken, bring=lambda: self.tables.packed(taken.bring()))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything that is saved; of divided updates rank 0 alone gets it. Waits."""
        return super().arrays() if self.share is None else self.share.whole(self._saved())

    def _saved(self) -> dict[str, Tensor]:
        drawn = {f"random.{name}": state for name, state in self.random.states().items()}
        with torch.no_grad():
            views = {f"{VIEWED}{name}": view for name, view in self.views()}
        return self._everything() | views | drawn

    def _everything(self) -> dict[str, Tensor]:
        tensors = self.held() | self.tables.saved()
        tensors |= {f"optimizer.{name}": t for name, t in self.optimizer.arrays().items()}
        return tensors | {f"scaler.{name}": tensor for name, tensor in self.scaler.items()}

    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore what :meth:`arrays` gave."""
        self.fill(self._everything(), self.tables.unpacked(arrays))
        self.random.load(arrays)

    def like(self) -> dict[str, Any]:
        """Return arrays of the shapes of all that is saved; of shares the others' cannot be read."""
        return self.arrays() if self.share is None else self.share.like(self._saved())

    def own(self) -> dict[str, np.ndarray]:
        """Return what this process updates, and its state."""
        return self.arrays() if self.share is None else transfer.brought(self._everything())

    @torch.no_grad()
    def shard(self, what: str) -> None:
        """Divide the updates among the ranks."""
        self.optimizer.leave()
        old, groups = self._everything(), self.optimizer.groups
        self.share = share = self.ranks.share(what, groups, self.weights, self.model)
        self.compiler, self.graphs = share.compiler(self.compiler), {}
        self.weights.share, self.weights.masters = share, share.masters(self.weights.masters)
        self.optimizer = self._optimizer()
        for name, tensor in self._everything().items():
            if name in old and not old[name].is_meta:  # else it is drawn, or 0
                tensor.copy_(share.part(name, old[name]))
        del old
        self.optimizer.place()  # at once: one rank may sample without the others
        if self.device.type == "cuda":  # the others' parts were needed up to here
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def restart(self, seed: int) -> None:
        """Begin anew with the initial values of a seed."""
        fresh = initial_arrays(self.model, self.plan.inits, seed)
        with torch.no_grad():
            state = self.optimizer.arrays() | self.tables.saved()
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
        """Return the largest memory that torch held; on a CPU, that the whole process held."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return process_peak() if self.device.type == "cpu" else None


def _untimed(part: str) -> None:
    """Take no time of a step's part."""


def _add(figures: dict[str, Tensor], name: str, value: Tensor) -> None:
    figures[name] = figures[name] + value if name in figures else value


# torch's own generators: nothing of the core draws from them, a plugin's native module may


def seed_generators(number: int) -> None:
    """Seed the generators of every device by a run's seed."""
    torch.manual_seed(number % 2**64)


class Generators:
    """The generators that modules on a device draw from: the CPU's, and its own.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._access: dict[str, Access] = {"torch.cpu": (torch.get_rng_state, torch.set_rng_state)}
        if device.type != "cpu":
            module = torch.get_device_module(device)
            which = (device,) if device.type == "cuda" else ()  # elsewhere there is one alone
            self._access[f"torch.{device.type}"] = (
                lambda: module.get_rng_state(*which),
                lambda state: module.set_rng_state(state, *which),
            )

    def states(self) -> dict[str, Tensor]:
        """Return ``torch.cpu``, ``torch.cuda`` -> uint8, on the host; waits for nothing."""
        return {name: get() for name, (get, _) in self._access.items()}

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Restore states; generators that have none there stay as they are."""
        for name, (_, put) in self._access.items():
            if name in states:
                put(states[name])

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        """Restore the generators from ``random.<name>`` on the host.

        Raises:
            ValueError: a state is none of this generator's.
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
    def kept(self) -> Iterator[None]:
        """Keep the generators: numbers drawn inside change none that training draws."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)
