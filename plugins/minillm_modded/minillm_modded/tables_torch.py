"""Row-wise tables on torch: a step's rows are gathered before it and written back after it."""

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
"""Number of rows brought up to date at once, if a whole table is."""


class RowTables(SeenRows):
    """The row-wise tables of a plan, their state, and the rows of the current step.

    Args:
        rules: table -> its rule.
        plan: the plan.
        weights: master weights and parameters; a table's parameter has a step's rows, and is empty between steps.
        framework: ops and witness.
        compiled: compiles catching up and updating rows, if the binding enables it.
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
        self.met: set[tuple[int, ...]] = set()  # sizes that are already compiled
        self.free_whole()

    def _give(self, name: str, rows: Tensor) -> None:
        """Set a table's parameter to some rows, in the compute dtype."""
        parameter = self.weights.parameters[name]
        parameter.data = rows.to(parameter.dtype)

    def _run(self, what: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method, compiled for the sizes of this step if those are known."""
        key = what.__name__, self.sizes if arguments[0] is self.rows else ()
        if key not in self.made:
            self.made[key] = self.compiled(what)
        return self.made[key](*arguments)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of rows of each table in the step."""
        return tuple(rows.shape[0] for rows in self.rows.values())

    @property
    def words(self) -> str:
        """Format the number of rows of each table in the step."""
        return ", ".join(f"{len(rows):,} rows of {name}" for name, rows in self.rows.items())

    @torch.no_grad()
    def load_rows(
        self,
        rows: Tensors,
        updates: Tensor,
        values: Tensors,
        compiling: Callable[[str], AbstractContextManager[None]] | None,
    ) -> None:
        """Set the parameters to the rows of the step, brought up to date after ``updates``, 0-d float32."""
        self.rows.update((name, index.long()) for name, index in rows.items())
        if compiling is not None and self.sizes not in self.met:
            self.met.add(self.sizes)
            with compiling(self.words):
                self._warm(updates, values)
        if self.placed:
            self.free_whole()
        for name, taken in self._run(self._taken, self.rows, updates).items():
            self._give(name, taken)

    def _warm(self, updates: Tensor, values: Tensors) -> None:
        """Compile the row functions for the sizes of the step, and discard the results."""
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

    def view_inputs(self, updates: Tensor) -> Iterator[tuple[Any, Tensor, Tensors]]:
        """Bring tables that have a view up to date, one by one."""
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
        """Update the step's rows, unless ``found`` is 1, and bring the next rows in cyclic order up to date."""
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
        """Return a table with all rows up to date, in newly allocated memory."""
        master = self.weights.masters[name]
        made = torch.empty(master.shape, dtype=dtype, device=master.device)
        for first in range(0, len(master), PART):
            part = slice(first, first + PART)
            made[part] = self._now(name, part, updates)["param"]
        return made

    def place_whole(self, updates: Tensor) -> None:
        """Set the parameters to whole tables for evaluation and sampling, until the next step."""
        for name in self.rules if not self.placed else ():
            dtype = self.weights.parameters[name].dtype
            self._give(name, self._whole(name, updates, dtype))
        self.placed = True

    def free_whole(self) -> None:
        """Free the whole tables; they are rebuilt from the updated master weights."""
        self.placed = False
        for name in self.rules:
            self._give(name, self.weights.masters[name][:0])

    def arrays(self, updates: Tensor) -> dict[str, Tensor]:
        """Return a snapshot of the tables, in the form that ``packed`` takes."""
        whole = {f"model.{name}": self._whole(name, updates) for name in self.rules}
        raw = {f"{PENDING}{name}": self.weights.masters[name] for name in self.rules}
        return whole | raw | self.state_tensors()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the stored state by its names in a checkpoint."""
        found = {}
        for name in self.rules:
            entries = {**self.held[name], **self.shared[name]}
            found |= {table_key(entry, name): tensor for entry, tensor in entries.items()}
        return found
