"""Differences between two ablations: settings that prevent the reuse of a finished run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from minillm_core.commands import plain

Json = Mapping[str, Any]

SHOWN = 3
"""Maximum number of differing settings to list."""

ELSEWHERE = {"steps", "minutes", "compile", "checkpointing", "dtype"}
"""Settings of ``train`` to skip: they are in the file's name or an entry of their own, or in no plan."""


def difference(kept: Json, now: Json) -> str:
    """Describe the first entry that differs between two identities; of a table, its first difference."""
    key = next(key for key in (*now, *kept) if kept.get(key) != now.get(key))
    was, here = kept.get(key), now.get(key)
    if isinstance(was, Mapping) and isinstance(here, Mapping):
        return f"{key}: {difference(was, here)}"
    if key == "plan_hash":
        return (
            f"its plan is {str(was)[:12]}, this one's {str(here)[:12]}, by code or by a setting of "
            "which there is no record"
        )
    name = {"eval_tokens": "eval.tokens"}.get(key, key)
    return f"its {name} is {_shown(was)}, this one's {_shown(here)}"


def settings(kept: Json, now: Json, variant: str) -> str | None:
    """Describe the settings that differ for a plugin set: plugins, options, versions, model, training.

    Args:
        kept: the ablation.json in the folder of the finished runs.
        now: the result of the requested ablation.
        variant: the set's name.

    Returns:
        The first few differences; None if nothing in ablation.json differs.
    """
    read = json.loads(json.dumps(now))  # turns tuples into lists, as in the file
    was, here = (dict(_entries(result, variant)) for result in (kept, read))
    found = [
        f"its {key} is {_shown(was[key])}, this one's {_shown(here[key])}"
        for key in here
        if key in was and was[key] != here[key]
    ]
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more if found else None


def _entries(result: Json, variant: str) -> Iterator[tuple[str, Any]]:
    """Yield (setting, value), with the settings' command-line names."""
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
    """Return a value from a file if it is a table, else an empty table."""
    return value if isinstance(value, Mapping) else {}


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value)) or "none"
    return plain(str(value), 60)
