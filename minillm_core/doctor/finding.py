"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from minillm_core.text import plain

__all__ = ["STATES", "Finding", "can_run"]

STATES = ("ok", "warning", "missing", "broken")
"""Missing: what some plugin or flag would need. Broken: no run is possible until it is mended."""


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    part: str  # python, torch, cache
    state: str  # one of STATES
    what: str
    command: str | None = None  # what to type to mend it

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @property
    def line(self) -> str:
        """What was found, safe to print, on one line."""
        return plain(self.what)


def can_run(findings: Iterable[Finding]) -> bool:
    """Whether nothing that a run needs is broken."""
    return all(one.state != "broken" for one in findings)
