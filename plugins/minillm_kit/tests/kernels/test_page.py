"""Test of docs/kernels.md: its commands print what the page shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

IMPORTED = (
    *("minillm_kit.kernels_list", "minillm_kit.kernels_check", "minillm_kit.kernels_bench"),
    *("minillm_core.backends.torch.backend", "minillm_core.backends.mlx.backend"),
)
"""What the page's commands import."""


@pytest.mark.slow
def test_the_page_is_so(repository: Path, tmp_path: Path, run_commands: Callable[..., int]) -> None:
    pytest.importorskip("torch")
    python = Path(sys.executable)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "160", "NO_COLOR": "1"}
    page = (repository / "docs" / "kernels.md").read_text("utf-8")
    assert run_commands(page, tmp_path, python, environment, IMPORTED) == 5
