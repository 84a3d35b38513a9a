"""Row-wise tables on MLX: a step holds only the rows that it looks up.

A step takes tables and returns new ones, like all other state; the arrays before it stay in memory until
it is evaluated, so rows are written into a copy of their table. Saved are gradient, norm and arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx

from minillm_core import Plan, RowRule
from minillm_core.inspection import rows_of
from minillm_modded.tables import LAST, PENDING, SeenRows, state_shapes, stepped, table_key

__all__ = ["RowTables"]

Arrays = dict[str, mx.array]
State = Mapping[str, Arrays]
"""Table -> the state of its rows, and the state common to the whole table."""


class RowTables(SeenRows):
    """The row-wise tables of a plan: pure functions of master weights and state.

    Args:
        rules: table -> its rule.
        plan: the plan.
        ops: the framework's.
    """

    def __init__(self, rules: Mapping[str, RowRule], plan: Plan, ops: Any) -> None:
        super().__init__(rules, plan)
        self.ops = ops

    def initial_state(self) -> dict[str, Arrays]:
        """Return the initial state of a run."""
        shapes = {name: {**state_shapes(rule), **rule.shared} for name, rule in self.rules.items()}
        return {n: {entry: mx.zeros(s) for entry, s in one.items()} for n, one in shapes.items()}

    def gather_rows(
        self, masters: Arrays, state: State, updates: mx.array, given: Mapping[str, Any] | None
    ) -> Arrays:
        """Return up-to-date rows of the tables, float32: those of a step, or all if ``given`` is None."""
        found = {}
        for name in self.rules:
            rows = given[rows_of(name)] if given else None
            found[name] = self._now(name, masters, state, updates, rows)["param"]
        return found

    def view_inputs(
        self, masters: Arrays, state: State, updates: mx.array
    ) -> Iterator[tuple[Any, mx.array, Mapping[str, mx.array]]]:
        """Bring tables that have a view up to date, one by one."""
        return self.views(lambda name: self._now(name, masters, state, updates, None))

    def _now(
        self, name: str, masters: Arrays, state: State, updates: mx.array, rows: mx.array | None
    ) -> Arrays:
        held, shared = self._held(name, masters, state, rows)
        return self.rules[name].brought(self.ops, held, shared, updates)

    def step(
        self,
        masters: Arrays,
        state: State,
        grads: Mapping[str, Any],
        factor: mx.array,
        updates: mx.array,
        given: Mapping[str, Any],
        witness: Callable[[str], None],
    ) -> tuple[Arrays, dict[str, Arrays]]:
        """Return the tables and their state after updating the step's rows, and the next rows in cyclic order."""
        tables, states, ops = {}, {}, self.ops
        for name, rule in self.rules.items():
            rows = given[rows_of(name)]
            held, shared = self._held(name, masters, state, rows)
            more = (grads[name], factor, updates, given, witness)
            new = stepped(rule, ops, held, shared, *more)
            shared = rule.next_shared(ops, shared, updates, given)
            whole, _ = self._held(name, masters, state, None)
            whole, turn = _put(whole, rows, new), rule.in_turn(ops, updates + 1)
            due = {entry: mx.take(array, turn, 0) for entry, array in whole.items()}
            now = rule.brought(ops, due, shared, updates + 1)
            whole = _put(whole, turn, {**now, LAST: mx.broadcast_to(updates + 1, turn.shape)})
            tables[name] = whole.pop("param")
            states[name] = {**whole, **shared}
        return tables, states

    def _held(
        self, name: str, masters: Arrays, state: State, rows: mx.array | None
    ) -> tuple[Arrays, Arrays]:
        """Return rows of a table, or all, with their state; and the state common to the whole table."""
        shared = {entry: state[name][entry] for entry in self.rules[name].shared}
        held = {entry: array for entry, array in state[name].items() if entry not in shared}
        held = {"param": masters[name], **held}
        if rows is not None:
            held = {entry: mx.take(array, rows, 0) for entry, array in held.items()}
        return held, shared

    def key(self, entry: str, name: str) -> str:
        """Return the checkpoint name of an entry of a table's state: see :func:`table_key`."""
        return table_key(entry, name)

    def named(self, masters: Arrays, state: State) -> dict[str, mx.array]:
        """Name the state and the stored tables, in the form that ``packed`` takes."""
        found = {f"{PENDING}{name}": masters[name] for name in self.rules}
        for name, entries in state.items():
            found |= {table_key(entry, name): one for entry, one in entries.items()}
        return found


def _put(whole: Arrays, rows: mx.array, new: Arrays) -> Arrays:
    """Write rows into copies of the whole tables."""
    made = {entry: mx.array(array) for entry, array in whole.items()}
    for entry, array in made.items():
        array[rows] = new[entry]
    return made
