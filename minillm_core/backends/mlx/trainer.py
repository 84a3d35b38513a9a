"""Training on MLX: steps are queued as functions of arrays; the old arrays are kept until a step is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from minillm_core.backends.base import Batch, Binding, Snapshot, StepResult, Trainer
from minillm_core.backends.memory import memory_or_error
from minillm_core.backends.mlx import random
from minillm_core.backends.mlx.graphs import Figures, Graphs, MLXTables
from minillm_core.backends.mlx.model import Arrays, MLXFramework, MLXModel, assign, checked, loaded
from minillm_core.backends.native import rows_of, tables_of
from minillm_core.backends.steps import loss_scale, step_result, warmed
from minillm_core.nn.initial import initial_arrays
from minillm_core.optim.groups import Group
from minillm_core.optim.rows import groups_of_whole
from minillm_core.optim.update import by_parameter, cycles_of, due_at, initial_state
from minillm_core.optim.views import VIEWED, views_of
from minillm_core.plan import Plan

UNREAD = 2
"""The largest number of queued steps that are not read: each keeps the arrays from before it."""


@dataclass(eq=False)
class Queued:
    """A queued step that may still be undone, with its input arrays.

    Compared by identity: MLX compares arrays element by element.
    """

    batches: list[Arrays]
    given: Arrays
    staged: Mapping[str, int]
    due: Set[int]
    masters: Arrays  # before it
    state: dict[str, Any]  # before it
    key: mx.array  # before it
    figures: Figures = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)  # the figures on the host, once read


class MLXTrainer(MLXModel, Trainer):
    """A model and its optimizer on MLX's default device.

    Args:
        plan: the plan.
        binding: dtype, kernels and device; recorded in run.json.
        model: materialised and filled, float32.
        framework: the framework object of the model's modules.
    """

    def __init__(self, plan: Plan, binding: Binding, model: Any, framework: MLXFramework) -> None:
        super().__init__(plan, binding, model, framework)
        self.groups = groups_of_whole(plan)
        self.cycles = cycles_of(self.groups.values())
        self.steps = 0  # skipped updates included
        self.tables: MLXTables = tables_of(plan, "mlx", MLXTables, framework.ops)
        self.state = {**self.state, **self._at_first()}
        self.graphs = Graphs(self, self.groups, self.tables)
        self.unread: list[Queued] = []  # oldest first
        self.whole: tuple[Arrays, Arrays] | None = (
            None  # masters, and the whole tables and views computed from them for evaluation
        )
        mx.eval(self.masters, self.state)

    @memory_or_error()
    def step(
        self,
        micro: Sequence[Batch],
        values: Mapping[str, float],
        supervised: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Queued | None:
        """Queue one optimizer step."""
        while len(self.unread) >= UNREAD:
            self._settle(self.unread[0])
        staged, given = self.values_at(values, 1.0 / supervised)
        self.whole = self.copies = None
        micro, rows = self.record_rows(micro)
        given |= {rows_of(name): mx.array(index) for name, index in rows.items()}
        batches = [self.fields(host, staged) for host in micro]
        if self.binding.compile and (self.staged or self.sizes) and not self.graphs.made:
            with random.preserved():
                self._warm_up(micro, given)
        due = due_at(self.cycles, self.steps)
        queued = Queued(batches, given, staged, due, self.masters, self.state, random.key())
        if not self._advance(queued, cancelled):
            random.restore(queued.key)
            return None
        self.steps += 1
        self.unread.append(queued)
        return queued

    def _advance(self, queued: Queued, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Queue the step after those queued so far; return False if it was cancelled."""
        batches, given, staged, due = queued.batches, queued.given, queued.staged, queued.due
        timer = self.step_timer
        if len(batches) == 1 and timer is None and self.ranks.size == 1:
            whole = self.graphs.graph("whole", staged, due)
            stepped = whole(self.masters, self.state, batches[0], given)
        else:
            stepped = self._accumulated(batches, given, staged, due, cancelled)
            if stepped is None:
                return False
        self.masters, self.state, queued.figures = stepped
        mx.async_eval(self.masters, self.state, queued.figures, random.key())
        if timer is not None:
            timer("")
        return True

    def _settle(self, first: Queued) -> None:
        """Wait for the oldest unread step; if it is not finite, undo it.

        Selecting between old and new arrays within the graph cost 20 % of a step on an H100, since
        the update was no longer one pass. Keeping the old arrays costs only memory: they are kept until
        the step is read, and if it is undone, later steps are queued again from them.
        """
        mx.eval(first.figures)
        first.numbers = {name: float(np.array(value)) for name, value in first.figures.items()}
        self.unread.remove(first)
        if first.numbers["skipped"]:
            after = self.unread[0].state if self.unread else self.state
            self.masters = first.masters
            self.state = {**first.state, "scaler": after["scaler"]}  # keep the reduced loss scale
            for later in self.unread:
                later.masters, later.state = self.masters, self.state
                random.restore(later.key)
                self._advance(later)
        first.masters, first.state = {}, {}

    def _settle_all(self) -> None:
        while self.unread:
            self._settle(self.unread[0])

    def _warm_up(self, micro: Sequence[Batch], given: Arrays) -> None:
        """Trace and compile every variant of the step, and drop the results."""
        due = due_at(self.cycles, self.steps)
        for staged, accumulate, sized in warmed(self.plan, self.phase, micro[0]):
            batch = self.fields(sized, staged, trained=False)
            if (accumulate or len(micro)) == 1 and self.ranks.size == 1:
                whole = self.graphs.graph("whole", staged, due)
                mx.eval(whole(self.masters, self.state, batch, given))
            else:
                mx.eval(self._accumulated([batch, batch], given, staged, due))

    def _accumulated(
        self,
        batches: Sequence[Arrays],
        given: Arrays,
        staged: Mapping[str, int],
        due: Set[int],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[Arrays, dict[str, Any], Figures] | None:
        # cast once per step, for all micro-batches
        copies = self.graphs.cast(self.masters, self.state, given)
        accumulate, sums = self.graphs.graph("accumulate", staged), None
        for batch in batches:
            if self.step_timer is not None:
                self.step_timer("gradients")
            if sums is None:
                sums = self.graphs.graph("grads", staged)(copies, self.state, batch, given)
            elif cancelled():
                return None
            else:
                sums = accumulate(copies, self.state, batch, given, sums)
            mx.async_eval(sums)  # a graph that spans micro-batches would hold all activations
        if self.step_timer is not None:
            self.step_timer("optimizer")
        if self.ranks.size > 1 and sums is not None:
            self.statistics.reduce(self.ranks, sums["grads"], sums["figures"], sums["statistics"])
        mean = mx.array(1.0 / (len(batches) * self.ranks.size))
        return self.graphs.graph("update", {}, due)(self.masters, self.state, sums, given, mean)

    def read(self, handle: Queued) -> StepResult:
        """Wait for a step and all earlier ones; return its metrics."""
        with memory_or_error():
            while handle in self.unread:
                self._settle(self.unread[0])
        return step_result(handle.numbers)

    @contextmanager
    def inferring(self) -> Iterator[None]:
        """Return a context for inference: queued steps settled, views in place, random key restored on exit."""
        self._settle_all()
        with random.preserved(), super().inferring():
            if self.whole is None or self.whole[0] is not self.masters:
                state, updates = self.state["rows"], self.state["updates"]
                read = self.tables.gather_rows(self.masters, state, updates, None)
                read |= self.views()
                copies = {name: array.astype(self.weights.dtype) for name, array in read.items()}
                mx.eval(copies)
                self.whole = self.masters, copies
            copies = self.whole[1]
            assign({name: self.weights.holders[name] for name in copies}, copies)
            yield

    def views(self) -> Iterator[tuple[str, mx.array]]:
        """Compute the views, float32, one by one."""
        masters, state = self.masters, self.state
        tables = self.tables.view_inputs(masters, state["rows"], state["updates"])
        return views_of(self.framework, self.groups, masters, state["optimizer"], tables)

    def snapshot(self) -> Snapshot:
        """Take a snapshot of everything to save; waits for steps that are not read yet."""
        self._settle_all()
        views = {f"{VIEWED}{name}": view for name, view in self.views()}
        held = self.masters, self.state, random.key(), views
        # Another thread may wait for and read copies, but not the arrays that training continues with:
        # waiting for an array changes it in every thread that has it, and on CUDA reading on the host
        # moves the memory.
        copied = tree_map(lambda array: _bits(mx.where(True, array, array)), held)
        masters, state, key, views = copied
        mx.async_eval(masters, state, key, views)
        tables = self.tables.gather_rows(masters, state["rows"], state["updates"], None)
        mx.eval(tables)
        rows = self.tables.named(masters, state["rows"])
        whole: dict[str, Any] = {**masters, **tables, **self.weights.originals}
        steps = {STEPS: np.array(self.steps)} if self.cycles else {}

        def to_host() -> dict[str, np.ndarray]:
            named = _named(whole, state, self.groups) | {random.NAME: np.array(key)} | steps
            named |= {name: np.array(one) for name, one in (rows | views).items()}
            return self.tables.packed(named)

        return Snapshot(to_host)

    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the arrays of :meth:`arrays`."""
        self._settle_all()
        arrays = self.tables.unpacked(arrays)
        self.masters = self.weights.cast_frozen(loaded("model", arrays, self.masters))
        rows = {
            name: {
                entry: checked(self.tables.key(entry, name), arrays, tuple(one.shape))
                for entry, one in entries.items()
            }
            for name, entries in self.state["rows"].items()
        }
        self.state = {**_restored(arrays, self.state, self.groups), "rows": rows}
        self.steps = int(np.asarray(arrays[STEPS])) if self.cycles else 0
        mx.eval(self.masters, self.state)
        random.load(arrays)

    def restart(self, seed: int) -> None:
        """Reset to the initial values of a seed."""
        self._settle_all()
        self.load(initial_arrays(self.model, self.plan.inits, seed))
        self.state, self.steps = {**self.state, **self._at_first()}, 0
        mx.eval(self.state)
        random.seed(seed)
        mx.reset_peak_memory()

    def _at_first(self) -> dict[str, Any]:
        """Return the parts of the initial state that do not depend on a seed."""
        return {
            "optimizer": initial_state(self.groups, self.framework.ops.zeros),
            "rows": self.tables.initial_state(),
            "scaler": loss_scale(self.framework.ops) if self.binding.dtype == "float16" else {},
            "updates": mx.array(0.0),
        }

    @property
    def traces(self) -> int:
        """The number of traces of the step's graphs so far."""
        return self.graphs.traces

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        mx.synchronize()

    def peak_bytes(self) -> int | None:
        """Return the peak memory that MLX allocated, in bytes."""
        return mx.get_peak_memory()


# Masters and state by name on the host, as in a checkpoint

STEPS = "optimizer.steps"
"""Checkpoint name of the number of steps, skipped updates included, which decides which stages are due."""

_PREFIXES = {"states": "state", "scaler": "scaler"}
"""Part of the state -> the prefix of its entries' names."""


def _named(
    masters: Mapping[str, Any], state: Mapping[str, Any], groups: Mapping[str, Group]
) -> dict[str, np.ndarray]:
    """Return all masters and state on the host, by name. Waits."""
    stacks = tree_map(np.array, state["optimizer"])
    named = {f"model.{name}": np.array(master) for name, master in masters.items()}
    named["optimizer.updates"] = np.array(state["updates"])
    named |= {f"optimizer.{name}": part for name, part in by_parameter(groups, stacks).items()}
    for part, prefix in _PREFIXES.items():
        named |= {f"{prefix}.{name}": np.array(value) for name, value in state[part].items()}
    return named


def _bits(array: mx.array) -> mx.array:
    """Return bfloat16, which NumPy lacks, as int16."""
    return array.view(mx.int16) if array.dtype == mx.bfloat16 else array


def _restored(
    saved: Mapping[str, np.ndarray], old: Mapping[str, Any], groups: Mapping[str, Group]
) -> dict[str, Any]:
    """Return the saved state with the shapes of ``old``; raises as :func:`loaded`."""

    def stack(prefix: str, held: mx.array, group: Group) -> mx.array:
        shape = tuple(held.shape[1:] if group.rule.stacked else held.shape)
        parts = [checked(f"{prefix}.{member.name}", saved, shape) for member in group.members]
        whole = mx.stack(parts) if group.rule.stacked else parts[0]
        return whole.view(mx.bfloat16) if held.dtype == mx.bfloat16 else whole

    optimizer = {
        key: {
            anchor: {
                entry: stack(f"optimizer.{anchor}.{entry}", held, groups[key])
                for entry, held in entries.items()
            }
            for anchor, entries in anchors.items()
        }
        for key, anchors in old["optimizer"].items()
    }
    updates = checked("optimizer.updates", saved, ())
    new = {**old, "optimizer": optimizer, "updates": updates}
    return new | {part: loaded(prefix, saved, old[part]) for part, prefix in _PREFIXES.items()}
