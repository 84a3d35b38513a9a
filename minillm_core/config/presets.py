"""The presets that come with minillm: TOML files in the folder ``presets`` beside this module.

A shape sets the size of a model and how the core trains it without plugins. A recipe also names plugins
with their options: all that were measured to help together. A recipe can be listed without its plugins
installed; a run that lacks them is refused with the pip line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm_core.errors import ConfigError
from minillm_core.text import did_you_mean

DEPTH = "depth"
"""The preset of ``--depth``: its width, learning rates and run length follow the number of layers."""
SHAPES = ("tiny", "small", "gpt2-124m", "350m", "1b", DEPTH)
"""The presets that name no plugin, by size; all others are recipes."""

_FOLDER = Path(__file__).with_suffix("")  # not opened: importlib.resources slows --help


def preset_names() -> list[str]:
    """Return the names of all presets: shapes by size, then recipes."""
    return [*SHAPES, *recipe_names()]


def recipe_names() -> list[str]:
    """Return the presets that name plugins, sorted; no file is opened."""
    return sorted({path.stem for path in _FOLDER.glob("*.toml")} - set(SHAPES))


def plugins_of(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return plugin -> options of a preset, sorted; empty for a shape."""
    return dict(sorted(read_preset(name, origin=f"preset {name}").get("plugins", {}).items()))


def read_preset(name: str, *, origin: str) -> dict[str, Any]:
    """Read the TOML document of a preset.

    Args:
        name: the preset's name.
        origin: the source that names it, for errors.

    Raises:
        ConfigError: an unknown preset.
    """
    names = preset_names()
    if name not in names:
        fix = f"{did_you_mean(name, names)}one of {', '.join(names)}"
        raise ConfigError(f"there is no preset '{name}'", where=origin, fix=fix)
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
