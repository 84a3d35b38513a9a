"""Runs checks in order and gives what they found as data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm_core.errors import MinillmError, PluginError
from minillm_core.testing.check import Check, Outcome
from minillm_core.testing.registry import CHECKS
from minillm_core.testing.rerun import PAIRS, rerun
from minillm_core.testing.subject import Subject
from minillm_core.text import nearest, plain

__all__ = ["Checking", "Report", "Result", "check_plugin", "chosen", "explained", "run_checks"]


@dataclass(frozen=True)
class Result:
    """A check that was run, or passed over with the reason."""

    check: str
    proves: str
    outcome: Outcome
    seconds: float
    rerun: str  # the command that runs it alone

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "check": self.check,
            "proves": self.proves,
            "verdict": self.outcome.verdict,
            "found": self.outcome.found,
            "cause": self.outcome.cause,
            "seconds": round(self.seconds, 3),
            "rerun": self.rerun,
        }


@dataclass(frozen=True)
class Report:
    """What was found of one plugin."""

    plugin: str
    results: tuple[Result, ...]
    backends: tuple[str, ...] = ()  # those that it was checked on
    absent: Mapping[str, str] = field(default_factory=dict)  # others -> why not on them

    @property
    def failed(self) -> tuple[Result, ...]:
        """Those that failed."""
        return tuple(one for one in self.results if one.outcome.verdict == "failed")

    @property
    def seconds(self) -> float:
        """All checks together."""
        return sum(one.seconds for one in self.results)

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "plugin": self.plugin,
            "passed": not self.failed,
            "seconds": round(self.seconds, 3),
            "backends": list(self.backends),
            "absent": dict(self.absent),
            "checks": [one.data() for one in self.results],
        }


class Checking:
    """The checks of one plugin, one after the other; what builds on a failed one is passed over.

    Args:
        subject: the plugin.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._without: dict[str, str] = {}  # check -> the failed one at its root

    def result(self, check: Check) -> Result:
        """Run ``check``, unless one that it needs was seen to fail."""
        root = self._root(check)
        start = time.perf_counter()
        outcome = Outcome("not run", f"needs '{root}'") if root else check.run(self.subject)
        if outcome.verdict in ("failed", "not run"):
            self._without[check.name] = root or check.name
        seconds = time.perf_counter() - start
        return Result(check.name, check.proves, outcome, seconds, rerun(self.subject, check.name))

    def _root(self, check: Check) -> str | None:
        """The failed check that it builds on, also through checks that were not asked for."""
        for need in check.needs:
            if need in self._without:
                return self._without[need]
            between = (one for one in CHECKS if one.name == need)
            if root := next(filter(None, map(self._root, between)), None):
                return root
        return None


def check_plugin(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    backend: str = "both",
    pairs: int | None = PAIRS,
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

    Raises:
        PluginError: there is no check of a name in ``only``.
    """
    checks = chosen(only)
    return run_checks(Subject(spec, options, backend=backend, pairs=pairs), checks, tell)


def chosen(only: Sequence[str] = ()) -> tuple[Check, ...]:
    """The checks of these names, in the order of all; none: all.

    Raises:
        PluginError: there is no such check.
    """
    names = [check.name for check in CHECKS]
    for name in only:
        if name not in names:
            close = nearest(name, names)
            raise PluginError(
                f"there is no check '{plain(name)}'",
                where=f"--only {plain(name)}",
                fix=f"did you mean '{close}'?" if close else f"one of {', '.join(names)}",
            )
    return tuple(check for check in CHECKS if not only or check.name in only)


def run_checks(
    subject: Subject,
    checks: Sequence[Check],
    tell: Callable[[Check], None] = lambda check: None,
    found: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Run ``checks`` in order; those that need a failed one are passed over.

    Args:
        subject: the plugin.
        checks: to run.
        tell: is called before each.
        found: is called with each result.
    """
    checking, results = Checking(subject), []
    for check in checks:
        tell(check)
        results.append(checking.result(check))
        found(results[-1])
    try:
        absent = subject.absent
        backends = tuple(one for one in subject.asked if one not in absent)
    except MinillmError:  # it cannot be imported, which a check has said
        absent, backends = {}, ()
    return Report(subject.name, tuple(results), backends, absent)


def explained(result: Result, *, again: str | None = None) -> str:
    """A failure: what was to hold, the numbers, the likely cause, and how to run it again, alone.

    Args:
        result: of a check that failed.
        again: the command, where it is not ``minillm plugins check``.
    """
    found = result.outcome.found.replace("\n", "\n         ")
    lines = [f"{result.check} failed: {result.proves}", f"  found: {found}"]
    if result.outcome.cause:
        lines.append(f"  cause: {result.outcome.cause}")
    return "\n".join([*lines, f"  again: {again or result.rerun}"])
