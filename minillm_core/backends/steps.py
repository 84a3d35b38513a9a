"""The parts of a training step that are the same on torch and MLX: figures, loss scale, State."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from minillm_core.backends.base import Batch, Phase, StepResult
from minillm_core.backends.ranks import Ranks
from minillm_core.errors import PluginCodeError
from minillm_core.nn.decoder import LossSpec, lookup
from minillm_core.nn.module import declared, named_modules
from minillm_core.nn.param import State
from minillm_core.optim.rows import LAST
from minillm_core.plan import Plan
from minillm_core.plan.build import owners_of
from minillm_core.plan.plan import variants_of

Arrays = dict[str, Any]

TERM = "term."
"""Before the key of a loss term or of a further target, in the figures of a step."""


def step_result(figures: Mapping[str, float]) -> StepResult:
    """Make the result of a step from its figures by name.

    Args:
        figures: ``loss``, ``grad_norm``, ``objective`` (the differentiated number, times the
            loss scale), ``skipped`` (1.0: the update was not made), ``term.<key>``; in float16 ``scale``,
            the loss scale of this step.
    """
    terms = {k.removeprefix(TERM): v for k, v in figures.items() if k.startswith(TERM)}
    loss, skipped = figures["loss"], figures["skipped"] > 0
    above = figures.get("scale", SMALLEST_SCALE) > SMALLEST_SCALE
    sound = all(math.isfinite(figure) for figure in (loss, *terms.values()))
    return StepResult(
        loss, figures["grad_norm"], terms, skipped=skipped, overflow=skipped and above and sound
    )


def warmed(
    plan: Plan, phase: Phase, host: Batch, context: int = 1
) -> Iterator[tuple[Mapping[str, int], int, Batch]]:
    """Yield what a trainer compiles before its first step, each within its phase.

    Args:
        plan: with staged values, or batches of several sizes.
        phase: entered around each, with its name.
        host: a micro-batch of the run, of any size.
        context: ranks that share each row.

    Returns:
        Staged values, micro-batches of a step (0: as many as the first step has), and a micro-batch of
        the right size; what is in it does not matter.
    """
    variants = variants_of(plan)
    for number, (staged, shape) in enumerate(variants, 1):
        if shape is None:
            yield staged, 0, host
            continue
        size = shape.rows, shape.seq_len // context
        batch = {name: np.resize(part, (*size, *part.shape[2:])) for name, part in host.items()}
        what = f"compiling for {shape.rows} rows of {shape.seq_len} ({number} of {len(variants)})"
        with phase(what):
            yield staged, shape.accumulate, batch


def supervised_positions(
    spec: LossSpec, host: Batch, staged: Mapping[str, int]
) -> np.ndarray | None:
    """Find where a micro-batch has anything to predict, and fill up to one of a few sizes.

    The others are positions without a target, so that all are distinct and none counts twice; their
    number is a function of the micro-batch alone, so that a resumed run computes the same bits.

    Args:
        spec: gathers.
        host: labels int32 (B, T), and the fields of further targets.
        staged: the values by which further targets are present.

    Returns:
        int32 (S,), sorted, of B T positions counted row by row; at least the smallest size. None:
        all positions.
    """
    assert spec.gather is not None
    labels = host["labels"]
    wanted = labels >= 0
    for target in spec.present(staged):
        if target.field is not None:
            wanted |= host[target.field] >= 0
        elif (ahead := (target.offset or 1) - 1) < labels.shape[1]:
            wanted[:, : labels.shape[1] - ahead] |= labels[:, ahead:] >= 0
    taken = wanted.reshape(-1)
    size, count = -(-taken.size // spec.gather.buckets), int(np.count_nonzero(taken))
    filled = size * max(1, -(-count // size))
    if filled >= taken.size:
        return None
    taken[np.flatnonzero(~taken)[: filled - count]] = True
    return np.flatnonzero(taken).astype(np.int32)


def seen_rows(plan: Plan, micro: Sequence[Batch]) -> tuple[Sequence[Batch], dict[str, np.ndarray]]:
    """Find the rows that a step sees of the tables that are updated by rows.

    Their number is rounded up to one of a few sizes by the first rows that are not seen, and is a
    function of the step's batches alone, so that a resumed run computes the same bits.

    Args:
        plan: the plan.
        micro: the step's micro-batches.

    Returns:
        The micro-batches, each with the places of its ids among those rows, int32 (B, T); and the
        rows by table, int32 (S,), sorted and distinct.
    """
    made, found = [dict(batch) for batch in micro], dict[str, np.ndarray]()
    alike: dict[Any, tuple[np.ndarray, list[np.ndarray]]] = {}  # tables that are looked up alike
    for name, table in plan.by_rows.items():
        key = table.field, plan.parameters[name].shape[0], table.buckets
        if key not in alike:
            alike[key] = _places([batch[table.field] for batch in micro], *key[1:])
        found[name], places = alike[key]
        for batch, place in zip(made, places, strict=True):
            batch[lookup(name)] = place
    return made, found


def _places(
    ids: Sequence[np.ndarray], count: int, buckets: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return rows that hold ids of a table of ``count``, filled up, and each id's place among them."""
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


