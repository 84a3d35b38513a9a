"""On a slow machine too, stderr has the lines that are tested and no others."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no wait be long enough for a line of progress."""
    monkeypatch.setattr("minillm_core.train.progress.PATIENCE", float("inf"))
