"""Fixtures of the kernel tests: cases that take milliseconds."""

from __future__ import annotations

import re

import pytest

from minillm_kit.kernels.check import Chooser
from minillm_kit.kernels.examples import Case


@pytest.fixture(scope="session")
def quick() -> Chooser:
    """Return a filter of cases in which no size exceeds 100."""

    def small(case: Case) -> bool:
        return max(map(int, re.findall(r"[=x](\d+)", case.name))) <= 100

    return small


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the width of tables to that of a file, independent of the terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
