"""The presets that come with minillm: TOML files in the folder ``presets`` beside this module."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from minillm_core.errors import ConfigError
from minillm_core.text import nearest

__all__ = ["preset_names", "read_preset"]


def _folder():
    return files("minillm_core.config") / "presets"


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in _folder().iterdir()
        if entry.name.endswith(".toml")
    )


def read_preset(name: str, *, origin: str) -> dict[str, Any]:
    """The TOML document of a preset.

    Args:
        name: the preset's name.
        origin: who asked for it, for the message.

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
    return tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8"))
