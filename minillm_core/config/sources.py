"""The sources of settings above the preset: a TOML file, ``key=value`` arguments, flags."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minillm_core.config.origins import SECTIONS, Layer, Setting, flatten
from minillm_core.config.values import read_value
from minillm_core.errors import ConfigError

__all__ = ["FLAGS", "from_assignments", "from_file", "from_flags"]

FLAGS: Mapping[str, str] = {
    "--data": "data.paths",
    "--steps": "train.steps",
    "--seed": "seed",
    "--init": "init",
    "--backend": "backend",
    "--device": "device",
    "--deterministic": "deterministic",
    "--kernels": "kernels",
}
"""A flag -> the key that it sets."""


def from_file(path: Path) -> Layer:
    """The layer of a TOML file.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, or is not TOML; with line and column.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the settings file cannot be read: {error.strerror or type(error).__name__}",
            where=f"-c {path}",
            fix="the path of a TOML file",
        ) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            "the settings file is not UTF-8 text",
            where=f"{path}, line {line}, byte {error.start}",
            fix="save it as UTF-8",
        ) from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, at = str(error).partition(" (at ")  # "... (at line 3, column 5)"
        raise ConfigError(
            f"the settings file is not TOML: {what}",
            where=f"{path}, {at.rstrip(')')}" if at else str(path),
            fix="lines are key = value, texts stand in quotes, tables are headed [train]",
        ) from None
    return flatten(document, origin=str(path), text=text)


_ASSIGNED = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=(.*)", re.DOTALL)


def from_assignments(assignments: Sequence[str]) -> Layer:
    """The layer of the ``key=value`` arguments; of one key given twice the last one holds.

    Raises:
        ConfigError: an argument of another form.
    """
    layer = Layer(typed=True)
    for argument in assignments:
        where = f"command line: {argument}"
        match = _ASSIGNED.fullmatch(argument)
        if not match:
            raise ConfigError(
                f"'{argument}' is not of the form key=value",
                where="command line",
                fix="train.lr=0.01, NAME.option=value; text goes to --data, a settings file to -c",
            )
        key, value = match[1], read_value(match[2].strip())
        if key.split(".")[0] == "plugins":
            raise ConfigError(
                "plugins are named by --plugins, their options are NAME.option=value",
                where=where,
                fix="--plugins NAME NAME.option=value",
            )
        if key in SECTIONS and isinstance(value, Mapping):
            for name, part in value.items():
                layer.put(f"{key}.{name}", Setting(part, "command line", where))
        else:
            layer.put(key, Setting(value, "command line", where))
    return layer


def from_flags(flags: Mapping[str, Any]) -> Layer:
    """The layer of the flags; one that is None was not given."""
    layer = Layer()
    for flag, value in flags.items():
        if value is not None:
            layer.add(FLAGS[flag], Setting(value, flag, f"{flag} {value}"))
    return layer
