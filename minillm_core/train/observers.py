"""Telling everyone: the core's own observers must work, a plugin's may fail three times."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from minillm_core.errors import PluginCodeError
from minillm_core.text import plain
from minillm_core.train.events import Event

__all__ = ["STRIKES", "Observer", "Observers", "Raised"]

STRIKES = 3
"""Errors after which an observer is switched off."""

Observer = Callable[[Event], None]


@dataclass(frozen=True)
class Raised:
    """What became of an observer that raised."""

    times: int
    last: str  # what it was, and in which line

    @property
    def off(self) -> bool:
        """It is told no more events."""
        return self.times >= STRIKES


class Observers:
    """Hands every event to the core's observers, then to the plugins'.

    What the core's raise ends the run: metrics.jsonl that cannot be written is no detail.

    Args:
        core: called first, in order.
        plugins: plugin name -> its ``on_event``, contained; called in the order of the names.
        say: is told of errors.
        seen: ``event:<plugin>`` -> events that it took; the evidence reads it.
        raised: plugin -> what its raised; the evidence reads it.
    """

    def __init__(
        self,
        core: Sequence[Observer],
        plugins: Mapping[str, Observer],
        *,
        say: Callable[[str], None],
        seen: Counter[str],
        raised: dict[str, Raised] | None = None,
    ) -> None:
        self._core, self._plugins = list(core), dict(sorted(plugins.items()))
        self._say, self._seen = say, seen
        self._raised = {} if raised is None else raised

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
        before = self._raised.get(name)
        count = before.times + 1 if before else 1
        told, cause = f"plugin '{name}' raised in on_event for '{event.event}'", error
        if isinstance(error, PluginCodeError):
            told, cause = error.what, error.__cause__
        last = plain(f"{type(cause).__name__}: {cause}", 160) + _place(error)
        self._raised[name] = Raised(count, last)
        self._say(f"warning: {told} ({count} of {STRIKES}): {last}")
        if self._raised[name].off:
            del self._plugins[name]
            self._say(f"warning: plugin '{name}' is told no more events; the run goes on")


def _place(error: Exception) -> str:
    """The plugin's innermost line, where it is known."""
    where = error.where if isinstance(error, PluginCodeError) else None
    frames = (where or "").splitlines()[:-1]  # the last line is the error itself
    return f", at {frames[-1].strip()}" if frames else ""
