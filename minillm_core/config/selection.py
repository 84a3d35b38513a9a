"""The plugins of a run: what ``--plugins`` adds to the preset and the file, or takes away."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from minillm_core.config.origins import SECTIONS, Setting
from minillm_core.errors import ConfigError
from minillm_core.text import nearest

__all__ = ["RESERVED", "added", "check_name", "name_of", "select", "taken_away"]

RESERVED = frozenset({*SECTIONS, "plugins"})
"""Names that no plugin may have: they are tables of the config."""

_FILE = re.compile(r"(?P<file>.+\.py):(?P<attribute>[A-Za-z_]\w*)")


def name_of(spec: str, *, where: str) -> str:
    """The plugin's name: ``muon`` -> muon, ``./my_trick.py:MyTrick`` -> my_trick.

    Raises:
        ConfigError: the spec is neither a name nor a file with a class, or its name is reserved.
    """
    if single := _FILE.fullmatch(spec):
        name = PurePath(single["file"]).stem
        meant = re.sub(r"\W", "_", name)
        if not name.isidentifier() and meant.isidentifier():
            raise ConfigError(
                f"'{name}' cannot be a plugin's name: it goes before its options ({meant}.width=8)",
                where=where,
                fix=f"rename the file: {PurePath(single['file']).with_stem(meant)}",
            )
    elif spec.endswith(".py"):
        raise ConfigError(
            f"'{spec}' does not say which class is the plugin", where=where, fix=f"{spec}:ClassName"
        )
    else:
        name = spec
    check_name(name, where=where)
    return name


def check_name(name: str, *, where: str) -> None:
    """Refuse what cannot be a plugin's name.

    Raises:
        ConfigError: the name is malformed, or a table of the config has it.
    """
    if not name.isidentifier():
        meant = name.replace("-", "_")
        raise ConfigError(
            f"'{name}' cannot be a plugin's name" if name else "a plugin's name is empty",
            where=where,
            fix=meant
            if meant.isidentifier()
            else "names are letters, digits and _, separated by commas; a file is ./file.py:Class",
        )
    if name in RESERVED:
        raise ConfigError(
            f"no plugin may be called '{name}': it is a table of the config",
            where=where,
            fix="rename the plugin (its file, or its entry point)",
        )


def added(argument: str | None, *, flag: str = "--plugins") -> dict[str, str]:
    """What the argument adds, name -> spec: of a run that goes on, plugins that are named again.

    Raises:
        ConfigError: a malformed or reserved name.
    """
    where = f"{flag} {argument}"
    return {
        name_of(item, where=where): item for item in _items(argument) if not item.startswith("-")
    }


def taken_away(argument: str | None) -> set[str]:
    """The names that the argument takes away."""
    return {item[1:] for item in _items(argument) if item.startswith("-")}


def _items(argument: str | None) -> list[str]:
    return [item.strip() for item in argument.split(",")] if argument else []


def select(
    named: Mapping[str, Setting],
    argument: str | None,
    *,
    flag: str = "--plugins",
    goes_on: bool = False,
) -> tuple[dict[str, str], dict[str, str]]:
    """The plugins of the run.

    Args:
        named: the plugins that the preset and the file name.
        argument: ``a,b,-c,./x.py:X``: adds a, b and x, takes away c; empty or None changes nothing.
        flag: what the argument is called, for messages and origins.
        goes_on: they are those of a run that goes on: what it started without may be taken away
            again, so that the command that started it can be repeated.

    Returns:
        name -> spec, and name -> origin, both sorted by name: the order of naming never matters.

    Raises:
        ConfigError: a malformed or reserved name, one named twice, one both added and taken
            away, or one taken away that nobody names.
    """
    origins = {name: setting.origin for name, setting in named.items()}
    specs = {name: name for name in named}
    added: dict[str, str] = {}
    where = f"{flag} {argument}"
    for spec in _items(argument):
        if spec.startswith("-"):
            continue
        name = name_of(spec, where=where)
        if name in added:
            raise ConfigError(
                f"plugin '{name}' is named twice: {added[name]} and {spec}",
                where=where,
                fix="name it once; two files of one name cannot be used together",
            )
        added[name] = spec
    for name in sorted(taken_away(argument)):
        if name in added:
            raise ConfigError(
                f"plugin '{name}' is both added and taken away",
                where=where,
                fix=f"leave out {added[name]}, or -{name}",
            )
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
    origins |= dict.fromkeys((name for name in added if name not in origins), flag)
    return dict(sorted(specs.items())), dict(sorted(origins.items()))
