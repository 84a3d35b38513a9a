"""The parallelism axes of two processes, and why a plan is refused on each: ``minillm plugins info``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minillm_core import ConfigError, Plan, Refusal
from minillm_mesh import context_checks, stages, step_checks, tensor_spec, weight_checks


def _steps(rows: int, accumulate: int) -> Callable[[Plan], None]:
    """Return a check for steps of ``rows`` rows and ``accumulate`` micro-batches."""
    return lambda plan: step_checks.check(plan.with_train(rows=rows, accumulate=accumulate), 2)


AXES: Mapping[str, tuple[Callable[[Plan], None], ...]] = {
    "data": (_steps(4, 2),),  # by whole micro-batches
    "weights": (_steps(4, 2), weight_checks.check),
    "rows": (_steps(4, 1),),
    "context": (_steps(4, 2), lambda plan: context_checks.check(plan, 2)),
    "tensor": (_steps(4, 2), lambda plan: tensor_spec.check(plan, 2)),
    "pipeline": (
        _steps(4, 2),
        lambda plan: stages.check(plan.with_train(rows=4, accumulate=2), 2, 1),
    ),
}


def axes_of(plan: Plan) -> dict[str, str | None]:
    """Map each parallelism axis to the reason why a plan is refused; None: accepted before training.

    A plugin that shapes batches is not refused for their numbers, which follow from a run's settings.
    """
    found: dict[str, str | None] = dict.fromkeys(AXES)
    for axis, checks in AXES.items():
        for check in checks:
            try:
                check(plan)
            except Refusal as refusal:
                if plan.shaping is None or not isinstance(refusal, ConfigError):
                    found[axis] = refusal.what
                    break
    return found


__all__ = ["axes_of"]
