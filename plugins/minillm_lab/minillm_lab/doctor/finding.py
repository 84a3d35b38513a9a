"""Findings of ``minillm doctor``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from minillm_core.commands import plain

STATES = ("ok", "optional", "warning", "missing", "broken")
"""Optional: needed for some uses only. Missing: useful on this machine. Broken: no run
is possible until it is fixed."""


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    part: str  # python, torch, cache
    state: str  # one of STATES
    what: str
    command: str | None = None  # that fixes it

    def data(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        return asdict(self)

    @property
    def line(self) -> str:
        """Format the finding on one line, safe to print."""
        return plain(self.what)


def can_run(findings: Iterable[Finding]) -> bool:
    """Return whether nothing that a run needs is broken."""
    return all(one.state != "broken" for one in findings)
