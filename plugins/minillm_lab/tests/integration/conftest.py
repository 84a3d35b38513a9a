from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable progress output, so that on slow machines stderr has exactly the tested lines."""
    monkeypatch.setattr("minillm_core.train.progress.PATIENCE", float("inf"))
