"""Measurements of plugins and of runs on this machine, through the entry points ``minillm.measured``.

minillm-lab provides these functions; without it nothing is measured, kept or shown:

    speed       (cache, plan, detected, dtype) -> the speed that the plan may be expected to reach here
                (``tokens_per_second``, and ``basis`` in words); None: nothing like it was measured
    tokens      (cache, plan) -> the tokens to train on, as an earlier run counted them; None: none did
    remember    (cache, plan, binding, tokens, tokens_per_second, steps=) keeps those of a finished run
    cards       (plugin, file) -> the part of ``plugins info --json`` about the worth of a plugin
    worth       (document of ``plugins info``) -> the same for people, a text for each card
"""

from __future__ import annotations

from typing import Any

from minillm_core.plugins.discover import offered
from minillm_core.plugins.first_party import installing

GROUP, FIRST_PARTY = "minillm.measured", "minillm-lab"


def measured(name: str) -> Any:
    """Import a function of the group; None if no installed distribution provides it.

    Raises:
        PluginError: several distributions provide it.
    """
    found = offered(GROUP, name, f"bring {name} of what was measured")
    return found.load() if found else None


def absent(what: str) -> str:
    """Return a sentence that names the distribution with the measurements, with its pip line."""
    return f"{what} by {FIRST_PARTY}, which is not installed: {installing([FIRST_PARTY])}"
