"""Where each setting comes from: layers of settings, flat, every value with its place.

A layer is one source: a preset, a file, the ``key=value`` arguments, the flags. Keys are dotted:
``train.lr`` for a section's, ``seed`` for a top-level one, ``NAME.option`` for a plugin's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm_core.config.schema import Config, Section
from minillm_core.errors import ConfigError

__all__ = ["SECTIONS", "TOP", "Layer", "Setting", "flatten", "line_of"]

SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
"""The tables of settings by name."""

TOP: tuple[str, ...] = tuple(
    name for name in Config.model_fields if name not in SECTIONS and name != "plugins"
)
"""Settings outside any table: preset, seed, backend, device, deterministic, kernels."""


@dataclass(frozen=True)
class Setting:
    """A value, who gave it, and the place to show when it is wrong."""

    value: Any
    origin: str  # "preset tiny", "run.toml", "command line", "--steps"
    where: str  # "run.toml, line 7"


@dataclass
class Layer:
    """The settings of one source."""

    settings: dict[str, Setting] = field(default_factory=dict)
    named: dict[str, Setting] = field(default_factory=dict)  # plugins that this source names
    notes: list[str] = field(default_factory=list)  # what a person should be told
    typed: bool = False  # for this run alone: what it says cannot be meant for another

    def add(self, key: str, setting: Setting) -> None:
        """Put one setting in.

        Raises:
            ConfigError: the same source gave the same key before.
        """
        if key in self.settings:
            raise ConfigError(f"{key} is given twice", where=setting.where, fix="keep one of them")
        self.settings[key] = setting

    def put(self, key: str, setting: Setting) -> None:
        """Put one setting in the place of an earlier one, and say so: the last one holds."""
        if key in self.settings:
            self.notes.append(f"{key} is given twice; the last one holds ({setting.where})")
        self.settings[key] = setting


def flatten(document: Mapping[str, Any], *, origin: str, text: str | None = None) -> Layer:
    """The layer of a TOML document.

    Tables that are no section and not ``plugins`` are read as a plugin's options; whether a plugin
    of that name is wanted is checked when all layers are known.

    Args:
        document: the parsed document.
        origin: what to call it.
        text: its source, to name lines in errors.

    Raises:
        ConfigError: a section that is not a table, or an option given in two tables.
    """
    layer = Layer()

    def place(*path: str) -> str:
        line = line_of(text, path) if text is not None else None
        return f"{origin}, line {line}" if line else origin

    for name, value in document.items():
        if name == "plugins":
            for plugin, options in _tables(value, "plugins", place("plugins")):
                layer.named[plugin] = Setting(plugin, origin, place("plugins", plugin))
                for option, given in options.items():
                    where = place("plugins", plugin, option)
                    layer.add(f"{plugin}.{option}", Setting(given, origin, where))
        elif isinstance(value, Mapping) and name not in TOP:
            for option, given in value.items():
                layer.add(f"{name}.{option}", Setting(given, origin, place(name, option)))
            if not value and name not in SECTIONS:  # an empty table of a name nobody knows
                layer.add(name, Setting(value, origin, place(name)))
        else:
            layer.add(name, Setting(value, origin, place(name)))
    return layer


def _tables(value: Any, name: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"'{name}' holds a table for each plugin", where=where, fix=f"[{name}.NAME]"
        )
    for key, table in value.items():
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{name}.{key} is not a table", where=where, fix=f"[{name}.{key}], even if empty"
            )
        yield key, table


_HEADER = re.compile(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=")


def line_of(text: str, path: tuple[str, ...]) -> int | None:
    """The line, from 1, that sets the dotted ``path`` in TOML source; None where it is not plain.

    The parser gives no positions; this finds keys and headers that stand on lines of their own.
    """
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            if table[: len(path)] == path:
                return number
        elif key := _KEY.match(line):
            full = table + _parts(key[1])
            if full[: len(path)] == path or full == path[: len(full)]:
                return number
    return None


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
