"""Tests of documentation pages: every command is run from top to bottom, in a clean environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.tutorial import run_page

pytestmark = pytest.mark.full


@pytest.fixture
def typed(environment: Any, repository: Path, tmp_path: Path) -> Any:
    """Return a function that runs a page of docs/, without network access."""
    folder = tmp_path / "desk"
    folder.mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: none, for pip
    quiet = {"COLUMNS": "120", "NO_COLOR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return lambda page: run_page(
        (repository / "docs" / page).read_text("utf-8"),
        folder,
        environment.variables | offline | quiet,
    )


def test_the_tutorial_is_so(typed: Any) -> None:
    # An editable install without a network needs this beside hatchling: see the Makefile.
    pytest.importorskip("editables")
    assert typed("authoring.md") >= 20


def test_the_guide_is_so(typed: Any, environment: Any, wheels: dict[str, Path]) -> None:
    needed = ("minillm-muon", "minillm-modded", "minillm-lab", "minillm-data")
    environment.install(*(wheels[name] for name in needed))
    assert typed("guide.md") >= 20
