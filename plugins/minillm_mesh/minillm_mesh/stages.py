"""Pipeline stages: which blocks of a plan each process computes, and the arrays sent to the next one; pure.

The cuts minimise the FLOPs of the costliest stage; the head counts as part of the last block. A stage sends
the residual stream and those outputs of earlier blocks, streams and terms that later stages read. Every
process has batch fields and schedule values, and computes the streams it needs that read nothing else and
emit nothing (tables that are looked up by ids).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from minillm_core import ConfigError, Plan, PlanError
from minillm_core.inspection import decoder, inputs_of, named_modules

GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"


@dataclass(frozen=True)
class Stage:
    """The part of a model that one process computes."""

    blocks: tuple[tuple[int, int], ...]  # (layer, turn), in the order in which they run
    streams: tuple[str, ...]  # in the model's order
    received: tuple[str, ...]  # arrays of earlier stages, beside the residual stream
    sent: tuple[str, ...]
    flops: float  # per token, forward and backward
    first: bool
    last: bool


def stages(plan: Plan, model: Any, values: Mapping[str, Any], count: int) -> tuple[Stage, ...]:
    """Cut a model into stages.

    Args:
        plan: the plan.
        model: its decoder, of a framework or an outline.
        values: staged values, which may make blocks run several times.
        count: number of stages, at most the number of blocks.
    """
    order, ends = model.order(values), _Dataflow(plan, model)
    loads = [ends.flops[layer] for layer, _ in order]
    loads[-1] += plan.estimate().part("head").flops
    bounds = cut(loads, count)
    live = [ends.read]  # live arrays before each block and at the end
    for layer, _ in reversed(order):
        block = model.layers[layer]
        live.append((live[-1] - ends.made[layer]) | {*block.inputs})
    live.reverse()
    borders = [tuple(sorted(live[at] & ends.crossing)) for at in bounds]
    segments = list(pairwise(bounds))
    reads = [
        set[str]().union(*(model.layers[layer].inputs for layer, _ in order[first:last]))
        for first, last in segments
    ]
    reads[-1] |= ends.read
    needed = [ends.local(names) for names in reads]
    alone = ends.early | ends.local(set[str]().union(*(ends.inputs[name] for name in ends.early)))
    needed[0] |= alone | (model.streams.keys() - set[str]().union(*needed))  # or never read
    return tuple(
        Stage(
            tuple(order[first:last]),
            tuple(name for name in model.streams if name in needed[at]),
            borders[at] if at else (),
            borders[at + 1] if at + 1 < count else (),
            sum(loads[first:last]),
            at == 0,
            at + 1 == count,
        )
        for at, (first, last) in enumerate(segments)
    )


class _Dataflow:
    """The arrays that the parts of a model write and read, by name.

    Attributes:
        flops: per layer and token.
        made: arrays written, by layer.
        read: arrays read after the last block.
        crossing: all arrays computed in one stage only.
        inputs: by stream.
        early: streams that only the first stage computes.
        anywhere: all other streams.
    """

    def __init__(self, plan: Plan, model: Any) -> None:
        spec = plan.spec
        self.flops = _flops(plan, model)
        self.made = {
            layer: {*block.tap_names, *block.stream_names, *block.term_names}.union(
                *(model.tap_aliases.get(name, ()) for name in block.tap_names)
            )
            for layer, block in enumerate(model.layers)
        }
        sources = {name for names in model.term_sources.values() for name in names}
        self.read = inputs_of((spec.final, spec.final_norm, spec.loss)) | sources
        self.inputs = {name: {*node.bound} for name, node in model.streams.items()}
        self.early = set[str]()
        for name, node in model.streams.items():  # in dependency order
            emits = bool(node.terms or node.statistics)
            if emits or self.inputs[name] & {"x0", *self.early}:
                self.early.add(name)
        self.anywhere = model.streams.keys() - self.early
        self.crossing = {"x0", *self.early, *sources}.union(*self.made.values())

    def local(self, names: set[str]) -> set[str]:
        """Return the streams among ``names`` that any stage can compute, and their inputs."""
        found, left = set[str](), names & self.anywhere
        while left:
            found |= left
            left = set[str]().union(*(self.inputs[name] for name in left)) & self.anywhere - found
        return found


def _flops(plan: Plan, model: Any) -> list[float]:
    """Count the FLOPs per token of one run of each block, as in the plan's estimate."""
    scores, modules = plan.estimate().scores, dict(named_modules(model))
    found = [
        scores.get(layer, 0) / plan.turns.get(layer, (1, 1))[0]
        for layer in range(len(model.layers))
    ]
    for info in plan.parameters.values():
        if info.name.startswith("layers.") and len(info.shape) > 1:
            share = getattr(modules.get(info.name.rpartition(".")[0]), "share", 1.0)
            times = 4 if info.name in plan.frozen else 6
            found[int(info.name.split(".")[1])] += times * prod(info.shape) * share
    return found


