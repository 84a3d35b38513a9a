"""What ``minillm plan`` writes: a plan, or the difference of two."""

from __future__ import annotations

from rich.console import Console

from minillm_core.backends.planned import check_planned
from minillm_core.checkpoint.directory import export_checked
from minillm_core.cli.console import emit, say
from minillm_core.cli.plan_settings import settings_table
from minillm_core.cli.prepare import Asked, Prepared, prepare
from minillm_core.plan import build_plan
from minillm_core.plan.diff import Difference, render_diff
from minillm_core.plan.render import plan_document, render_plan
from minillm_core.train.settings import settings

__all__ = ["show_diff", "show_plan"]


def show_plan(asked: Asked, *, json: bool) -> None:
    """Write the plan and where its settings come from: tables, or one JSON document."""
    prepared = prepare(asked, to_run=False)
    plan = export_checked(build_plan(prepared.loaded.config, prepared.plugins))
    kernels = check_planned(plan, prepared.detected)
    _say_notes(*prepared.loaded.notes, *plan.notes, *kernels)
    if json:
        emit(plan_document(plan) | {"settings": settings(prepared.loaded)})
    else:
        console = Console()
        render_plan(plan, console, _dtype(prepared))
        console.print()
        console.print(settings_table(prepared.loaded))


def show_diff(asked: Asked, first: str, second: str, *, json: bool) -> None:
    """Write what differs between the plans with two sets of plugins."""
    both = [prepare(asked.with_plugins(plugins), to_run=False) for plugins in (first, second)]
    plans = (build_plan(each.loaded.config, each.plugins) for each in both)
    one, other = map(export_checked, plans)
    kernels = [
        note
        for plan, each in zip((one, other), both, strict=True)
        for note in check_planned(plan, each.detected)
    ]
    told = [note for each in both for note in each.loaded.notes]
    _say_notes(*told, *one.notes, *other.notes, *kernels)
    if json:
        difference = Difference.of(one, other).as_json()
        emit({"plans": [plan_document(one), plan_document(other)], "difference": difference})
    else:
        render_diff(one, other, Console())


def _say_notes(*notes: str) -> None:
    """Each note once, and none before everything has been checked."""
    for note in dict.fromkeys(notes):
        say(f"note: {note}")


def _dtype(prepared: Prepared) -> str | None:
    """What ``auto`` would be here; None: as the settings say, or float32."""
    on_gpu = prepared.detected is not None and prepared.detected.device != "cpu"
    return "bfloat16" if on_gpu and prepared.loaded.config.train.dtype == "auto" else None
