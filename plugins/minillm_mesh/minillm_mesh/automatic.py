"""The mesh for settings that leave sizes open, and its forecast: ``minillm plan --gpus N``.

A size of 0 in ``mesh.context``, ``mesh.tensor`` or ``mesh.pipeline`` is open. It becomes 1, since data
parallelism sends least. Two things ask for more: a step that exceeds a card's memory by the plan's
estimate, with sharded weights too; and a step of fewer rows than cards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from minillm_core import ConfigError, Plan, Refusal
from minillm_core.commands import counted, sized
from minillm_mesh import context_checks, stages, step_checks, tensor_spec, weight_checks
from minillm_mesh.cost import DEFAULT, Card, card_of, check_ranks
from minillm_mesh.exchange import chosen
from minillm_mesh.forecast import Forecast
from minillm_mesh.step_checks import SIZES, sizes


def forecast(plan: Plan, gpus: int, card: str | None, dtype: str) -> Forecast:
    """Forecast a plan on several cards, with the mesh that its run would have.

    Args:
        plan: of the command.
        gpus: number of cards, 1 to 1,024.
        card: in the form of ``--card``; None: an H200.
        dtype: the compute dtype.

    Raises:
        ConfigError: an unknown card, too many cards, or rows or layers that the cards cannot share.
        PlanError: a plugin's part does not support the parallelism.
    """
    check_ranks(gpus)
    _check_groups(plan, gpus)
    if plan.config.mesh.shard == "weights":
        weight_checks.check(plan)
    if (context := plan.config.mesh.context) > 1:
        context_checks.check(plan, context)
    if (tensor := plan.config.mesh.tensor) > 1:
        tensor_spec.check(plan, tensor)
    kind = card_of(card or DEFAULT)
    found = resolved(plan, gpus, kind, dtype)
    if found.mesh.pipeline > 1:
        stages.check(found.plan, found.mesh.pipeline, found.parts)
    _ = found.layouts
    return found


def _check_groups(plan: Plan, gpus: int) -> None:
    """Refuse cards that are not a whole number of groups: without equal groups there are no figures."""
    asked = {name: n for name, n in zip(SIZES, sizes(plan.config.mesh), strict=True) if n > 1}
    if gpus % (each := math.prod(asked.values())):
        settings = ", ".join(f"mesh.{name}={n}" for name, n in asked.items())
        raise ConfigError(
            f"{counted(gpus, 'GPU')} cannot be split into groups of {each}, which share rows or layers",
            where=f"--gpus {gpus}, {settings}",
            fix=f"a multiple of {each} GPUs, or settings whose product divides {gpus}",
        )


def resolved(plan: Plan, ranks: int, card: Card, dtype: str) -> Forecast:
    """Resolve the open sizes of a plan's mesh.

    Of the meshes that fit in which the fewest cards share a row, that with the shortest step by the cost
    model is taken. If none fits, open sizes are 1; or, if a step has fewer rows than cards, those of the
    mesh that takes least memory.

    Args:
        plan: the plan; its settings may have sizes of 0.
        ranks: number of cards.
        card: their memory, speed and links; a memory of 0 is unknown, and fits everything.
        dtype: the compute dtype.

    Returns:
        The forecast of the plan with all sizes in its settings; its note says why an open size is not 1.
    """
    asked = [getattr(plan.config.mesh, name) for name in SIZES]
    first = Forecast(_sized(plan, sizes(plan.config.mesh)), ranks, card, dtype)
    if all(asked) or ranks == 1:
        return first
    few = min(shape.rows * shape.accumulate for shape in plan.course) < first.parts
    if not few and _fits(first):
        return first
    tried: list[Forecast] = []
    for shared in (n for n in range(2, ranks + 1) if ranks % n == 0):
        possible = [*_meshes(plan, asked, ranks, shared, card, dtype)]
        if found := [one for one in possible if _fits(one)]:
            best = min(found, key=lambda one: one.chosen.times.total)
            return replace(best, note=_why(best, first, asked, few=few))
        tried += possible
    if few and tried:
        best = min(tried, key=lambda one: one.chosen.bytes)
        return replace(best, note=_why(best, first, asked, few=True))
    return first


def _sized(plan: Plan, found: tuple[int, ...]) -> Plan:
    mesh = plan.config.mesh.model_copy(update=dict(zip(SIZES, found, strict=True)))
    return replace(plan, config=plan.config.model_copy(update={"mesh": mesh}))


def _meshes(
    plan: Plan, asked: list[int], ranks: int, shared: int, card: Card, dtype: str
) -> Iterator[Forecast]:
    """Yield the possible meshes in which ``shared`` cards share each row."""
    factors = [n for n in range(1, shared + 1) if shared % n == 0]
    for found in product(*([size] if size else factors for size in asked)):
        if math.prod(found) != shared:
            continue
        one = Forecast(_sized(plan, found), ranks, card, dtype)
        context, tensor, pipeline = found
        try:
            step_checks.check(one.plan, ranks)
            if context > 1:
                context_checks.check(one.plan, context)
                chosen(
                    one.plan, context
                )  # raises if these heads rule out mesh.context_exchange=heads
            if tensor > 1:
                tensor_spec.check(one.plan, tensor)
            if pipeline > 1:
                stages.check(one.plan, pipeline, one.parts)
            if one.mesh.shard == "weights":
                weight_checks.check(one.plan)
        except Refusal:
            continue
        yield one


def _fits(one: Forecast) -> bool:
    """Return whether a card holds the step, and all that it holds before updates are sharded."""
    if not one.card.memory:
        return True
    whole = 0 if one.shard == "weights" else one.start
    return max(one.chosen.bytes, whole) <= one.card.memory


def _why(best: Forecast, first: Forecast, asked: list[int], *, few: bool) -> str:
    taken = " ".join(
        f"mesh.{name}={n}"
        for name, n, size in zip(SIZES, sizes(best.mesh), asked, strict=True)
        if n > 1 and not size
    )
    (shape, *_) = best.plan.course
    if few:
        rows = counted(shape.rows * shape.accumulate, "row")
        return f"{taken}: a step has {rows}, and {best.ranks} processes train it"
    fewer = ""
    if shape.rows > 1:
        fewer = f"; train.rows={shape.rows // 2} train.accumulate={2 * shape.accumulate} also takes less"
    return (
        f"{taken}: without it a step takes {sized(first.chosen.bytes)} of a card's "
        f"{sized(first.card.memory)}, with it {sized(best.chosen.bytes)}{fewer}"
    )


__all__ = ["forecast", "resolved"]
