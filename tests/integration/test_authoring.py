"""The tutorial, from its first line to its last, as its reader would do it: in a clean environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.tutorial import run_page

pytestmark = pytest.mark.full


def test_the_tutorial_is_so(
    environment: Any, wheels: dict[str, Path], repository: Path, tmp_path: Path
) -> None:
    # An editable install without a network needs this beside hatchling: see the Makefile.
    pytest.importorskip("editables")
    folder = tmp_path / "desk"
    folder.mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: none, in pip's words
    quiet = {"COLUMNS": "120", "NO_COLOR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    page = (repository / "docs" / "authoring.md").read_text("utf-8")
    assert run_page(page, folder, environment.variables | offline | quiet) >= 20
