"""Tests of documentation pages: every command is run from top to bottom, in a clean environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full

IMPORTED = (
    *("minillm_core.cli.train", "minillm_core.cli.plan", "minillm_core.train.session"),
    *("minillm_core.backends.torch.backend", "minillm_core.backends.mlx.backend"),
    *("minillm_hf.directory", "minillm_lab.speeds", "minillm_lab.study"),
)
"""What training imports in a page's environment, so that each command need not."""


@pytest.fixture
def typed(
    environment: Any, repository: Path, tmp_path: Path, run_commands: Callable[..., int]
) -> Callable[[str], int]:
    """Return a function that runs a page of docs/, without network access."""
    folder = tmp_path / "desk"
    folder.mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: none, for pip
    quiet = {"COLUMNS": "120", "NO_COLOR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    variables = environment.variables | offline | quiet

    def run(page: str) -> int:
        text = (repository / "docs" / page).read_text("utf-8")
        return run_commands(text, folder, environment.python, variables, IMPORTED)

    return run


def test_the_tutorial_is_so(typed: Any) -> None:
    # An editable install without a network needs this beside hatchling: see the Makefile.
    pytest.importorskip("editables")
    assert typed("authoring.md") >= 20


def test_the_guide_is_so(typed: Any, environment: Any, wheels: dict[str, Path]) -> None:
    needed = ("minillm-muon", "minillm-modded", "minillm-lab", "minillm-data")
    environment.install(*(wheels[name] for name in needed))
    assert typed("guide.md") >= 20
