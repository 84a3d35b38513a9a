"""Parts of minillm outside the core, each behind a group of entry points: imported when it is used.

:data:`~minillm_core.plugins.first_party.PROVIDERS` names the groups. The functions of the group
``minillm.measured`` are measurements of plugins and of runs on this machine:

    speed       (cache, plan, detected, dtype) -> the speed that the plan may be expected to reach here
                (``tokens_per_second``, and ``basis`` in words); None: no comparable measurement
    tokens      (cache, plan) -> the size of the training data, counted by an earlier run; None: no such run
    remember    (cache, plan, binding, tokens, tokens_per_second, steps=) stores both of a finished run
    cards       (plugin, file) -> the part of ``plugins info --json`` about the worth of a plugin
    worth       (document of ``plugins info``) -> the same as lines of text
"""

from __future__ import annotations

from typing import Any

from minillm_core.errors import BackendError
from minillm_core.plugins.discover import offered
from minillm_core.plugins.first_party import PROVIDERS, installing

MEASURED = "minillm.measured"


def provided(group: str, name: str) -> Any:
    """Import the entry point of this name in a group; None if no installed distribution has it.

    Raises:
        PluginError: several distributions have it.
    """
    found = offered(group, name, f"provide {name} of {group}")
    return found.load() if found else None


def required(group: str, name: str, what: str) -> Any:
    """Import the entry point of this name in a group; ``what`` needs it, in words.

    Raises:
        BackendError: no installed distribution has it.
        PluginError: several have it.
    """
    if (found := provided(group, name)) is None:
        raise BackendError(
            f"{what} needs a distribution that is not installed",
            where=f"entry points of {group}",
            fix=installing([PROVIDERS[group]]),
        )
    return found


def missing_hint(group: str, what: str) -> str:
    """Return a sentence for a part that is not installed, with the pip line of its distribution."""
    return f"{what} by {PROVIDERS[group]}, which is not installed: {installing([PROVIDERS[group]])}"
