"""``minillm plan``: what would be trained, where its settings come from, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm_core.backends.bind import kernel_preflight
from minillm_core.checkpoint.huggingface import export_checked
from minillm_core.cli.console import emit, say
from minillm_core.cli.options import AsJson, PlanOptions, examples, value
from minillm_core.cli.plan_costs import costs_of
from minillm_core.config.load import Loaded
from minillm_core.config.values import show
from minillm_core.errors import Refusal
from minillm_core.plan import Plan, build_plan
from minillm_core.plan.diff import Difference, render_diff
from minillm_core.plan.estimate import vocabulary_note
from minillm_core.plan.render import columns, plan_document, render_plan
from minillm_core.text import plain
from minillm_core.train.request import Prepared, RunRequest, prepare
from minillm_core.train.settings import settings

EXAMPLES = examples(
    "minillm plan --preset gpt2-124m",
    "minillm plan --plugins muon,paired_heads --json",
    "minillm plan --diff muon muon,paired_heads",
    "minillm plan --preset speedrun --diff '' -smear",
)

UNSAID = "default"
"""Origins of values that no source gave: docs/settings.md lists them."""


def plan(
    run: PlanOptions,
    diff: Annotated[
        tuple[str, str] | None,
        value("A,B C,D", "Compare the plans of two plugin sets; '' adds none, -NAME removes one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what would be trained and what it costs: size, FLOPs, memory, time, disk.

    Needs no GPU, trains nothing and writes nothing.
    """
    if diff and run.plugins is not None:
        raise Refusal(
            "--diff names both sets of plugins",
            where=f"--plugins {run.plugins} --diff {diff[0]} {diff[1]}",
            fix="leave --plugins out",
        )
    if diff:
        _show_diff(run.request(), *diff, json=as_json)
        return
    prepared = prepare(run.request(), to_run=False)
    plan = _plan(prepared)
    of_vocabulary = vocabulary_note(plan.estimate())
    _say_notes([prepared], [plan], *filter(None, (of_vocabulary,)))
    dtype = _dtype(prepared)
    costs, lines = costs_of(prepared, plan, dtype)
    if as_json:
        document = plan_document(plan) | {"settings": settings(prepared.loaded)}
        emit(document | {"costs": costs})
        return
    console = Console()
    render_plan(plan, console, dtype, lines)
    console.print()
    console.print(settings_table(prepared.loaded))


def _show_diff(asked: RunRequest, first: str, second: str, *, json: bool) -> None:
    """Write what differs between the plans with two sets of plugins."""
    both = [prepare(replace(asked, plugins=plugins), to_run=False) for plugins in (first, second)]
    one, other = map(_plan, both)
    _say_notes(both, [one, other])
    if json:
        difference = Difference.of(one, other).as_json()
        emit({"plans": [plan_document(one), plan_document(other)], "difference": difference})
    else:
        render_diff(one, other, Console())


def _plan(prepared: Prepared) -> Plan:
    return export_checked(build_plan(prepared.loaded.config, prepared.plugins))


def _say_notes(each: Sequence[Prepared], plans: Sequence[Plan], *more: str) -> None:
    """Say every note once, and none before everything has been checked."""
    pairs = zip(plans, each, strict=True)
    kernels = [kernel_preflight(plan, prepared.detected) for plan, prepared in pairs]
    notes = [prepared.loaded.notes for prepared in each] + [plan.notes for plan in plans] + kernels
    for note in dict.fromkeys(chain(*notes, more)):
        say(f"note: {note}")


def _dtype(prepared: Prepared) -> str | None:
    """Return the dtype that ``auto`` means here; None: as the settings say, or float32."""
    on_gpu = prepared.detected is not None and prepared.detected.device != "cpu"
    return "bfloat16" if on_gpu and prepared.loaded.config.train.dtype == "auto" else None


def settings_table(loaded: Loaded) -> Table:
    """Make a table of the settings by source, the preset first; plugins come before values.

    Settings at their defaults are left out.
    """
    by_place: dict[str, list[str]] = {}
    names_first = sorted(loaded.origins.items(), key=lambda one: not one[0].startswith("plugins."))
    for key, place in names_first:
        if place != UNSAID:
            by_place.setdefault(place, []).append(_given(loaded, key))
    lowest = f"preset {loaded.config.preset}"
    table = columns("settings from", "")
    for place in sorted(by_place, key=lambda place: (place != lowest, place)):
        table.add_row(Text(plain(place)), Text("  ".join(map(plain, by_place[place]))))
    return table


def _given(loaded: Loaded, key: str) -> str:
    """``train.lr=0.002``; the key alone where it has no value: a plugin's name, what was cleared."""
    owner, _, name = key.partition(".")
    plugins = loaded.config.plugins
    if owner == "plugins":
        return name
    value: Any = loaded.config
    if owner in plugins:
        value = plugins[owner][name]
    else:
        for part in key.split("."):
            value = getattr(value, part)
    return key if value is None else f"{key}={show(value)}"
