"""Fixtures: no progress output, so that stderr has exactly the tested lines on slow machines."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the delay of progress output above any duration."""
    monkeypatch.setattr("minillm_core.train.progress.PATIENCE", float("inf"))
