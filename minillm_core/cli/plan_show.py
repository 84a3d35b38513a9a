"""What ``minillm plan`` writes: a plan, or the difference of two."""

from __future__ import annotations

from rich.console import Console

from minillm_core.cli.console import emit, say
from minillm_core.cli.prepare import Asked, Prepared, prepare
from minillm_core.plan import Plan, build_plan
from minillm_core.plan.diff import render_diff
from minillm_core.plan.render import plan_document, render_plan

__all__ = ["show_diff", "show_plan"]


def show_plan(asked: Asked, *, json: bool) -> None:
    """Write the plan: a table, or one JSON document."""
    prepared = prepare(asked, to_run=False)
    plan = _planned(prepared)
    if json:
        emit(plan_document(plan))
    else:
        render_plan(plan, Console(), _dtype(prepared))


def show_diff(asked: Asked, first: str, second: str, *, json: bool) -> None:
    """Write what differs between the plans with two sets of plugins."""
    one, other = (
        _planned(prepare(asked.with_plugins(plugins), to_run=False)) for plugins in (first, second)
    )
    if json:
        emit({first: plan_document(one), second: plan_document(other)})
    else:
        render_diff(one, other, Console())


def _planned(prepared: Prepared) -> Plan:
    plan = build_plan(prepared.loaded.config, prepared.plugins)
    for note in prepared.loaded.notes:
        say(note)
    return plan


def _dtype(prepared: Prepared) -> str | None:
    """What ``auto`` would be here; None: as the settings say, or float32."""
    on_gpu = prepared.detected is not None and prepared.detected.device != "cpu"
    return "bfloat16" if on_gpu and prepared.loaded.config.train.dtype == "auto" else None
