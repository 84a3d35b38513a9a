"""The selection of a run's plugins: ``--plugins`` adds to those of the preset and file, or removes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from minillm_core.config.origins import Setting
from minillm_core.config.schema import SECTIONS
from minillm_core.errors import ConfigError
from minillm_core.text import nearest, plain

RESERVED = frozenset({*SECTIONS, "plugins", "core"})
"""Names that no plugin may have: tables of the config, and the name of the core in plans."""

_FILE = re.compile(r"(?P<file>.+\.py):(?P<attribute>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class FileSpec:
    """A single-file plugin: a Python file, executed when loaded, and the class in it.

    Only :func:`spec_of` creates one, from text that a person typed. Text read from the files of a run
    stays a string, which can only name an installed plugin: a run's record cannot make code run.
    """

    file: str
    class_name: str

    @property
    def name(self) -> str:
        """The plugin's name: the file's name without ``.py``."""
        return PurePath(self.file).stem

    def __str__(self) -> str:
        return f"{self.file}:{self.class_name}"


Spec = str | FileSpec
"""The specification of a plugin: the name of an installed one, or a file."""


def spec_of(text: str, *, where: str) -> Spec:
    """Parse a typed plugin: ``muon`` is a name, ``./my_trick.py:MyTrick`` a file and its class.

    Raises:
        ConfigError: it is neither a name nor a file with a class, or its name is reserved.
    """
    if single := _FILE.fullmatch(text):
        found = FileSpec(single["file"], single["attribute"])
        name = found.name
        meant = re.sub(r"\W", "_", name)
        if not name.isidentifier() and meant.isidentifier():
            raise ConfigError(
                f"'{name}' cannot be a plugin's name: it goes before its options ({meant}.width=8)",
                where=where,
                fix=f"rename the file: {PurePath(single['file']).with_stem(meant)}",
            )
        check_name(name, where=where)
        return found
    if text.endswith(".py"):
        raise ConfigError(
            f"'{text}' does not say which class is the plugin", where=where, fix=f"{text}:ClassName"
        )
    check_name(text, where=where)
    return text


def name_of(spec: Spec, *, where: str = "plugin") -> str:
    """Return the plugin's name: ``muon`` -> muon, ``./my_trick.py:MyTrick`` -> my_trick.

    Raises:
        ConfigError: as :func:`spec_of`.
    """
    found = spec_of(spec, where=where) if isinstance(spec, str) else spec
    return found if isinstance(found, str) else found.name


def check_name(name: str, *, where: str) -> None:
    """Refuse a string that cannot be a plugin's name.

    Raises:
        ConfigError: the name is malformed, or is a table of the config.
    """
    if not name.isidentifier():
        what = (
            f"'{plain(name, 80)}' cannot be a plugin's name" if name else "a plugin's name is empty"
        )
        rule = "names are letters, digits and _, separated by commas; a file is ./file.py:Class"
        meant = name.replace("-", "_")
        raise ConfigError(what, where=where, fix=meant if meant.isidentifier() else rule)
    if name in RESERVED:
        raise ConfigError(
            f"no plugin may be called '{name}': "
            + ("it is the name of the core" if name == "core" else "it is a table of the config"),
            where=where,
            fix="rename the plugin (its file, or its entry point)",
        )


def added(argument: str | None, *, flag: str = "--plugins") -> dict[str, Spec]:
    """Return name -> spec of the plugins that the argument adds; for a resumed run, the plugins named again.

    Raises:
        ConfigError: a malformed or reserved name.
    """
    return dict(_added(argument, f"{flag} {argument}"))


def _added(argument: str | None, where: str) -> Iterator[tuple[str, Spec]]:
    for item in _items(argument):
        if not item.startswith("-"):
            spec = spec_of(item, where=where)
            yield name_of(spec, where=where), spec


def taken_away(argument: str | None) -> set[str]:
    """Return the names that the argument removes."""
    return {item[1:] for item in _items(argument) if item.startswith("-")}


def _items(argument: str | None) -> list[str]:
    return [item.strip() for item in argument.split(",")] if argument else []


def select(
    named: Mapping[str, Setting], argument: str | None, *, goes_on: bool = False
) -> tuple[dict[str, Spec], dict[str, str]]:
    """Select the plugins of the run.

    Args:
        named: the plugins that the preset and the file name.
        argument: ``a,b,-c,./x.py:X``: adds a, b and x, removes c; empty or None changes nothing.
        goes_on: the run is resumed: plugins that it started without may be removed again, so that the
            command that started it can be repeated.

    Returns:
        name -> spec, and name -> origin, both sorted by name: the order of naming never matters.

    Raises:
        ConfigError: a malformed or reserved name, a plugin named twice, both added and removed, or
            removed without being named.
    """
    origins = {name: setting.origin for name, setting in named.items()}
    specs: dict[str, Spec] = {name: name for name in named}
    added: dict[str, Spec] = {}
    where = f"--plugins {argument}"
    for name, spec in _added(argument, where):
        if name in added:
            raise ConfigError(
                f"plugin '{name}' is named twice: {added[name]} and {spec}",
                where=where,
                fix="name it once; a file names its plugin: give each class a file of another name",
            )
        added[name] = spec
    for name in sorted(taken_away(argument)):
        if name in added:
            what = f"plugin '{name}' is both added and taken away"
            raise ConfigError(what, where=where, fix=f"leave out {added[name]}, or -{name}")
        if name not in specs:
            if goes_on:
                continue
            meant = nearest(name, specs)
            raise ConfigError(
                f"plugin '{name}' cannot be taken away: neither the preset nor the file names it",
                where=where,
                fix=f"-{meant}" if meant else f"they name: {', '.join(sorted(specs)) or 'none'}",
            )
        del specs[name], origins[name]
    specs |= added
    origins |= dict.fromkeys((name for name in added if name not in origins), "--plugins")
    return dict(sorted(specs.items())), dict(sorted(origins.items()))
