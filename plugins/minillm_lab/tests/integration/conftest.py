from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine too, stderr has the lines that are tested and no others."""
    monkeypatch.setattr("minillm_core.train.progress.PATIENCE", float("inf"))
