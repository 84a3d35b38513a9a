"""Runs checks in order and gives what they found as data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minillm_core.testing.check import Check, Outcome
from minillm_core.testing.registry import CHECKS
from minillm_core.testing.subject import Subject

__all__ = ["Report", "Result", "check_plugin", "run_checks"]


@dataclass(frozen=True)
class Result:
    """A check that was run, or passed over with the reason."""

    check: str
    proves: str
    outcome: Outcome
    seconds: float
    rerun: str  # the command that runs it alone


@dataclass(frozen=True)
class Report:
    """What was found of one plugin."""

    plugin: str
    results: tuple[Result, ...]

    @property
    def failed(self) -> tuple[Result, ...]:
        """Those that failed."""
        return tuple(one for one in self.results if one.outcome.verdict == "failed")

    def data(self) -> dict[str, Any]:
        """As JSON."""
        seconds = sum(one.seconds for one in self.results)
        return {
            "plugin": self.plugin,
            "passed": not self.failed,
            "seconds": round(seconds, 3),
            "checks": [asdict(one) for one in self.results],
        }


def check_plugin(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    backend: str = "both",
    pairs: int | None = 5,
    only: Sequence[str] = (),
    tell: Callable[[Check], None] = lambda check: None,
) -> Report:
    """Check a plugin.

    Args:
        spec: its name, or a file and its class.
        options: its options, where not the defaults.
        backend: ``torch``, ``mlx`` or ``both``; one that is not installed is passed over.
        pairs: how many other plugins to pair it with; None: all.
        only: names of checks to run alone; none: all.
        tell: is called before each check.
    """
    subject = Subject(spec, options, backend=backend, pairs=pairs)
    chosen = [check for check in CHECKS if not only or check.name in only]
    return run_checks(subject, chosen, tell)


def run_checks(
    subject: Subject, checks: Sequence[Check], tell: Callable[[Check], None] = lambda check: None
) -> Report:
    """Run ``checks`` in order; those that need a failed one are passed over."""
    without: dict[str, str] = {}  # check -> the failed one at its root
    results = []
    for check in checks:
        root = next((without[need] for need in check.needs if need in without), None)
        tell(check)
        start = time.perf_counter()
        outcome = Outcome("not run", f"needs '{root}'") if root else check.run(subject)
        if outcome.verdict in ("failed", "not run"):
            without[check.name] = root or check.name
        seconds = time.perf_counter() - start
        results.append(
            Result(check.name, check.proves, outcome, seconds, subject.rerun(check.name))
        )
    return Report(subject.name, tuple(results))