def cut(loads: Sequence[float], count: int) -> list[int]:
    """Cut loads into non-empty runs that minimise the largest sum.

    Args:
        loads: of each block; at least ``count``.
        count: number of runs.

    Returns:
        The start of each run, and the end: count + 1 indices.
    """
    sums, size = [0.0, *accumulate(loads)], len(loads)
    best, where = [*sums[1:]], [[0] * size]  # of one run up to each block
    for run in range(1, count):
        following, begins = [float("inf")] * size, [0] * size
        for last in range(run, size):
            for first in range(run, last + 1):
                most = max(best[first - 1], sums[last + 1] - sums[first])
                if most < following[last]:
                    following[last], begins[last] = most, first
        best = following
        where.append(begins)
    bounds = [size]
    for begins in reversed(where):
        bounds.append(begins[bounds[-1] - 1])
    return bounds[::-1]


def width(plan: Plan, name: str) -> int:
    """Count the elements per token of an array sent between stages; assumes dim for a plugin's own stream."""
    g = plan.spec.geometry
    of_heads = {"k": g.kv_heads, "v": g.kv_heads, "q": g.heads, "y": g.heads}
    place, _, last = dict(plan.spec.taps).get(name, name).rpartition(".")
    if last in {term.emitted for term in plan.spec.loss.terms}:
        return 0
    return of_heads[last] * g.head_dim if place.endswith(".attention") else g.dim


def bubble(count: int, micro: int) -> float:
    """Return the pipeline bubble, the fraction of a step that a stage waits: equal for both schedules."""
    return (count - 1) / (micro + count - 1)


def check(plan: Plan, count: int, parts: int) -> None:
    """Check that a plan's model can be computed in pipeline stages.

    Args:
        plan: the plan.
        count: number of stages.
        parts: the data-parallel size.

    Raises:
        PlanError: a part cannot; names the plugin and the reason.
        ConfigError: too few blocks or micro-batches.
    """
    mesh, spec = plan.config.mesh, plan.spec
    where = f"mesh.pipeline={count}"
    if spec.loss.rows is not None:
        owner = spec.loss.rows.node.owner
        raise PlanError(
            f"plugin '{owner}' chooses rows by losses of the whole model, but a stage has only some layers",
            where=f"{where}, loss",
            fix=f"--plugins -{owner}, or mesh.pipeline=1",
        )
    blocks = min(len(decoder(spec).order(plan.values(at))) for at in (0.0, 1.0))
    if blocks < count:
        ranks = count * parts
        fitting = max(n for n in range(1, blocks + 1) if ranks % n == 0)
        raise ConfigError(
            f"{count} pipeline stages need as many blocks, but there are {blocks}",
            where=where,
            fix=f"mesh.pipeline={fitting}, which divides {ranks} processes",
        )
    for other in ("context", "tensor"):
        if (shared := getattr(mesh, other)) > 1:
            raise ConfigError(
                "processes cannot share rows and be pipeline stages at once",
                where=f"{where}, mesh.{other}={shared}",
                fix=f"mesh.{other}=1 or mesh.pipeline=1",
            )
    for shape in plan.course:
        micro = micro_batches(shape.accumulate, parts)
        if mesh.schedule == ONE_F_ONE_B and micro < count:
            raise ConfigError(
                f"the schedule 1f1b needs {count} micro-batches for {count} stages, but a step has {micro}",
                where=f"train.accumulate={shape.accumulate}, {where}",
                fix=f"train.accumulate={count * parts}, with as many fewer rows, or mesh.schedule=gpipe",
            )


def micro_batches(accumulate: int, parts: int) -> int:
    """Count the micro-batches of each data-parallel part: whole ones, or some rows of all."""
    return accumulate if accumulate % parts else accumulate // parts


__all__ = ["GPIPE", "ONE_F_ONE_B", "Stage", "bubble", "check", "cut", "micro_batches", "stages"]
