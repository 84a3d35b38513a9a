"""The table of all checks, and the runner, which runs them in order and returns their results."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm_core import MinillmError, PluginError
from minillm_core.commands import nearest, plain
from minillm_core.inspection import read_value
from minillm_kit import (
    decoding,
    export,
    frameworks,
    hooks,
    hygiene,
    mesh,
    numbers,
    pairs,
    plan,
    training,
    updates,
)
from minillm_kit.check import Check, Outcome
from minillm_kit.kernels.of_plugin import kernel
from minillm_kit.subject import PAIRS, Subject

CHECKS = (
    Check("api", "it is written for this hook API", hygiene.api),
    Check("loads", "it is found, imported and takes its options", hygiene.loads, ("api",)),
    Check(
        "manifest",
        "its source declares the same as its class at run time",
        hygiene.manifest,
        ("loads",),
    ),
    Check(
        "options",
        "options survive JSON and TOML, unknown ones are refused",
        hygiene.options,
        ("loads",),
    ),
    Check("import", "importing it changes and opens nothing", hygiene.clean_import, ("loads",)),
    Check("plans", "the small model can be planned with it", plan.builds, ("loads",)),
    Check("declared", "what it does not claim is unchanged", plan.only_declared, ("plans",)),
    Check(
        "deterministic",
        "the same plan twice and under another hash seed",
        plan.same_plan,
        ("plans",),
    ),
    Check("traces", "planning leaves the process as it was", plan.no_traces, ("import", "plans")),
    Check(
        "off", "without it the plan is byte for byte the plain one", plan.switched_off, ("traces",)
    ),
    Check("batches", "on_batch keeps its promises in every phase", hooks.batches, ("plans",)),
    Check(
        "events",
        "on_event takes every event, on_evaluated gives verdicts",
        hooks.events,
        ("plans", "batches"),
    ),
    Check("kernel", "its kernels keep their ops' contracts, alone", kernel, ("plans",)),
    Check(
        "repeats",
        "the same step twice gives the same",
        training.repeats,
        ("plans", "batches", "kernel"),
    ),
    Check(
        "identity", "the model is unchanged before the first step", numbers.identity, ("repeats",)
    ),
    Check("forward", "losses and logits match NumPy in float64", numbers.forward, ("repeats",)),
    Check("slopes", "gradients match slopes of NumPy's loss", numbers.slopes, ("forward",)),
    Check("trains", "five steps on each backend, every loss finite", training.trains, ("repeats",)),
    Check(
        "evidence",
        "everything it put into the plan is used in a step",
        training.evidence,
        ("trains",),
    ),
    Check(
        "clean",
        "steps leave the frameworks as they were",
        training.frameworks_untouched,
        ("traces", "trains"),
    ),
    Check("resumes", "a resumed run equals the uninterrupted one", training.resumes, ("trains",)),
    Check(
        "updates",
        "an update matches its stages in NumPy",
        updates.updates,
        ("resumes", "slopes"),
    ),
    Check(
        "causal", "a later token changes nothing earlier", decoding.causal, ("trains", "forward")
    ),
    Check("decodes", "decoding in pieces equals the whole pass", decoding.decodes, ("causal",)),
    Check("exports", "the exported model computes the same", export.exports, ("forward", "causal")),
    Check("parity", "both frameworks have the same gradients", frameworks.parity, ("slopes",)),
    Check(
        "pure",
        "nodes keep nothing, checkpointing changes no gradient",
        frameworks.checkpointing,
        ("trains", "forward"),
    ),
    Check("alike", "both frameworks train alike", frameworks.alike, ("parity", "updates")),
    Check(
        "compiles",
        "a compiled step is one graph, same moments",
        frameworks.compiles,
        ("resumes", "forward"),
    ),
    # Context parallelism and decoding both depend on a node's lookback
    Check(
        "mesh",
        "two processes train as one, along each axis",
        mesh.mesh,
        ("resumes", "decodes", "pure"),
    ),
    Check("pairs", "together with others it trains, or is refused", pairs.pairs, ("trains",)),
)
"""All checks, in the order of cost; a check's dependencies precede it."""


