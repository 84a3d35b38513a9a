"""Generator of the reference in docs/settings.md, from the schema of the config and the presets.

python -m tools.settings_page             # check that the page is up to date
python -m tools.settings_page --write     # write it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from minillm_core.config.origins import FLAGS
from minillm_core.config.presets import plugins_of, preset_names, read_preset, recipe_names
from minillm_core.config.schema import SECTIONS, TOP, Config
from minillm_core.config.values import Words, describe, show
from minillm_core.plugins.first_party import FIRST_PARTY
from tools.markdown import table
from tools.pages import Page, main
from tools.repository import ROOT

__all__ = ["PAGE"]

FOLLOW = """A preset or a settings file can derive one setting from another. It gives pairs of values: between two
pairs, the value is interpolated linearly; before the first pair and after the last, it is constant. A value
that you set in a later place (a file, the command line, a flag) is not derived. `--depth N` is `model.layers=N`
for a preset in which other settings follow the number of layers: `depth`, if you name none.

"""

RECIPES = """
## Presets that name plugins

`speedrun` is for one large GPU, `cpu` for a CPU and `mac` for a Mac.
`minillm train --preset {first}` trains with all of the preset's plugins. Their distributions must be
installed: if one is missing, the run is refused before it starts, with the `pip` command that installs all of
them. `--plugins -NAME` removes a plugin and its options; a file or `NAME.option=value` changes its options.
`minillm ablate --preset {first} --leave-one-out` measures what each plugin contributes; with `--plugins a,b`
it measures only these two, beside the preset's other plugins. On a GPU with less memory, divide the step into
smaller micro-batches: half of `train.rows` with twice `train.accumulate`, for example.
"""


def settings() -> str:
    """Document every setting by section, and the presets that include plugins."""
    presets = {name: read_preset(name, origin="settings page") for name in preset_names()}
    parts = ["## Of the run\n", table(("key", "type", "default", "meaning", "flag"), _top())]
    for section, model in SECTIONS.items():
        about = (model.__doc__ or "").splitlines()[0]
        stated = [name for name in presets if presets[name].get(section)]
        rows = []
        for key, info in model.model_fields.items():
            values = [presets[name][section].get(key) for name in stated]
            shown = ("" if value is None else _code(value) for value in values)
            rows.append((f"`{section}.{key}`", *_setting_row(info), *shown))
        head = ("key", "type", "default", "meaning", *stated)
        parts += [f"\n## `[{section}]`\n", f"{about}\n", table(head, rows)]
    parts.append("\n## Settings that follow another one\n")
    parts.append(FOLLOW + table(("preset", "setting", "follows", "by"), _followed(presets)))
    parts.append(RECIPES.format(first="speedrun"))
    parts += [_recipe(name) for name in recipe_names()]
    return "\n".join(parts)


def _followed(presets: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Build rows for the settings whose preset values are derived from another setting."""
    for name, document in presets.items():
        for dial, followers in document.get("by", {}).items():
            for key, knots in followers.items():
                yield f"`{name}`", f"`{key}`", f"`{dial}`", f"`{json.dumps(knots)}`"


def _recipe(name: str) -> str:
    """Document a preset's plugins, their distributions, and the options that it sets."""
    head = (f"plugins of `{name}`", "distribution", "options")
    rows = [
        (
            f"`{plugin}`",
            f"`{FIRST_PARTY[plugin]}`",
            "  ".join(f"`{plugin}.{key}={show(value)}`" for key, value in options.items()),
        )
        for plugin, options in plugins_of(name).items()
    ]
    return "\n" + table(head, rows)


def _top() -> Iterator[Iterable[str]]:
    """Document the settings outside of any table, with their flags."""
    flags = {key: flag for flag, key in FLAGS.items()} | {"preset": "--preset"}
    for key in TOP:
        flag = f"`{flags[key]}`" if key in flags else ""
        yield f"`{key}`", *_setting_row(Config.model_fields[key]), flag


SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

WORDS = Words(
    kinds={int: "integer", float: "number", str: "text", bool: "true or false", type(None): ""},
    choices=lambda values: " or ".join(f"`{one}`" for one in values),
    items=lambda parts, many: f"list of {parts[0]}" if many else f"{len(parts)} {parts[0]}s",
    bounded=lambda kind, limits: ", ".join(
        [kind, *(f"{SIGNS[name]} {value}" for name, value in limits.items())]
    ),
)


def _setting_row(info: FieldInfo) -> tuple[str, str, str]:
    """Format type with bounds, default, and meaning."""
    default = "" if info.is_required() else _code(info.default)
    return describe(info, WORDS), default, info.description or ""


def _code(value: Any) -> str:
    """Format a value in command-line form."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return f"`{value}`"
    return f"`{json.dumps(value)}`"


PAGE = Page(ROOT / "docs" / "settings.md", {"settings": settings})

if __name__ == "__main__":
    main(__doc__, PAGE)
