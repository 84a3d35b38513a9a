"""Tables on torch of which a step holds the rows that it saw: gathered before it, written back behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from minillm_core import Plan, RowRule
from minillm_modded.tables import LAST, PENDING, SeenRows, state_shapes, stepped, table_key

__all__ = ["RowTables"]

Tensors = Mapping[str, Tensor]

PART = 2**16
"""Rows of a table that are brought up to date at once, where all are."""


class RowTables(SeenRows):
    """The tables of a plan that are updated by rows, their state, and the rows of the step.

    Args:
        rules: table -> its rule.
        plan: the plan.
        weights: masters and parameters; a table's parameter holds rows of a step, and nothing between.
        framework: ops and witness.
        compiled: compiles what brings rows up to date and updates them, where the binding says so.
    """

    def __init__(
        self,
        rules: Mapping[str, RowRule],
        plan: Plan,
        weights: Any,
        framework: Any,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        super().__init__(rules, plan)
        self.weights, self.framework, self.compiled = weights, framework, compiled
        zeros = framework.ops.zeros
        self.held = {
            name: {entry: zeros(shape) for entry, shape in state_shapes(rule).items()}
            for name, rule in self.rules.items()
        }
        self.shared = {
            name: {entry: zeros(shape) for entry, shape in rule.shared.items()}
            for name, rule in self.rules.items()
        }
        self.rows: dict[str, Tensor] = {}  # of the step, int64 (S,)
        self.made: dict[Any, Callable[..., Any]] = {}
        self.met: set[tuple[int, ...]] = set()  # sizes that were compiled for
        self.leave()

    def _give(self, name: str, rows: Tensor) -> None:
        """Let a table's parameter be some rows, in the compute dtype."""
        parameter = self.weights.parameters[name]
        parameter.data = rows.to(parameter.dtype)

    def _run(self, what: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method, compiled for the sizes of this step where it is given its rows."""
        key = what.__name__, self.sizes if arguments[0] is self.rows else ()
        if key not in self.made:
            self.made[key] = self.compiled(what)
        return self.made[key](*arguments)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows of each table the step holds."""
        return tuple(rows.shape[0] for rows in self.rows.values())

    @property
    def words(self) -> str:
        """How many rows of each table the step holds, in words."""
        return ", ".join(f"{len(rows):,} rows of {name}" for name, rows in self.rows.items())

    @torch.no_grad()
    def take(
        self,
        rows: Tensors,
        updates: Tensor,
        values: Tensors,
        compiling: Callable[[str], AbstractContextManager[None]] | None,
    ) -> None:
        """Let the parameters be the rows of the step, brought up to date after ``updates``, 0-d float32."""
        self.rows.update((name, index.long()) for name, index in rows.items())
        if compiling is not None and self.sizes not in self.met:
            self.met.add(self.sizes)
            with compiling(self.words):
                self._warm(updates, values)
        if self.placed:
            self.leave()
        for name, taken in self._run(self._taken, self.rows, updates).items():
            self._give(name, taken)

    def _warm(self, updates: Tensor, values: Tensors) -> None:
        """Compile what is done with rows for the sizes of the step, and drop its results."""
        self._run(self._taken, self.rows, updates)
        zeros, one = self.framework.ops.zeros, updates.new_ones(())
        grads = {
            name: zeros((len(rows), self.weights.masters[name].shape[1]))
            for name, rows in self.rows.items()
        }
        self._run(self._stepped, self.rows, grads, one, updates, values, one)
        self._run(self._next, updates)

    def _taken(self, rows: Tensors, updates: Tensor) -> dict[str, Tensor]:
        now = {name: self._now(name, index, updates)["param"] for name, index in rows.items()}
        return {name: one.to(self.weights.parameters[name].dtype) for name, one in now.items()}

    def viewed(self, updates: Tensor) -> Iterator[tuple[Any, Tensor, Tensors]]:
        """Bring tables up to date that have a view, one by one."""
        return self.views(lambda name: self._now(name, slice(None), updates))

    def _now(self, name: str, index: Tensor | slice, updates: Tensor) -> dict[str, Tensor]:
        """Bring some rows up to date."""
        held, shared = self._held(name, index), self.shared[name]
        return self.rules[name].brought(self.framework.ops, held, shared, updates)

    def _held(self, name: str, index: Tensor | slice) -> dict[str, Tensor]:
        arrays = {"param": self.weights.masters[name], **self.held[name]}
        return {entry: array[index] for entry, array in arrays.items()}

    def step(
        self, grads: Tensors, factor: Tensor, updates: Tensor, values: Tensors, found: Tensor
    ) -> None:
        """Update the rows of the step, unless ``found`` is 1, and those that are next in turn."""
        of_tables = {name: grads[name] for name in self.rules}
        new = self._run(self._stepped, self.rows, of_tables, factor, updates, values, found)
        for name, (rows, shared) in new.items():
            self._write(name, self.rows[name], rows)
            for entry, one in shared.items():
                self.shared[name][entry].copy_(one)
        for name, (index, rows) in self._run(self._next, updates + (1.0 - found)).items():
            self._write(name, index, rows)

    def _write(self, name: str, index: Tensor, rows: Tensors) -> None:
        arrays = {"param": self.weights.masters[name], **self.held[name]}
        for entry, new in rows.items():
            arrays[entry].index_copy_(0, index, new)

    def _stepped(
        self,
        rows: Tensors,
        grads: Tensors,
        factor: Tensor,
        updates: Tensor,
        values: Tensors,
        found: Tensor,
    ) -> dict[str, Any]:
        ops, skip, made = self.framework.ops, found > 0, {}
        for name, index in rows.items():
            rule, held, shared = self.rules[name], self._held(name, index), self.shared[name]
            more = (grads[name], factor, updates, values, self.framework.witness)
            new = stepped(rule, ops, held, shared, *more)
            later = rule.next_shared(ops, shared, updates, values)
            made[name] = (
                {entry: torch.where(skip, held[entry], one) for entry, one in new.items()},
                {entry: torch.where(skip, shared[entry], one) for entry, one in later.items()},
            )
        return made

    def _next(self, updates: Tensor) -> dict[str, Any]:
        made = {}
        for name, rule in self.rules.items():
            index = rule.in_turn(self.framework.ops, updates).long()
            now = self._now(name, index, updates)
            made[name] = index, {**now, LAST: updates.expand(index.shape)}
        return made

    @torch.no_grad()
    def _whole(self, name: str, updates: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a table with all rows up to date, in memory of its own."""
        master = self.weights.masters[name]
        made = torch.empty(master.shape, dtype=dtype, device=master.device)
        for first in range(0, len(master), PART):
            part = slice(first, first + PART)
            made[part] = self._now(name, part, updates)["param"]
        return made

    def place(self, updates: Tensor) -> None:
        """Let the parameters be whole tables, to be evaluated and sampled from, until the next step."""
        for name in self.rules if not self.placed else ():
            dtype = self.weights.parameters[name].dtype
            self._give(name, self._whole(name, updates, dtype))
        self.placed = True

    def leave(self) -> None:
        """Give the memory of whole tables back; they are made anew from masters that were written."""
        self.placed = False
        for name in self.rules:
            self._give(name, self.weights.masters[name][:0])

    def arrays(self, updates: Tensor) -> dict[str, Tensor]:
        """Return what a snapshot has of the tables, as ``packed`` takes it."""
        whole = {f"model.{name}": self._whole(name, updates) for name in self.rules}
        raw = {f"{PENDING}{name}": self.weights.masters[name] for name in self.rules}
        return whole | raw | self.saved()

    def saved(self) -> dict[str, Tensor]:
        """Return the state by its names in a checkpoint, as it lies on the device."""
        found = {}
        for name in self.rules:
            entries = {**self.held[name], **self.shared[name]}
            found |= {table_key(entry, name): tensor for entry, tensor in entries.items()}
        return found
