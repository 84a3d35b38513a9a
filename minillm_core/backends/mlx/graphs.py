"""The graphs of a step on MLX: pure functions of master weights, compute copies and state, each compiled whole.

With one micro-batch a step is one graph. With gradient accumulation there is one graph per micro-batch,
and one for the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import mlx.core as mx

from minillm_core.backends.mlx.model import Arrays, MLXModel, assign
from minillm_core.backends.native import Tables
from minillm_core.backends.steps import TERM, next_loss_scale
from minillm_core.optim.follow import FOLLOW, sum_tied
from minillm_core.optim.groups import Group, Member
from minillm_core.optim.update import clip_factor, global_norm, update

Figures = dict[str, mx.array]
Staged = Mapping[str, int]
State = dict[str, Any]
Sums = dict[str, Any]  # grads, figures, statistics
Stepped = tuple[Arrays, State, Figures]
TableState = Mapping[str, Arrays]  # table -> the state of its rows, and of the whole table


class Graphs:
    """The graphs by kind, each traced once for every combination of staged values and sizes.

    ``whole(masters, state, batch, given) -> masters, state, figures``, with the stages that are due
    ``grads(copies, state, batch, given) -> sums``: gradients, figures, statistics
    ``accumulate(copies, state, batch, given, sums) -> sums``: the same, added to ``sums``
    ``update(masters, state, sums, given, mean) -> masters, state, figures``, like whole; mean is 1 / batches

    Args:
        of: the model, with its plan, binding and weights.
        groups: key -> parameter group, without those of tables that are updated by rows.
        tables: the tables that are updated by rows; ``given`` contains the rows of a step.
    """

    def __init__(self, of: MLXModel, groups: Mapping[str, Group], tables: MLXTables) -> None:
        self.tables = tables
        self.plan, self.model, self.framework = of.plan, of.model, of.framework
        self.weights, self.statistics, self.groups = of.weights, of.statistics, groups
        self.compiled = of.binding.compile
        self.made: dict[Any, Callable[..., Any]] = {}
        self.traces = 0

    def graph(self, kind: str, staged: Staged, *due: Set[int]) -> Callable[..., Any]:
        """Return a graph with these staged values baked in; for an update also the stages that are due."""
        key = (kind, *staged.values(), *due)
        if key not in self.made:
            part = getattr(self, f"_{kind}")

            def traced(*arguments: Any) -> Any:
                self.traces += 1
                return part(staged, *due, *arguments)

            # The random key is an input and an output: otherwise it would be baked into the compiled
            # step, which would draw the same random numbers each time.
            drawn = mx.random.state
            self.made[key] = (
                mx.compile(traced, inputs=drawn, outputs=drawn) if self.compiled else traced
            )
        return self.made[key]

    def _whole(
        self,
        staged: Staged,
        due: Set[int],
        masters: Arrays,
        state: State,
        batch: Arrays,
        given: Arrays,
    ) -> Stepped:
        # Casting here, not at the end of the update, was 3 % faster on an H100.
        sums = self._grads(staged, self.cast(masters, state, given), state, batch, given)
        return self._update(staged, due, masters, state, sums, given, mx.array(1.0))

    def cast(self, masters: Arrays, state: State, given: Arrays) -> Arrays:
        """Return the parameters of a step in the compute dtype; of tables, the rows that the step holds."""
        taken = self.tables.gather_rows(masters, state["rows"], state["updates"], given)
        return self.weights.cast(masters | taken)

    def _grads(
        self, staged: Staged, copies: Arrays, state: State, batch: Arrays, given: Arrays
    ) -> Sums:
        """Compute the gradients, figures and statistics of one micro-batch."""
        normaliser, values = given["normaliser"], {**given, **staged}
        if state["scaler"]:
            values["normaliser"] = normaliser * state["scaler"]["scale"]
        assign(self.statistics.holders, state["states"])

        def objective(trained: Arrays) -> Any:
            assign(self.weights.holders, copies | trained)
            loss = self.model(batch, values)
            return loss.objective, loss.sums, loss.terms, loss.statistics

        trained = {name: copies[name] for name in self.weights.trained}
        (total, sums, terms, statistics), grads = mx.value_and_grad(objective)(trained)
        figures = {"loss": sums[0] * normaliser, "objective": total}
        for index, target in enumerate(self.plan.spec.loss.present(staged)):
            figures[TERM + target.key] = sums[index + 1] * normaliser
        for key, (value, labels) in terms.items():
            figures[TERM + key] = value * labels * normaliser
        grads = {key: grad.astype(mx.float32) for key, grad in grads.items()}
        return {"grads": grads, "figures": figures, "statistics": statistics}

    def _accumulate(
        self, staged: Staged, copies: Arrays, state: State, batch: Arrays, given: Arrays, sums: Sums
    ) -> Sums:
        """Compute the same and add it to the sums of earlier micro-batches (gradient accumulation)."""
        fresh = self._grads(staged, copies, state, batch, given)
        added = {
            kind: {name: sums[kind][name] + value for name, value in fresh[kind].items()}
            for kind in ("grads", "figures")
        }
        # in the key order of _first: MLX traces again for a dict in another order
        return added | {
            "statistics": self.statistics.accumulate(sums["statistics"], fresh["statistics"])
        }

    def _update(
        self,
        staged: Staged,
        due: Set[int],
        masters: Arrays,
        state: State,
        sums: Sums,
        given: Arrays,
        mean: Any,
    ) -> Stepped:
        ops, follows = self.framework.ops, self.plan.follows
        grads, counted = sum_tied(ops, follows, sums["grads"], given)
        for name in follows:
            self.framework.witness(f"{FOLLOW}{name}")
        norm = global_norm(ops, counted)
        unscale = 1.0 / state["scaler"]["scale"] if state["scaler"] else None
        norm = norm if unscale is None else norm * unscale
        factor = clip_factor(ops, norm, self.plan.config.train.clip)
        factor = factor if unscale is None else factor * unscale
        figures = {"grad_norm": norm, **sums["figures"]}
        found = 1.0 - mx.isfinite(mx.stack(list(figures.values()))).all().astype(mx.float32)
        updates = state["updates"] + 1
        new_masters, new_optimizer = update(
            ops,
            self.groups,
            masters,
            grads,
            factor,
            state["optimizer"],
            updates,
            given,
            self.framework.witness,
            due=due,
        )
        new_tables, new_rows = self.tables.step(
            masters, state["rows"], grads, factor, state["updates"], given, self.framework.witness
        )
        assign(self.statistics.holders, state["states"])
        fresh = self.statistics.next_states(sums["statistics"], lambda total: total * mean)
        new_state = {
            "optimizer": new_optimizer,
            "states": {**state["states"], **fresh},
            "updates": updates,
            "rows": new_rows,
            "scaler": {},
        }
        if state["scaler"]:
            figures["scale"] = state["scaler"]["scale"]
            new_state["scaler"] = next_loss_scale(ops, state["scaler"], found)
        # frozen masters stay unchanged
        new_masters = _ordered(masters, masters | new_masters | new_tables)
        return new_masters, _ordered(state, new_state), {**figures, "skipped": found}


def _ordered(old: Any, new: Any) -> Any:
    """Put the keys of ``new`` in the order of ``old``: MLX traces again for another order."""
    if isinstance(old, dict):
        return {key: _ordered(value, new[key]) for key, value in old.items()}
    return new


class MLXTables(Tables):
    """The tables that are updated by rows, as pure functions.

    Constructed from the rules by table, the plan, and the framework's ops. Masters are name -> float32;
    ``updates`` is 0-d float32: the number of updates so far.
    """

    def initial_state(self) -> dict[str, Arrays]:
        """Return the initial state."""
        return {}

    def gather_rows(
        self, masters: Arrays, state: TableState, updates: mx.array, given: Mapping[str, Any] | None
    ) -> Arrays:
        """Return rows of the tables, float32, up to date: those of a step, or all if ``given`` is None."""
        return {}

    def view_inputs(
        self, masters: Arrays, state: TableState, updates: mx.array
    ) -> Iterable[tuple[Member, mx.array, Arrays]]:
        """Yield tables that have a view, up to date, one by one: see :func:`minillm_core.optim.views.views_of`."""
        return ()

    def step(
        self,
        masters: Arrays,
        state: TableState,
        grads: Mapping[str, Any],
        factor: mx.array,
        updates: mx.array,
        given: Mapping[str, Any],
        witness: Callable[[str], None],
    ) -> tuple[Arrays, dict[str, Arrays]]:
        """Return the tables and their state after an update of the step's rows and of ``RowRule.in_turn``.

        Args:
            masters: see the class.
            state: the state of the tables.
            grads: name -> float32 gradient, of tables (S, C).
            factor: 0-d float32, multiplies every gradient.
            updates: the number of updates, without this one.
            given: the step's values, and its rows by :func:`~minillm_core.backends.native.rows_of`.
            witness: see :func:`minillm_core.optim.update.update`.
        """
        return {}, {}

    def named(self, masters: Arrays, state: TableState) -> dict[str, mx.array]:
        """Return the state and the tables as they are stored, by name, for :meth:`packed`."""
        return {}

    def key(self, entry: str, name: str) -> str:
        """Return the name in a checkpoint of an entry of a table's state."""
        return f"rows.{entry}.{name}"
