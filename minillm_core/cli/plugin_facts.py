"""The implementation of ``minillm plugins info``: all facts about one plugin; no other is imported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm_core.backends.ranks import AXES
from minillm_core.cli.console import emit
from minillm_core.config.load import load
from minillm_core.config.presets import plugins_of, recipe_names
from minillm_core.config.values import show
from minillm_core.errors import Refusal
from minillm_core.install import pip_line, unmet
from minillm_core.plan import Plan, build_plan
from minillm_core.plan.plan import as_json as to_json
from minillm_core.plan.slots import slots_of
from minillm_core.plugins.manager import LoadedPlugin, find_plugin, with_options
from minillm_core.plugins.options import describe_option
from minillm_core.plugins.provided import MEASURED, missing_hint, provided
from minillm_core.text import plain, rounded


def answer(name: str, preset: str, *, as_json: bool) -> None:
    """Show one plugin, and the slots that it fills on a preset."""
    shown = info(name, planned_on(preset), plugins_of(preset))
    if as_json:
        emit(shown)
        return
    render_info(shown, Console())


def info(
    named: str,
    planned: Callable[[LoadedPlugin], Plan] | None = None,
    given: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the facts about one plugin as a JSON object.

    Args:
        named: its name, or a single file and its class.
        planned: plans a preset with the plugin, for ``slots`` (the slots it fills) and ``mesh`` (with
            minillm-mesh installed: axis -> why the plugin cannot be sharded). If planning is refused, both
            are empty and ``slots_refused`` has the reason.
        given: plugin -> options for that plan, as in the preset; else the defaults.

    Raises:
        PluginError: unknown, broken, or of another hook API.
        PluginCodeError: the plugin's own code raised.
    """
    found = find_plugin(named, where=f"plugin {plain(named)}")
    manifest, origin = found.cls.manifest, found.origin
    stated = ("api", "backends", "devices", "capability", "identity_at_init", "export", "requires")
    shown: dict[str, Any] = {
        "name": origin.name,
        "summary": found.cls.summary(),
        **{fact: getattr(origin, fact) for fact in ("distribution", "version", "source", "file")},
        **to_json({fact: getattr(manifest, fact) for fact in stated}),
        "lacking": unmet(manifest.requires),
        "hooks": list(found.cls.hooks),
        "options": [describe_option(*one) for one in found.cls.__pydantic_fields__.items()],
        "presets": {
            preset: plugins_of(preset)[origin.name]
            for preset in recipe_names()
            if origin.distribution and origin.name in plugins_of(preset)
        },
    }
    if (cards := provided(MEASURED, "cards")) is not None:
        shown |= cards(origin.name, origin.file)
    else:
        shown |= {"cards": [], "cards_refused": missing_hint(MEASURED, "measured worth is shown")}
    if planned is None:
        return shown
    axes = provided(AXES, "torch")
    try:
        plan = planned(with_options(found, (given or {}).get(origin.name, {})))
        slots, mesh = {"slots": list(slots_of(plan, origin.name))}, axes(plan) if axes else {}
    except Refusal as refusal:  # a required option, or a preset that it does not fit
        slots, mesh = {"slots": [], "slots_refused": refusal.what}, {}
    return shown | slots | ({"mesh": mesh} if axes else {})


def planned_on(preset: str) -> Callable[[LoadedPlugin], Plan]:
    """Return a function that plans ``preset`` with one plugin.

    The preset's own plugins are left out.

    Raises:
        ConfigError: an unknown preset.
    """
    config = load(preset=preset, default_preset=lambda: (preset, "asked for")).config
    config = config.model_copy(update={"plugins": {}})
    return lambda plugin: build_plan(config, [plugin])


def render_info(shown: dict[str, Any], console: Console) -> None:
    """Print the result of :func:`info`."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, text in _facts(shown):
        table.add_row(Text(heading, "bold"), Text(text))
    console.print(table)
    if shown["options"]:
        console.print(_options(shown))


def _facts(shown: dict[str, Any]) -> list[tuple[str, str]]:
    offered = f"{shown['distribution']} {shown['version']}" if shown["distribution"] else None
    facts = [
        (shown["name"], shown["summary"]),
        ("from", offered or shown["source"]),
        ("file", plain(shown["file"], limit=4096)),
        ("hook API", str(shown["api"])),
        ("backends", ", ".join(shown["backends"])),
        ("devices", ", ".join(shown["devices"]) or "any"),
        ("hooks", ", ".join(shown["hooks"]) or "none"),
    ]
    if shown["capability"]:
        facts.append(("GPU", f"compute capability {shown['capability']}"))
    if shown["identity_at_init"]:
        facts.append(("at init", "the model's output is unchanged"))
    if shown["export"]:
        facts.append(("export", shown["export"]))
    for preset, given in shown["presets"].items():
        typed = [f"{shown['name']}.{key}={show(value)}" for key, value in given.items()]
        facts.append((f"in {preset}", "  ".join(typed) or "as it is"))
    if shown["requires"]:
        lacking = shown["lacking"]
        lines = [f"{n} ({lacking[n]})" if n in lacking else n for n in shown["requires"]]
        lines += [pip_line(*lacking)] if lacking else []
        facts.append(("requires", "\n".join(lines)))
    if "slots" in shown:
        slots = "\n".join(map(rounded, shown["slots"]))
        facts.append(("slots", slots or shown.get("slots_refused", "none")))
    if (mesh := shown.get("mesh")) is not None:
        named = shown["name"] if shown["distribution"] else shown["source"]
        tried = f"minillm plugins check {named} --only mesh tries it"
        unknown = f"unknown, because it was not planned: {tried} with the plugins it needs"
        free = ", ".join(axis for axis in mesh if not mesh[axis])
        lines = [f"{axis}: refused, {why}" for axis, why in mesh.items() if why]
        lines += [f"{free}: nothing in its plan rules it out, but it was not trained"] * bool(free)
        facts.append(("mesh", "\n".join([*lines, tried]) if mesh else unknown))
    worded = provided(MEASURED, "worth")
    worth = worded(shown) if worded else [shown["cards_refused"]]
    return [*facts, *(("worth", text) for text in worth)]


def _options(shown: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(1, 2, 0, 0), header_style="bold")
    for heading in ("option", "default", "takes", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading == "option")  # to be copied
    for option in shown["options"]:
        default = "required" if option["required"] else json.dumps(option["default"])
        default = "none" if default == "null" else default
        cells = (f"{shown['name']}.{option['name']}", default, option["type"], option["help"])
        table.add_row(*(Text(cell) for cell in cells))
    return table