PENDING, AGE = "rows.pending.", "rows.age."
"""Before a table's name, in a checkpoint: the bits in which the rows on the device differ from those that
are up to date, and updates since each was brought up to date."""


def table_key(entry: str, name: str) -> str:
    """Name an entry of a table's state in a checkpoint; moments are named as those of other parameters.

    Not by the same names: without the numbers of updates, a branch that updates every row would take
    them for moments of now.
    """
    if entry == LAST:
        return f"{AGE}{name}"
    return f"optimizer.rows.{entry}.{name}" if "." in entry else f"rows.{entry}.{name}"


def packed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write a snapshot's tables as a checkpoint has them: up to date, and what makes them the old bits.

    Readers of a checkpoint get whole tables, a resumed run those that it had; where nothing is
    pending, as in a branch of a run that had dense tables, all rows are up to date.

    Args:
        arrays: with ``model.<name>`` up to date, ``rows.pending.<name>`` the same as it lies on the
            device, and ``rows.age.<name>`` the update at which each row was brought up to date.
    """
    for key in [name for name in arrays if name.startswith(PENDING)]:
        name = key.removeprefix(PENDING)
        whole = arrays[f"model.{name}"].view(np.uint32)
        arrays[key] = arrays[key].view(np.uint32) ^ whole
        arrays[AGE + name] = arrays["optimizer.updates"] - arrays[AGE + name]
    return arrays


def unpacked(arrays: Mapping[str, np.ndarray], tables: Iterable[str]) -> dict[str, np.ndarray]:
    """Read what :func:`packed` wrote: ``model.<name>`` is the table as it lies on the device."""
    found = dict(arrays)
    for name in tables:
        bits = np.array(found[PENDING + name]) ^ np.array(found[f"model.{name}"]).view(np.uint32)
        found[f"model.{name}"] = bits.view(np.float32)
        found[AGE + name] = np.array(found["optimizer.updates"]) - np.array(found[AGE + name])
    return found


# The loss scale of float16, on the device: nothing is read back (arXiv:1710.03740)

START_SCALE, LARGEST_SCALE = 2.0**16, 2.0**24
SMALLEST_SCALE = 1.0
"""Gradients that leave float16's range even with this one are at fault themselves."""
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


def loss_scale(ops: Any) -> Arrays:
    """Return the scale, good steps since it moved, steps skipped so far; all 0-d float32."""
    start = {"scale": START_SCALE, "good": 0.0, "skipped": 0.0}
    return {name: ops.scalar(number) for name, number in start.items()}


def next_loss_scale(ops: Any, state: Mapping[str, Any], found: Any) -> Arrays:
    """Return the next step's scale: halved where this step is skipped, doubled after 2,000 good steps.

    Args:
        ops: the framework's.
        state: as of :func:`loss_scale`.
        found: 0-d float32, 1 where this step is skipped.
    """
    good = (state["good"] + 1) * (1 - found)
    grow = ops.astype(good >= INTERVAL, "float32")
    scale = state["scale"] * ops.where(found > 0, BACKOFF, 1 + grow * (GROWTH - 1))
    return {
        "scale": ops.minimum(ops.maximum(scale, SMALLEST_SCALE), LARGEST_SCALE),
        "good": good * (1 - grow),
        "skipped": state["skipped"] + found,
    }


