"""Differences between two ablations: the settings that keep a finished run from being reused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from minillm_core.commands import plain

Json = Mapping[str, Any]

SHOWN = 3
"""Settings that are named."""

ELSEWHERE = {"steps", "minutes", "compile", "checkpointing", "dtype"}
"""Settings of ``train`` that differ in the file's name or in an entry of their own, or in no plan."""


def difference(kept: Json, now: Json) -> str:
    """Describe the first entry in which two identities differ; in a table, its first difference."""
    key = next(key for key in (*now, *kept) if kept.get(key) != now.get(key))
    was, here = kept.get(key), now.get(key)
    if isinstance(was, Mapping) and isinstance(here, Mapping):
        return f"{key}: {difference(was, here)}"
    if key == "plan_hash":
        return (
            f"its plan is {str(was)[:12]}, this one's {str(here)[:12]}, by code or by a setting of "
            "which there is no record"
        )
    return f"its {key} is {_shown(was)}, this one's {_shown(here)}"


def settings(kept: Json, now: Json, variant: str) -> str | None:
    """Describe the settings in which a plugin set differs: plugins, options, versions, model, training.

    Args:
        kept: the ablation.json that lies beside its runs.
        now: the result of the requested ablation.
        variant: the set's name.

    Returns:
        The first few; None where none of what ablation.json holds differs.
    """
    read = json.loads(json.dumps(now))  # lists, where what was not written has tuples
    was, here = (dict(_entries(result, variant)) for result in (kept, read))
    found = [
        f"its {key} is {_shown(was[key])}, this one's {_shown(here[key])}"
        for key in here
        if key in was and was[key] != here[key]
    ]
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more if found else None


def _entries(result: Json, variant: str) -> Iterator[tuple[str, Any]]:
    """List (setting, value), by the names that a user types."""
    one = _table(_table(result.get("variants")).get(variant))
    if "plugins" in one:
        yield "set of plugins", one["plugins"]
    for plugin, options in _table(one.get("options")).items():
        for key, value in _table(options).items():
            yield f"{plugin}.{key}", value
    for plugin, version in _table(one.get("versions")).items():
        yield f"version of {plugin}", version
    for part, others in (("model", set[str]()), ("train", ELSEWHERE)):
        for key, value in _table(result.get(part)).items():
            if key not in others:
                yield f"{part}.{key}", value


def _table(value: Any) -> Json:
    """Take a file's value as a table; anything else is an empty one."""
    return value if isinstance(value, Mapping) else {}


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value)) or "none"
    return plain(str(value), 60)
