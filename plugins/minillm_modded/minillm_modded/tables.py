"""Row-wise tables, common to both frameworks: a step holds only the rows that it looks up.

The core loads a class of ``tables_torch`` or ``tables_mlx``, by entry points of the group ``minillm.tables``.
A step holds the looked-up rows, (S, C); all others are unchanged, each with the number of the update at
which it was last brought up to date, from which the table's ``RowRule`` computes the pending updates.
The step itself runs the group's stages, on fewer rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from minillm_core import Plan, RowRule
from minillm_core.inspection import lookup, update

__all__ = ["AGE", "LAST", "PENDING", "SeenRows", "state_shapes", "stepped", "table_key"]

LAST = "last"
"""Key of a row's state for the number of the update at which it was last brought up to date."""

PENDING, AGE = "rows.pending.", "rows.age."
"""Prefixes of a table's name in a checkpoint: the bits in which the stored rows differ from the up-to-date
rows, and the number of updates since each row was brought up to date.
"""

Held = Mapping[str, Any]
"""State of some rows: ``param`` and the group's state by ``stage.entry`` (``precondition.m``), float32 (S, C);
``last``, float32 (S,).
"""


class SeenRows:
    """The rows that steps look up, computed on the host, and the tables of a checkpoint.

    Args:
        rules: table -> its rule.
        plan: the plan.
    """

    def __init__(self, rules: Mapping[str, RowRule], plan: Plan) -> None:
        self.rules, self.plan = rules, plan

    def rows_read(
        self, micro: Sequence[Mapping[str, np.ndarray]]
    ) -> tuple[Sequence[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
        """Find the rows that a step looks up.

        Their number is rounded up to one of a few sizes by adding the first rows not looked up, and is a
        function of the step's batches only, so that a resumed run computes the same bits.

        Args:
            micro: the step's micro-batches.

        Returns:
            The micro-batches, each with the indices of its ids among those rows, int32 (B, T); and the
            rows by table, int32 (S,), sorted and distinct.
        """
        made, found = [dict(batch) for batch in micro], dict[str, np.ndarray]()
        alike: dict[
            Any, tuple[np.ndarray, list[np.ndarray]]
        ] = {}  # tables with equal lookups share them
        for name, table in self.plan.by_rows.items():
            key = table.field, self.plan.parameters[name].shape[0], table.buckets
            if key not in alike:
                alike[key] = _places([batch[table.field] for batch in micro], *key[1:])
            found[name], places = alike[key]
            for batch, place in zip(made, places, strict=True):
                batch[lookup(name)] = place
        return made, found

    def views(
        self, now: Callable[[str], Mapping[str, Any]]
    ) -> Iterator[tuple[Any, Any, Mapping[str, Any]]]:
        """Yield member, array and state of each table with a view; ``now`` brings it up to date."""
        for name, rule in self.rules.items():
            if (member := rule.group.members[0]).view:
                own = {**now(name)}
                own.pop(LAST, None)
                yield member, own.pop("param"), own

    def packed(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert a snapshot's tables to checkpoint form: up-to-date rows, and what restores the stored bits.

        Readers of a checkpoint get whole up-to-date tables, a resumed run restores its stored rows; if
        nothing is pending, as in a branch of a run with dense tables, all rows are up to date.

        Args:
            arrays: with ``model.<name>`` up to date, ``rows.pending.<name>`` as stored on the
                device, and ``rows.age.<name>`` the update at which each row was brought up to date.
        """
        for name in self.rules:
            whole = arrays[f"model.{name}"].view(np.uint32)
            arrays[PENDING + name] = arrays[PENDING + name].view(np.uint32) ^ whole
            arrays[AGE + name] = arrays["optimizer.updates"] - arrays[AGE + name]
        return arrays

    def unpacked(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Invert :meth:`packed`: ``model.<name>`` becomes the table as stored on the device."""
        found = dict(arrays)
        for name in self.rules:
            bits = np.array(found[PENDING + name]) ^ np.array(found[f"model.{name}"]).view(
                np.uint32
            )
            found[f"model.{name}"] = bits.view(np.float32)
            found[AGE + name] = np.array(found["optimizer.updates"]) - np.array(found[AGE + name])
        return found


def _places(
    ids: Sequence[np.ndarray], count: int, buckets: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the rows for the ids of a table of ``count`` rows, filled up, and each id's index among them."""
    seen = np.zeros(count, bool)
    for one in ids:
        seen[one] = True
    there, size = np.count_nonzero(seen), -(-min(count, sum(one.size for one in ids)) // buckets)
    wanted = min(count, -(-there // size) * size)
    seen[np.flatnonzero(~seen)[: wanted - there]] = True
    rows = np.flatnonzero(seen).astype(np.int32)
    places = np.empty(count, np.int32)
    places[rows] = np.arange(wanted, dtype=np.int32)
    return rows, [places[one] for one in ids]


def table_key(entry: str, name: str) -> str:
    """Name an entry of a table's state in a checkpoint, distinct from the names of other parameters' moments.

    With equal names, a branch that updates every row would use these moments as current, without
    the numbers of updates.
    """
    if entry == LAST:
        return f"{AGE}{name}"
    return f"optimizer.rows.{entry}.{name}" if "." in entry else f"rows.{entry}.{name}"


def state_shapes(rule: RowRule) -> dict[str, tuple[int, ...]]:
    """Map the state of a table's rows to shapes: moments (R, C), ``last`` (R,)."""
    anchors = rule.group.state_arrays().items()
    moments = {
        f"{a}.{entry}": one.shape for a, entries in anchors for entry, one in entries.items()
    }
    return {**moments, LAST: rule.group.shape[:1]}


def stepped(
    rule: RowRule,
    ops: Any,
    held: Held,
    shared: Mapping[str, Any],
    grad: Any,
    factor: Any,
    updates: Any,
    values: Mapping[str, Any],
    witness: Callable[[str], None],
) -> dict[str, Any]:
    """Bring rows up to date, and update them by their gradient; return their complete state.

    Args:
        rule: the table's.
        ops: the framework's.
        held: the rows.
        shared: state common to the whole table.
        grad: float32 (S, C).
        factor: 0-d float32, multiplies the gradient.
        updates: 0-d float32: number of previous updates.
        values: schedule value -> 0-d float32.
        witness: called with the stages that were run.
    """
    now = rule.brought(ops, held, shared, updates)
    state: dict[str, dict[str, Any]] = {}
    for name in now.keys() - {"param"}:
        anchor, _, entry = name.partition(".")
        state.setdefault(anchor, {})[entry] = now[name]
    params, states = update(
        ops,
        {"": rule.group},
        {rule.name: now["param"]},
        {rule.name: grad},
        factor,
        {"": state},
        updates + 1.0,
        values,
        witness,
    )
    new = {f"{a}.{e}": one for a, entries in states[""].items() for e, one in entries.items()}
    last = ops.broadcast_to(updates + 1.0, held[LAST].shape)
    return {"param": params[rule.name], **new, LAST: last}