class Statistics:
    """A step's statistics: how they are reduced over micro-batches, and the State written from them.

    Args:
        model: materialised.
        ops: its framework's.
    """

    def __init__(self, model: Any, ops: Any) -> None:
        self.ops = ops
        self.writers = {p: m for p, m in named_modules(model) if m.statistics}
        self.owners = owners_of(model) if self.writers else {}
        self.kinds = {
            f"{path}.{name}": kind
            for path, module in self.writers.items()
            for name, kind in module.statistics.items()
        }
        self.holders = {
            name: (module, attribute) for name, module, attribute, _ in declared(model, State)
        }

    def states(self) -> Arrays:
        """Return the State that the modules hold now, by name."""
        return {name: getattr(*holder) for name, holder in self.holders.items()}

    def merged(self, held: Mapping[str, Any] | None, fresh: Mapping[str, Any]) -> Arrays:
        """Merge one micro-batch's statistics with those of earlier micro-batches, if any."""
        if held is None:
            return dict(fresh)
        return {
            name: self.ops.maximum(held[name], value)
            if self.kinds[name] == "max"
            else held[name] + value
            for name, value in fresh.items()
        }

    def over(self, ranks: Ranks, grads: Arrays, figures: Arrays, found: Arrays) -> None:
        """Put the sums over all ranks in the place of gradients, figures and statistics; largest as such."""
        largest = [name for name in found if self.kinds[name] == "max"]
        parts = [(grads, [*grads]), (figures, [*figures])]
        parts.append((found, [name for name in found if name not in largest]))
        one = [self.ops.astype(part[name], "float32") for part, names in parts for name in names]
        sums = iter(ranks.total(one))
        for part, names in parts:
            part.update(zip(names, sums, strict=False))
        if largest:
            most = ranks.largest([found[name] for name in largest])
            found.update(zip(largest, most, strict=True))

    def next_states(self, statistics: Mapping[str, Any], mean: Callable[[Any], Any]) -> Arrays:
        """Return the State that the modules make of their statistics, by name; the rest is left out.

        Args:
            statistics: reduced over the step.
            mean: divides a sum over micro-batches by their number.
        """
        written = {}
        for path, module in self.writers.items():
            given = {}
            for name, kind in module.statistics.items():
                value = statistics[f"{path}.{name}"]
                given[name] = mean(value) if kind == "mean" else value
            fresh = module.next_state(**given)
            names = {a: name for name, (holder, a) in self.holders.items() if holder is module}
            own = {attribute: getattr(module, attribute) for attribute in names}
            _check_written(path, self.owners.get(path, "core"), fresh, own)
            written.update((names[attribute], value) for attribute, value in fresh.items())
        return written


def _check_written(path: str, owner: str, written: Any, held: Mapping[str, Any]) -> None:
    """Refuse a result of ``next_state`` that is not the module's State, with its shapes, in float32.

    torch would cast or stretch it into its place, and MLX would keep it as it is until a checkpoint
    cannot be written, or not be read back.

    Args:
        path: of the module.
        owner: of the module.
        written: the result of ``next_state``.
        held: attribute -> array, of all State of the module.

    Raises:
        PluginCodeError: it is something else.
    """
    if not isinstance(written, Mapping) or not written.keys() <= held.keys():
        names = f"'{min(written.keys() - held.keys())}'" if isinstance(written, Mapping) else ""
        got = names or type(written).__name__
        raise _did(owner, f"returned {got} from", path, f"a dict of State: {sorted(held)}")
    for name, array in written.items():
        shape, old = getattr(array, "shape", None), held[name]
        if shape is None or tuple(shape) != tuple(old.shape):
            got = type(array).__name__ if shape is None else f"shape {tuple(shape)}"
            fix = f"it keeps the shape that it is declared with, {tuple(old.shape)}"
            raise _did(owner, f"returned State '{name}' of {got} from", path, fix)
        if array.dtype != old.dtype:
            got, kept = (str(one.dtype).rpartition(".")[2] for one in (array, old))
            fix = f"State is kept in {kept}: self.ops.astype({name}, {kept!r})"
            raise _did(owner, f"returned State '{name}' of {got} from", path, fix)


def _did(owner: str, did: str, path: str, fix: str) -> PluginCodeError:
    return PluginCodeError(owner, "next_state", did=did, where=path, fix=fix)
