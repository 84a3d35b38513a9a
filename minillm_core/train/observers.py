"""Telling everyone: the core's own observers must work, a plugin's may fail three times."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from minillm_core.errors import PluginCodeError
from minillm_core.text import plain
from minillm_core.train.events import Event

__all__ = ["STRIKES", "Observer", "Observers"]

STRIKES = 3
"""Errors after which an observer is switched off."""

Observer = Callable[[Event], None]


class Observers:
    """Hands every event to the core's observers, then to the plugins'.

    What the core's raise ends the run: metrics.jsonl that cannot be written is no detail.

    Args:
        core: called first, in order.
        plugins: plugin name -> its ``on_event``, contained; called in the order of the names.
        say: is told of errors.
        seen: ``event:<plugin>`` -> events that it took; the evidence reads it.
    """

    def __init__(
        self,
        core: Sequence[Observer],
        plugins: Mapping[str, Observer],
        *,
        say: Callable[[str], None],
        seen: Counter[str],
    ) -> None:
        self._core, self._plugins = list(core), dict(sorted(plugins.items()))
        self._say, self._seen = say, seen
        self._errors: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        """Tell everyone.

        Whatever a plugin's raises is isolated, SystemExit too; and what it does to an event is seen
        by nobody else.
        """
        for observer in self._core:
            observer(event)
        for name, observer in list(self._plugins.items()):
            try:
                observer(copy.deepcopy(event))
            except Exception as error:  # contained: SystemExit and its like are causes
                self._strike(name, event, error)
            else:
                self._seen[f"event:{name}"] += 1

    def _strike(self, name: str, event: Event, error: Exception) -> None:
        self._errors[name] += 1
        count = self._errors[name]
        told, cause = f"plugin '{name}' raised in on_event for '{event.event}'", error
        if isinstance(error, PluginCodeError):
            told, cause = error.what, error.__cause__
        what = plain(f"{type(cause).__name__}: {cause}", 160)
        self._say(f"warning: {told} ({count} of {STRIKES}): {what}")
        if count == STRIKES:
            del self._plugins[name]
            self._say(f"warning: plugin '{name}' is told no more events; the run goes on")
