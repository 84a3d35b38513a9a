"""The presets that come with minillm: TOML files in the folder ``presets`` beside this module.

A shape says how large a model is and how the plain core trains it. A recipe names plugins as well,
with their options: all that were measured to help together. Its plugins need not be installed for
it to be named here; a run that lacks them is refused with the pip line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm_core.errors import ConfigError
from minillm_core.text import nearest

DEPTH = "depth"
"""The preset whose width, rates and length follow the number of layers: what ``--depth`` takes."""
SHAPES = ("tiny", "small", "gpt2-124m", "350m", "1b", DEPTH)
"""The presets that name no plugin, by size; all others are recipes."""

_FOLDER = Path(__file__).with_suffix("")  # not read here, and importlib.resources slows --help


def preset_names() -> list[str]:
    """List the names of all presets: shapes by size, then recipes."""
    return [*SHAPES, *recipe_names()]


def recipe_names() -> list[str]:
    """List the presets that name plugins, sorted; no file is opened."""
    return sorted({path.stem for path in _FOLDER.glob("*.toml")} - set(SHAPES))


def plugins_of(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Map the plugins of a preset, sorted, to the options that it gives them; a shape has none."""
    return dict(sorted(read_preset(name, origin=f"preset {name}").get("plugins", {}).items()))


def read_preset(name: str, *, origin: str) -> dict[str, Any]:
    """Read the TOML document of a preset.

    Args:
        name: the preset's name.
        origin: the source that names it, for the message.

    Raises:
        ConfigError: there is no such preset.
    """
    names = preset_names()
    if name not in names:
        meant = nearest(name, names)
        raise ConfigError(
            f"there is no preset '{name}'",
            where=origin,
            fix=f"--preset {meant}" if meant else f"one of {', '.join(names)}",
        )
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
