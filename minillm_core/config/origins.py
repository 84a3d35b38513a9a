"""The sources of settings, each a flat layer of values with their places.

A layer holds one source: a preset, a file, the ``key=value`` arguments, or the flags. Keys are dotted:
``train.lr`` for a section's, ``seed`` for a top-level one, ``NAME.option`` for a plugin's.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from minillm_core.config.schema import FIELDS, SECTIONS, TOP
from minillm_core.config.values import is_number, read_value, show
from minillm_core.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A value, its origin, and the place to show in errors."""

    value: Any
    origin: str  # "preset tiny", "run.toml", "command line", "--steps"
    where: str  # "run.toml, line 7"


@dataclass(frozen=True)
class Follows:
    """A setting computed from another: linear between knots, constant before the first and after the last."""

    dial: str  # the setting that it follows
    knots: tuple[tuple[float, float], ...]  # (value of the dial, ascending; value of the setting)
    origin: str
    where: str

    def at(self, dial: float) -> Setting:
        """Return the setting at a value of the dial; an integer if the values at all knots are."""
        value = self.knots[-1][1]
        for (x, y), (following, end) in pairwise(self.knots):
            if dial < following:
                value = y + (end - y) * max(0.0, dial - x) / (following - x)
                break
        whole = all(isinstance(one, int) for _, one in self.knots)
        origin = f"{self.origin}, by {self.dial}={show(dial)}"
        return Setting(round(value) if whole else float(f"{value:.6g}"), origin, self.where)


@dataclass
class Layer:
    """The settings of one source."""

    settings: dict[str, Setting] = field(default_factory=dict)
    follow: dict[str, Follows] = field(default_factory=dict)  # key -> the setting it follows
    named: dict[str, Setting] = field(default_factory=dict)  # plugins that this source names
    without: set[str] = field(default_factory=set)  # plugins of lower layers to remove
    notes: list[str] = field(default_factory=list)  # notes to print
    typed: bool = False  # typed for this run: its options must apply to this run

    def add(self, key: str, setting: Setting) -> None:
        """Add one setting.

        Raises:
            ConfigError: the source already sets the key.
        """
        if key in self.settings:
            raise ConfigError(f"{key} is given twice", where=setting.where, fix="keep one of them")
        self.settings[key] = setting

    def put(self, key: str, setting: Setting) -> None:
        """Set or replace a setting, with a note if replaced: the last one wins."""
        if key in self.settings:
            self.notes.append(f"{key} is given twice; the last one holds ({setting.where})")
        self.settings[key] = setting


def flatten(document: Mapping[str, Any], *, origin: str, text: str | None = None) -> Layer:
    """Return the layer of a TOML document.

    Tables other than sections, ``plugins`` and ``by`` are read as plugin options; whether the run has
    such a plugin is checked when all layers are known. ``[by."train.steps"]`` holds the settings that
    follow train.steps: ``"train.cooldown" = [[40, 0.3], [210, 0.4]]``.

    Args:
        document: the parsed document.
        origin: its name in messages.
        text: its source, to name lines in errors.

    Raises:
        ConfigError: a section that is not a table, an option given in two tables, or knots of another form.
    """
    layer = Layer()

    def place(*path: str) -> str:
        line = line_of(text, path) if text is not None else None
        return f"{origin}, line {line}" if line else origin

    for name, value in document.items():
        if name == "plugins":
            if isinstance(value, Mapping):
                layer.without.update(plugin for plugin, table in value.items() if table is False)
                value = {plugin: table for plugin, table in value.items() if table is not False}
            for plugin, options in _tables(value, "plugins", place("plugins")):
                layer.named[plugin] = Setting(plugin, origin, place("plugins", plugin))
                for option, given in options.items():
                    where = place("plugins", plugin, option)
                    layer.add(f"{plugin}.{option}", Setting(given, origin, where))
        elif name == "by":
            for dial, table in _tables(value, "by", place("by"), "setting that others follow"):
                for key, knots in table.items():
                    where = place(*f"by.{dial}.{key}".split("."))
                    _check_knots(dial, key, knots, where)
                    pairs = tuple((x, y) for x, y in knots)
                    layer.follow[key] = Follows(dial, pairs, origin, where)
        elif isinstance(value, Mapping) and name not in TOP:
            for option, given in value.items():
                layer.add(f"{name}.{option}", Setting(given, origin, place(name, option)))
            if not value and name not in SECTIONS:  # an empty table of an unknown name
                layer.add(name, Setting(value, origin, place(name)))
        else:
            layer.add(name, Setting(value, origin, place(name)))
    return layer


