"""Which plugins a run has: those that its settings name, those of ``--plugins``, less ``-NAME``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minillm_core.errors import PluginError
from minillm_core.text import nearest, plain

__all__ = ["is_file", "merge_names", "plugin_name", "split_flag"]


def is_file(named: str) -> bool:
    """Whether a plugin is named by its file, ``./my_trick.py:MyTrick``."""
    return ".py" in named or "/" in named or "\\" in named


def plugin_name(named: str) -> str:
    """The name of what ``--plugins`` names: a file's stem, else itself."""
    return Path(named.rpartition(":")[0] or named).stem if is_file(named) else named


def split_flag(flag: str) -> list[str]:
    """The items of ``--plugins a,-b,./c.py:C``.

    Raises:
        PluginError: an item is empty.
    """
    items = [item.strip() for item in flag.split(",")] if flag.strip() else []
    if "" in items:
        raise PluginError(f"--plugins {plain(flag)} has an empty name", fix="--plugins a,b")
    return items


def merge_names(
    tables: Mapping[str, Mapping[str, Any]],
    flag: Iterable[str] = (),
    assigned: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Every plugin of a run, as it is named, with the options given, sorted by name.

    Args:
        tables: ``[plugins.NAME]`` of the preset and the file: even an empty one names the plugin.
        flag: the items of ``--plugins``: names, files, and ``-NAME`` to take one away.
        assigned: ``NAME.option=value`` of the command line; these name no plugin.

    Raises:
        PluginError: a plugin is named twice, or taken away or given an option without being named.
    """
    chosen = {plugin_name(named): named for named in tables}
    options = {plugin_name(named): dict(table) for named, table in tables.items()}
    added, removed = _sort(flag)
    for name in removed:
        if name not in chosen:
            raise _not_named(f"--plugins -{name} takes away a plugin that nothing names", chosen)
        del chosen[name]
    chosen |= added
    for name, values in (assigned or {}).items():
        if name not in chosen:
            shown = ", ".join(f"{name}.{key}" for key in values)
            raise _not_named(
                f"{shown} is an option of plugin '{name}', which is not named", chosen, add=name
            )
        options[name] = options.get(name, {}) | dict(values)
    return {chosen[name]: options.get(name, {}) for name in sorted(chosen)}


def _sort(flag: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    added: dict[str, str] = {}
    removed: set[str] = set()
    for item in flag:
        name = plugin_name(item.removeprefix("-"))
        if name in added or name in removed:
            raise PluginError(
                f"plugin '{plain(name)}' is named twice in --plugins", fix="name it once"
            )
        if item.startswith("-"):
            removed.add(name)
        else:
            added[name] = item
    return added, removed


def _not_named(what: str, named: Iterable[str], add: str | None = None) -> PluginError:
    names = sorted(named)
    close = nearest(add or what.split()[1][1:], names)
    fix = f"did you mean '{close}'? " if close else ""
    fix += f"name it: --plugins {add}" if add and not close else ""
    shown = ", ".join(names) or "no plugin"
    return PluginError(plain(what), where=f"named are: {shown}", fix=fix or "leave it out")
