"""The parts of a training step that are the same on torch and MLX: metrics, loss scale, statistics and State."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from minillm_core.backends.base import Batch, Phase, StepResult
from minillm_core.backends.ranks import Ranks
from minillm_core.errors import PluginCodeError
from minillm_core.nn.decoder import LossSpec
from minillm_core.nn.module import declared, named_modules
from minillm_core.nn.param import State
from minillm_core.ops.arrays import dtype_name, mismatch
from minillm_core.plan import Plan
from minillm_core.plan.build import owners_of
from minillm_core.plan.plan import variants_of

Arrays = dict[str, Any]

TERM = "term."
"""Prefix of the key of a loss term or further target, in the figures of a step."""


def step_result(figures: Mapping[str, float]) -> StepResult:
    """Build the result of a step from its figures (metrics by name).

    Args:
        figures: ``loss``, ``grad_norm``, ``objective`` (the differentiated loss, times the loss scale),
            ``skipped`` (1.0: the update was skipped), ``term.<key>``; in float16 ``scale``, the loss
            scale of this step.
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
    """Yield each variant of the step that a trainer compiles before its first step, within its phase.

    Args:
        plan: a plan with staged values, or batches of several sizes.
        phase: the context entered around each variant, with its name.
        host: a micro-batch of the run, of any size.
        context: the number of ranks that share each row.

    Returns:
        Staged values, micro-batches per step (0: as many as the first step has), and a micro-batch of
        the right size with arbitrary content.
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
    """Find a micro-batch's supervised positions, padded to one of a few sizes.

    Padding uses positions without a target, so that all are distinct and none counts twice. The size
    depends only on the micro-batch, so that a resumed run computes the same bits.

    Args:
        spec: a loss with ``gather``.
        host: labels int32 (B, T), and the fields of further targets.
        staged: the staged values, which decide which further targets are present.

    Returns:
        int32 (S,), sorted, indices into the B T positions, row by row; at least the smallest size.
        None: all positions.
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


# Dynamic loss scaling for float16 mixed precision, on the device: nothing is read back (arXiv:1710.03740)

START_SCALE, LARGEST_SCALE = 2.0**16, 2.0**24
SMALLEST_SCALE = 1.0
"""Gradients that overflow float16 even at this scale are genuine: the step does not count as an overflow."""
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


def loss_scale(ops: Any) -> Arrays:
    """Return the initial loss-scale state: scale, good steps since it changed, skipped steps; 0-d float32."""
    start = {"scale": START_SCALE, "good": 0.0, "skipped": 0.0}
    return {name: ops.scalar(number) for name, number in start.items()}


def next_loss_scale(ops: Any, state: Mapping[str, Any], found: Any) -> Arrays:
    """Compute the next loss-scale state: halved if this step is skipped, doubled after 2,000 good steps.

    Args:
        ops: the framework's array functions.
        state: the state, as of :func:`loss_scale`.
        found: 0-d float32, 1 if this step is skipped.
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
    """The statistics of a step: their reduction over micro-batches and ranks, and the State written from them.

    Args:
        model: the materialised model.
        ops: the framework's array functions.
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
        """Return the current State arrays of the modules, by name."""
        return {name: getattr(*holder) for name, holder in self.holders.items()}

    def accumulate(self, held: Mapping[str, Any] | None, fresh: Mapping[str, Any]) -> Arrays:
        """Merge one micro-batch's statistics with those of earlier micro-batches, if any."""
        if held is None:
            return dict(fresh)
        return {
            name: self.ops.maximum(held[name], value)
            if self.kinds[name] == "max"
            else held[name] + value
            for name, value in fresh.items()
        }

    def reduce(self, ranks: Ranks, grads: Arrays, figures: Arrays, found: Arrays) -> None:
        """All-reduce gradients, figures and statistics over the ranks, in place: sums, and maxima for "max"."""
        largest = [name for name in found if self.kinds[name] == "max"]
        parts = [(grads, [*grads]), (figures, [*figures])]
        parts.append((found, [name for name in found if name not in largest]))
        one = [self.ops.astype(part[name], "float32") for part, names in parts for name in names]
        sums = iter(ranks.all_reduce_sum(one))
        for part, names in parts:
            part.update(zip(names, sums, strict=False))
        if largest:
            most = ranks.all_reduce_max([found[name] for name in largest])
            found.update(zip(largest, most, strict=True))

    def next_states(self, statistics: Mapping[str, Any], mean: Callable[[Any], Any]) -> Arrays:
        """Compute the new State from the modules' statistics, by name; without State that does not change.

        Args:
            statistics: the step's reduced statistics.
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
    """Check that ``next_state`` returned State of the module, with its shapes and dtypes.

    torch would cast or broadcast a wrong array, and MLX would keep it until a checkpoint cannot be
    written, or cannot be read back.

    Args:
        path: the module's path.
        owner: the module's plugin.
        written: the result of ``next_state``.
        held: attribute -> array, all State of the module.

    Raises:
        PluginCodeError: the result is something else.
    """
    if not isinstance(written, Mapping) or not written.keys() <= held.keys():
        names = f"'{min(written.keys() - held.keys())}'" if isinstance(written, Mapping) else ""
        got = names or type(written).__name__
        raise _did(owner, f"returned {got} from", path, f"a dict of State: {sorted(held)}")
    for name, array in written.items():
        old = held[name]
        if got := mismatch(array, old):
            fix = f"it keeps the shape that it is declared with, {tuple(old.shape)}"
            raise _did(owner, f"returned State '{name}' of {got} from", path, fix)
        if array.dtype != old.dtype:
            got, kept = dtype_name(array), dtype_name(old)
            fix = f"State is kept in {kept}: self.ops.astype({name}, {kept!r})"
            raise _did(owner, f"returned State '{name}' of {got} from", path, fix)


def _did(owner: str, did: str, path: str, fix: str) -> PluginCodeError:
    return PluginCodeError(owner, "next_state", did=did, where=path, fix=fix)