@dataclass(frozen=True)
class Result:
    """The result of a check that was run, or skipped with the reason."""

    check: str
    proves: str
    outcome: Outcome
    seconds: float
    rerun: str  # the command that runs it alone

    def data(self) -> dict[str, Any]:
        """Return it as JSON."""
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
    """The results of one plugin's checks."""

    plugin: str
    results: tuple[Result, ...]
    backends: tuple[str, ...] = ()  # the backends checked
    absent: Mapping[str, str] = field(default_factory=dict)  # backends not checked -> the reason

    @property
    def failed(self) -> tuple[Result, ...]:
        """The failed checks."""
        return tuple(one for one in self.results if one.outcome.verdict == "failed")

    @property
    def seconds(self) -> float:
        """The total time of all checks."""
        return sum(one.seconds for one in self.results)

    def data(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "plugin": self.plugin,
            "passed": not self.failed,
            "seconds": round(self.seconds, 3),
            "backends": list(self.backends),
            "absent": dict(self.absent),
            "checks": [one.data() for one in self.results],
        }


class Checking:
    """The sequence of one plugin's checks; checks that depend on a failed one are skipped.

    Args:
        subject: the plugin.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._without: dict[str, str] = {}  # check -> the failed check that it depends on

    def result(self, check: Check) -> Result:
        """Run ``check``, unless a dependency failed."""
        root = self._root(check)
        start = time.perf_counter()
        outcome = Outcome("not run", f"needs '{root}'") if root else check.run(self.subject)
        if outcome.verdict in ("failed", "not run"):
            self._without[check.name] = root or check.name
        seconds = time.perf_counter() - start
        return Result(check.name, check.proves, outcome, seconds, rerun(self.subject, check.name))

    def _root(self, check: Check) -> str | None:
        """Find the failed check that it depends on, also through checks that were not chosen."""
        for need in check.needs:
            between = (self._root(one) for one in CHECKS if one.name == need)
            if root := self._without.get(need) or next(between, None):
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
    """Run a plugin's conformance checks.

    Args:
        spec: its name, or a file and its class.
        options: its options, if not the defaults.
        backend: ``torch``, ``mlx`` or ``both``; one that is not installed is skipped.
        pairs: number of other plugins to pair it with; None: all.
        only: names of the checks to run; empty: all.
        tell: called before each check.

    Raises:
        PluginError: a name in ``only`` is not a check.
    """
    checks = chosen(only)
    return run_checks(Subject(spec, options, backend=backend, pairs=pairs), checks, tell)


def chosen(only: Sequence[str] = ()) -> tuple[Check, ...]:
    """Return the checks with these names, in the order of ``CHECKS``; no names: all.

    Raises:
        PluginError: a name is not a check.
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
    """Run ``checks`` in order, skipping those that depend on a failed one.

    Args:
        subject: the plugin.
        checks: to run.
        tell: called before each.
        found: called with each result.
    """
    checking, results = Checking(subject), []
    for check in checks:
        tell(check)
        results.append(checking.result(check))
        found(results[-1])
    try:
        absent = subject.absent
        backends = tuple(one for one in subject.asked if one not in absent)
    except MinillmError:  # the import failed, which a check has reported
        absent, backends = {}, ()
    return Report(subject.name, tuple(results), backends, absent)


def explained(result: Result, *, again: str | None = None) -> str:
    """Format a failure: the property, the numbers, the likely cause, and the command to rerun it.

    Args:
        result: of a check that failed.
        again: the command, if it is not ``minillm plugins check``.
    """
    found = result.outcome.found.replace("\n", "\n         ")
    lines = [f"{result.check} failed: {result.proves}", f"  found: {found}"]
    if result.outcome.cause:
        lines.append(f"  cause: {result.outcome.cause}")
    return "\n".join([*lines, f"  again: {again or result.rerun}"])


def rerun(subject: Subject, check: str) -> str:
    """Return the shell command that reruns a single check of a subject."""
    words = [subject.spec]
    words += [f"{subject.name}.{key}={as_typed(value)}" for key, value in subject.options.items()]
    if len(subject.asked) == 1:
        words += ["--backend", *subject.asked]
    if subject.pairs != PAIRS:
        words += ["--pairs", "all" if subject.pairs is None else str(subject.pairs)]
    return shlex.join(["minillm", "plugins", "check", *words, "--only", check])


def as_typed(value: Any) -> str:
    """Format a value for ``key=value``, such that parsing returns the same value."""
    if isinstance(value, str) and value == value.strip() and read_value(value) == value:
        return _toml(value) if value.startswith("@") else value  # key=@FILE is a file's text
    return _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's are TOML's
