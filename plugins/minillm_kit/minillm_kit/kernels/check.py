"""The check of kernels x dtypes x cases: selects the tests, runs them and reports the results."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from minillm_core import Request
from minillm_kit.kernels.calls import Calls
from minillm_kit.kernels.examples import CASES, Case
from minillm_kit.kernels.offers import Offer
from minillm_kit.kernels.problem import problem
from minillm_kit.kernels.trial import NONE, PROPERTIES, Error, Failure, Tried, trial

SEED = 11

Chooser = Callable[[Case], bool]


@dataclass(frozen=True)
class Target:
    """A kernel on a device."""

    offer: Offer
    calls: Calls

    def refusal(self, case: Case, dtype: str) -> str | None:
        """Return why the kernel does not support a case; None: it does."""
        candidate = self.offer.candidate
        request = Request(
            candidate.op, self.calls.backend, self.calls.kind, dtype, facts=facts_of(case)
        )
        return self.offer.refusal(request)


@dataclass
class Row:
    """The results of a kernel on a device in a dtype."""

    target: Target
    dtype: str
    cases: list[int] = field(default_factory=list)  # the supported cases
    refused: str = ""  # the reason for the unsupported ones
    worst: Error = NONE
    worst_case: int | None = None
    spread: float = 0.0
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    compiles: bool = False  # compiles itself, for each layout: layouts are tested in its first case
    no_memory: list[int] = field(default_factory=list)  # cases that ran out of device memory

    @property
    def verdict(self) -> str:
        """``passed``, ``failed``, ``refused``, or ``no memory`` if no case had room."""
        if not self.cases:
            return "refused"
        if self.failures:
            return "failed"
        return "no memory" if len(self.no_memory) == len(self.cases) else "passed"

    def take(self, index: int, tried: Tried) -> None:
        """Add the results of a case."""
        self.spread = max(self.spread, tried.spread)
        self.failures += [(index, one) for one in tried.failures]
        if tried.no_memory:
            self.no_memory.append(index)
        if tried.worst.share > self.worst.share:
            self.worst, self.worst_case = tried.worst, index


@dataclass(frozen=True)
class Report:
    """The outcome of a check of kernels."""

    rows: tuple[Row, ...]
    seed: int
    seconds: float
    lost: str = ""  # the command of a case that left the device unresponsive and ended the check

    @property
    def failed(self) -> list[Row]:
        """The rows in which a property does not hold."""
        return [one for one in self.rows if one.verdict == "failed"]

    def again(self, row: Row, index: int) -> str:
        """Return the command that reruns one case of a kernel."""
        offer, calls = row.target.offer, row.target.calls
        words = ["minillm", "kernels", "check", offer.candidate.op]
        words += ["--kernel", offer.candidate.name]
        words += ["--backend", calls.backend, "--device", calls.device, "--dtype", row.dtype]
        words += ["--seed", str(self.seed), "--case", str(index)]
        if offer.plugin and not offer.plugin.isidentifier():
            words += ["--plugins", offer.plugin]
        return shlex.join(words)

    def data(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "passed": not self.failed,
            "seed": self.seed,
            "seconds": self.seconds,
            "lost": self.lost or None,
            "properties": dict(PROPERTIES),
            "kernels": [self._row(one) for one in self.rows],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        offer, calls = row.target.offer, row.target.calls
        candidate = offer.candidate
        cases = CASES[candidate.op]
        worst = row.worst_case
        return {
            "op": candidate.op,
            "kernel": candidate.name,
            "provider": candidate.provider,
            "plugin": offer.plugin,
            "backend": calls.backend,
            "device": calls.device,
            "dtype": row.dtype,
            "verdict": row.verdict,
            "refused": row.refused or None,
            "within_tolerance": candidate.within_tolerance,
            "cases": len(row.cases),
            "without_memory": [cases[index].name for index in row.no_memory],
            "error_over_tolerance": row.worst.share if row.cases else None,
            "worst": row.worst.what or None,
            "worst_case": None if worst is None else cases[worst].name,
            "spread": row.spread,
            "compiles": row.compiles,
            "failures": [
                {
                    "property": one.property,
                    "found": one.found,
                    "case": index,
                    "shape": cases[index].name,
                    "again": self.again(row, index),
                }
                for index, one in row.failures
            ],
        }


@cache
def facts_of(case: Case) -> Mapping[str, Any]:
    """Return the facts of a case's request, independent of its values."""
    return case.make(np.random.default_rng(0)).facts


def plan_check(
    targets: Sequence[Target], dtypes: Sequence[str], chosen: Chooser = lambda case: True
) -> tuple[Row, ...]:
    """Plan the tests: a row for each target and dtype, with the cases that it supports.

    Args:
        targets: kernels on devices.
        dtypes: compute dtypes.
        chosen: returns whether to include a case.
    """
    rows = []
    for target in targets:
        once: set[int] = set()
        place = f"{target.calls.backend} {target.calls.kind}"
        for dtype in dtypes:
            row = Row(target, dtype)
            for index, case in enumerate(CASES[target.offer.candidate.op]):
                if not chosen(case) or (case.places and place not in case.places):
                    continue
                if reason := target.refusal(case, dtype):
                    row.refused = row.refused or reason
                elif case.effort != "once" or index not in once:
                    row.cases.append(index)
                    once.add(index)
            rows.append(row)
    return tuple(rows)


def run_check(
    rows: Sequence[Row],
    *,
    seed: int = SEED,
    tell: Callable[[Row, int, int], None] = lambda row, done, total: None,
    found: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Run all cases of all rows. A case's values are drawn once for all kernels of its op.

    Args:
        rows: from :func:`plan_check`; the results are added to them.
        seed: of the values.
        tell: called before each case with its row, the number of finished cases, and the total.
        found: called with a row at its first failure.
    """
    began, total = time.monotonic(), sum(len(row.cases) for row in rows)
    report = Report(tuple(rows), seed, 0.0)
    for done, (row, index) in enumerate(_in_order(rows)):
        candidate = row.target.offer.candidate
        tell(row, done, total)
        asked = (candidate.op, index, row.dtype, seed)
        calls = row.target.calls
        before = calls.compilations()
        tried = trial(candidate, calls, problem(*asked), problem(*asked, 1), alike=row.compiles)
        row.compiles = row.compiles or calls.compilations() > before
        row.take(index, tried)
        if tried.failures and len(row.failures) == len(tried.failures):
            found(row)
        if tried.failures and not _answers(calls):
            return Report(
                tuple(rows), seed, time.monotonic() - began, lost=report.again(row, index)
            )
    return Report(tuple(rows), seed, time.monotonic() - began)


def _answers(calls: Calls) -> bool:
    """Return whether a device still works: after an illegal access every later CUDA call fails."""
    try:
        calls.poison([(1,)], "float32")
    except Exception:
        return False
    return True


def _in_order(rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """Order by op, dtype and case, so that kernels of an op share a case's values."""
    jobs = [(row, index) for row in rows for index in row.cases]
    ops = list(CASES)
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    yield from sorted(
        jobs,
        key=lambda job: (
            ops.index(job[0].target.offer.candidate.op),
            dtypes.index(job[0].dtype),
            job[1],
        ),
    )