def _tables(
    value: Any, name: str, where: str, each: str = "plugin"
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(value, Mapping):
        header = f"[{name}.NAME]" if each == "plugin" else f'[{name}."train.steps"]'
        raise ConfigError(f"'{name}' holds a table for each {each}", where=where, fix=header)
    for key, table in value.items():
        if not isinstance(table, Mapping):
            header = f"[{name}.{key}]" if each == "plugin" else f'[{name}."{key}"]'
            what = f"{name}.{key} is not a table"
            raise ConfigError(what, where=where, fix=f"{header}, even if empty")
        yield key, table


def _check_knots(dial: str, key: str, knots: Any, where: str) -> None:
    """Refuse invalid knots.

    Raises:
        ConfigError: an unknown dial, entries that are not pairs of numbers, or dial values not ascending.
    """
    if dial not in FIELDS:
        raise ConfigError(
            f"there is no setting {dial!r} to follow",
            where=where,
            fix='[by."train.steps"], in quotes, for settings that follow train.steps',
        )
    pairs = isinstance(knots, list) and all(isinstance(k, list) and len(k) == 2 for k in knots)
    if not pairs or len(knots) < 2 or not all(map(is_number, chain(*knots))):
        raise ConfigError(
            f"{key} follows {dial} by two or more pairs of numbers, not by {show(knots)}",
            where=where,
            fix=f'"{key}" = [[{dial}, {key}], ...], such as [[40, 0.3], [210, 0.4]]',
        )
    if any(x >= following for (x, _), (following, _) in pairwise(knots)):
        what = f"{key}: the values of {dial} do not increase"
        raise ConfigError(what, where=where, fix="list each value once, in increasing order")


_HEADER = re.compile(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=")


def from_python(settings: Mapping[str, Any]) -> Layer:
    """Return the layer of settings from Python: ``{"train.lr": 0.01}``, ``{"train": {"lr": 0.01}}``.

    Raises:
        ConfigError: a key that is not a string, or is given twice.
    """
    layer = Layer(typed=True)
    for key, value in settings.items() if isinstance(settings, Mapping) else [(settings, None)]:
        where = f"settings[{key!r}]"
        if not isinstance(key, str) or key.partition(".")[0] == "plugins":
            raise ConfigError(
                "settings are keys with values, and plugins are named beside them",
                where=where,
                fix='load(plugins="NAME", settings={"train.lr": 0.01, "NAME.option": 1})',
            )
        parts = {key: value}
        if "." not in key and isinstance(value, Mapping):
            parts = {f"{key}.{name}": part for name, part in value.items()}
        for name, part in parts.items():
            layer.add(name, Setting(_toml(part), "Python", where))
    return layer


def _toml(value: Any) -> Any:
    """Return a value as TOML has it: tuples as lists, paths as texts, arrays as numbers."""
    if isinstance(value, (tuple, list)):
        return [_toml(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def line_of(text: str, path: tuple[str, ...]) -> int | None:
    """Return the line, from 1, that sets the dotted ``path`` in TOML source; None if not found.

    The parser reports no positions; this finds keys and headers on lines of their own.
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


FLAGS: Mapping[str, str] = {
    "--data": "data.paths",
    "--steps": "train.steps",
    "--depth": "model.layers",
    "--seed": "seed",
    "--prompt": "eval.prompts",
    "--init": "init",
    "--backend": "backend",
    "--device": "device",
    "--deterministic": "deterministic",
    "--kernels": "kernels",
}
"""Flag -> the key that it sets."""

TOML = "run.toml"
"""The file with all settings of a run, in its folder."""


def from_file(path: Path) -> Layer:
    """Return the layer of a TOML file.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, or is not TOML; with line and column.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the settings file cannot be read: {error.strerror or type(error).__name__}",
            where=str(path),
            fix="the path of a TOML file",
        ) from None
    try:
        text = raw.decode("utf-8-sig")  # editors on Windows write the mark
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            "the settings file is not UTF-8 text",
            where=f"{path}, line {line}, byte {error.start}",
            fix="save it as UTF-8",
        ) from None
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("{"):
            beside = path.with_name(TOML)
            raise ConfigError(
                "the settings file is JSON, not TOML",
                where=str(path),
                fix=f"-c {beside}" if beside.exists() else "-c with a TOML file",
            ) from None
        what, _, at = str(error).partition(" (at ")  # "... (at line 3, column 5)"
        raise ConfigError(
            f"the settings file is not TOML: {what}",
            where=f"{path}, {at.rstrip(')')}" if at else str(path),
            fix="lines are key = value, texts stand in quotes, tables are headed [train]",
        ) from None
    return flatten(document, origin=str(path), text=text)


_LARGEST_TEXT = 1 << 22  # bytes of a file read by key=@FILE
_ASSIGNED = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=(.*)", re.DOTALL)


def from_assignments(assignments: Sequence[str]) -> Layer:
    """Return the layer of the ``key=value`` arguments; the last value of a repeated key wins.

    The value of ``key=@FILE`` is the text of the file.

    Raises:
        ConfigError: an argument of another form.
    """
    layer = Layer(typed=True)
    for argument in assignments:
        where = f"command line: {argument}"
        if not (match := _ASSIGNED.fullmatch(argument)):
            raise ConfigError(
                f"'{argument}' is not of the form key=value",
                where="command line",
                fix="train.lr=0.01 without spaces, NAME.option=value; text goes to --data, a settings file to -c",
            )
        key, given = match[1], match[2].strip()
        value = _file_text(given[1:], where) if given.startswith("@") else read_value(given)
        if key.split(".")[0] == "plugins":
            what = "plugins are named by --plugins, their options are NAME.option=value"
            raise ConfigError(what, where=where, fix="--plugins NAME NAME.option=value")
        if key in SECTIONS and isinstance(value, Mapping):
            for name, part in value.items():
                layer.put(f"{key}.{name}", Setting(part, "command line", where))
        else:
            layer.put(key, Setting(value, "command line", where))
    return layer


def _file_text(path: str, where: str) -> str:
    """Return the text of ``key=@FILE``: a run stores the text and does not need the file afterwards.

    Raises:
        ConfigError: it cannot be read, is not text, or is larger than 4 MiB.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            text = file.read(_LARGEST_TEXT + 1)
        if len(text) <= _LARGEST_TEXT:
            return text.decode("utf-8")
        reason = "it is larger than 4 MiB"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8, at byte {error.start}"
    what = f"the file {path!r} that gives a setting cannot be read: {reason}"
    raise ConfigError(what, where=where, fix="key=@FILE with a file of text; key=VALUE for a value")


def from_flags(flags: Mapping[str, Any]) -> Layer:
    """Return the layer of the flags; None, False and empty lists count as not given."""
    layer = Layer()
    for flag, value in flags.items():
        if value is not None and value is not False and value != []:
            layer.add(FLAGS[flag], Setting(value, flag, f"{flag} {value}"))
    return layer
