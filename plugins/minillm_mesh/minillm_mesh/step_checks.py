"""Checks for data parallelism: steps that divide evenly, and no part that needs a single process."""

from __future__ import annotations

import math
from typing import Any

from minillm_core import ConfigError, Plan, PlanError
from minillm_core.commands import counted

SIZES = ("context", "tensor", "pipeline")
"""Settings of ``mesh``: how many processes share a row's columns, a layer, and the layers. 0: still open."""


def sizes(mesh: Any) -> tuple[int, ...]:
    """Return the sizes of a mesh's settings, in the order of ``SIZES``; 1 for those that are open."""
    return tuple(getattr(mesh, name) or 1 for name in SIZES)


def check(plan: Plan, ranks: int) -> None:
    """Check that ``ranks`` processes can divide a plan's steps.

    Raises:
        ConfigError: they cannot; names the settings to change.
        PlanError: a plugin's part needs the whole step in one process.
    """
    if ranks > 1 and plan.by_rows:
        raise PlanError(
            "tables that are updated by rows need a single process: each process would read other rows, but "
            "gradients are summed over the same elements on all",
            where=", ".join(plan.by_rows),
            fix="--plugins -sparse_rows, or one process",
        )
    mesh = plan.config.mesh
    each = math.prod(sizes(mesh)) if ranks > 1 else 1
    if ranks % each:
        raise ConfigError(
            f"{ranks} processes cannot be split into groups of {each} "
            f"({' x '.join(f'mesh.{name}' for name in SIZES)})",
            where=", ".join(f"mesh.{name}={n}" for name, n in zip(SIZES, sizes(mesh), strict=True)),
            fix=f"numbers whose product divides {ranks}, or a multiple of {each} processes",
        )
    parts = ranks // each
    if mesh.data not in (0, parts):
        raise ConfigError(
            f"{ranks} processes, {each} per data-parallel part, make {counted(parts, 'part')}, not the "
            f"{mesh.data} of mesh.data",
            where=f"mesh.data={mesh.data}",
            fix=f"{mesh.data * each} processes, or mesh.data={parts}; 0 takes as many as there are",
        )
    who = f"{parts} processes"
    if each > 1:
        who = f"{parts} data-parallel parts of {each} processes"
    for shape in plan.course:
        if shape.accumulate % parts and shape.rows % parts:
            raise ConfigError(
                f"{who} cannot divide a step of {shape.accumulate} "
                f"micro-batch{'es' * (shape.accumulate > 1)} of {counted(shape.rows, 'row')}",
                where="train.accumulate, train.rows",
                fix=f"make either a multiple of {parts}, or take {_fitting(plan, parts, each)}",
            )
        if shape.accumulate % parts and (whole := plan.spec.loss.whole):
            raise PlanError(
                "the choice of what is trained on needs a whole micro-batch, which cannot be divided",
                where=f"loss of '{whole.owner}', {who}",
                fix=f"make train.accumulate a multiple of {parts}",
            )


def _fitting(plan: Plan, parts: int, each: int) -> str:
    """Suggest the nearest numbers of processes, ``each`` per part, that divide every step of a run."""
    sizes = [(shape.accumulate, shape.rows) for shape in plan.course]
    most = max(max(size) for size in sizes)
    fit = [n for n in range(1, most + 1) if all(a % n == 0 or r % n == 0 for a, r in sizes)]
    below, above = (n for n in fit if n < parts), (n for n in fit if n > parts)
    found = [n * each for n in (max(below), min(above, default=None)) if n]
    return f"{' or '.join(f'{n:,}' for n in found)} process{'es' * (found != [1])}"


__all__ = ["SIZES", "check", "sizes"]
