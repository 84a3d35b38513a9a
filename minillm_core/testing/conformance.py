"""The kit under pytest: one test a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from minillm_core.testing.registry import CHECKS
from minillm_core.testing.runner import Result, run_checks
from minillm_core.testing.subject import Subject

__all__ = ["conformance"]


def conformance(
    spec: str, options: Mapping[str, Any] | None = None, *, backend: str = "both"
) -> Callable[..., None]:
    """A test function that runs every check of a plugin, each as a test of its own.

    ::

        test_contract = conformance("my_trick")

    ``pytest -k decodes`` runs one of them. A check that does not apply is skipped with its reason.

    Args:
        spec: the plugin's name, or a file and its class.
        options: its options, where not the defaults.
        backend: ``torch``, ``mlx`` or ``both``.
    """
    import pytest

    subject = cache(lambda: Subject(spec, options, backend=backend))

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    def test_contract(check: Any) -> None:
        (result,) = run_checks(subject(), [check]).results
        if result.outcome.verdict == "failed":
            pytest.fail(explained(result), pytrace=False)
        if result.outcome.verdict != "passed":
            pytest.skip(result.outcome.found)

    return test_contract


def explained(result: Result) -> str:
    """A failure in four lines: what was to hold, the numbers, the likely cause, how to rerun it."""
    outcome = result.outcome
    return (
        f"{result.check}: {result.proves}\n  found: {outcome.found}\n"
        f"  cause: {outcome.cause}\n  alone: pytest -k {result.check}"
    )
