"""Plugins whose code is not what it was: a file that was edited between two lives of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.text import plain

__all__ = ["DIGESTS", "changed", "since"]

DIGESTS = "digests."
"""Begins the paths of a plan's digests: of a plugin, by its name, or of a module."""


def changed(
    found: Mapping[str, Any], plugins: Iterable[LoadedPlugin]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Whose code differs between two plans.

    Args:
        found: what differs, by path.
        plugins: those of the run.

    Returns:
        plugin -> where its code is, for people; and what differs besides.
    """
    owners = {name: one for one in plugins for name in (one.name, _package(one))}
    whose: dict[str, str] = {}
    rest: dict[str, Any] = {}
    for path, pair in found.items():
        key = path.removeprefix(DIGESTS)
        owner = owners.get(key) or owners.get(key.partition(".")[0])
        if path.startswith(DIGESTS) and owner is not None:
            whose[owner.name] = owner.origin.offered_by or plain(
                owner.origin.source.partition(":")[0]
            )
        else:
            rest[path] = pair
    return whose, rest


def since(step: int | None, whose: Mapping[str, str]) -> list[str]:
    """One line for each plugin of :func:`changed`; no step is none that was ever saved."""
    begin = "the run began" if step is None else f"step {step:,}"
    return [
        f"the file of plugin {name} ({place}) has changed since {begin}"
        for name, place in sorted(whose.items())
    ]


def _package(one: LoadedPlugin) -> str:
    """The top of the module that defines it; a module of its own, where it is a single file."""
    return type(one.plugin).__module__.partition(".")[0]
