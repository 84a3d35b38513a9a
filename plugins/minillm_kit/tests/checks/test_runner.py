"""Tests of the runner: dependents of a failed check are skipped, and any exception is an outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minillm_core.errors import PlanError
from minillm_kit import CHECKS, Check
from minillm_kit.check import Failed, NotApplicable
from minillm_kit.runner import explained, run_checks
from minillm_kit.subject import Subject


def raising(error: BaseException) -> Callable[[Any], str]:
    def look(subject: Any) -> str:
        raise error

    return look


def test_what_a_check_needs_comes_before_it() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for index, check in enumerate(CHECKS):
        assert set(check.needs) <= set(names[:index]), check.name


def test_one_fault_is_one_failure() -> None:
    checks = [
        Check("first", "a", raising(Failed("1 > 0", cause="you"))),
        Check("second", "b", lambda subject: "2", ("first",)),
        Check("third", "c", lambda subject: "3", ("second",)),
        Check("fourth", "d", lambda subject: "4"),
    ]
    told: list[str] = []
    report = run_checks(Subject("my_trick"), checks, lambda check: told.append(check.name))
    found = [(one.outcome.verdict, one.outcome.found) for one in report.results]
    assert found[0] == ("failed", "1 > 0")
    assert found[1] == found[2] == ("not run", "needs 'first'")
    assert found[3] == ("passed", "4")
    assert told == ["first", "second", "third", "fourth"]
    assert report.data()["passed"] is False
    assert "found: 1 > 0\n  cause: you\n" in explained(report.failed[0])


def test_what_builds_on_a_failed_one_through_others_is_passed_over() -> None:
    (alike,) = [check for check in CHECKS if check.name == "alike"]
    failing = Check("loads", "a", raising(Failed("1", cause="you")))
    results = run_checks(Subject("my_trick"), [failing, alike]).results
    assert results[1].outcome.found == "needs 'loads'"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (NotApplicable("why"), "not applicable"),
        (PlanError("why", fix="so"), "failed"),
        (ZeroDivisionError("why"), "failed"),
        (SystemExit("why"), "failed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_is_raised_is_an_outcome(error: BaseException, verdict: str) -> None:
    (result,) = run_checks(Subject("my_trick"), [Check("a", "b", raising(error))]).results
    assert result.outcome.verdict == verdict
    assert "why" in result.outcome.found
