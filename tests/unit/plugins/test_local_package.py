"""Tests that a local package that is not installed is distinguished from an unknown plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm_core.errors import PluginError
from minillm_core.plugins.discover import local_package
from minillm_core.plugins.manager import find

PROJECT = """
[project.entry-points."minillm.plugins"]
head_gate = "minillm_head_gate.head_gate:HeadGate"
"""


@pytest.mark.parametrize("place", [".", "minillm-head_gate"])
def test_its_package_is_found_in_the_folder_or_beside_others(tmp_path: Path, place: str) -> None:
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "pyproject.toml").write_text("[project]\nname = 'another'\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "pyproject.toml").write_text("[[[")
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "pyproject.toml").write_text(PROJECT)
    assert local_package("head_gate", tmp_path) == tmp_path / place
    assert local_package("tail_gate", tmp_path) is None


def test_the_fix_is_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError, match="no plugin 'head_gate'") as refused:
        find("head_gate")
    assert "pip install -e ./." in str(refused.value)
    assert "not installed" in str(refused.value)
