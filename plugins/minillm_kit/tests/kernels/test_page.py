"""Test of docs/kernels.md: its commands print what the page shows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tools.tutorial import run_page


@pytest.mark.slow
def test_the_page_is_so(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = Path(sys.executable).parent
    path = f"{here}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "160", "NO_COLOR": "1"}
    page = (repository / "docs" / "kernels.md").read_text("utf-8")
    assert run_page(page, tmp_path, environment) == 5
