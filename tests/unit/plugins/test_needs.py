"""Tests of mismatched first-party versions: refused in runs that use them, before any import."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from minillm_core.errors import PluginError
from minillm_core.plugins.manager import load

ENDS = "raise SystemExit\n\n\nclass Trick(Plugin, api=1):\n    '''A trick.'''\n"


@pytest.fixture
def alone(site: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Create a site-packages folder without anything else."""
    monkeypatch.setattr(sys, "path", [str(site.folder)])
    return site


def muon(site: Any, version: str, source: str = ENDS) -> None:
    """Install a ``minillm-muon``; its default module ends the process when imported."""
    files = {"pkg_muon/__init__.py": "", "pkg_muon/trick.py": source}
    site.install("minillm-muon", {"muon": "pkg_muon.trick:Trick"}, files, version=version)


def test_a_mix_of_versions_is_refused_with_the_line_that_mends_it(alone: Any) -> None:
    alone.install("minillm-core", {}, version="0.2.0")
    alone.install("minillm-track", {}, version="0.1.0")
    alone.install("minillm-liger", {}, version="0.2.0")
    muon(alone, "0.1.0")
    with pytest.raises(PluginError) as refused:
        load(["muon"])
    error = refused.value
    assert error.exit_code == 2
    assert "minillm-muon 0.1.0, minillm-track 0.1.0 beside minillm-core 0.2.0" in error.what
    assert sys.executable in str(error.where)
    names = "minillm-core minillm-liger minillm-muon minillm-track"
    assert error.fix == f"pip install --upgrade {names}"
    assert "pkg_muon" not in sys.modules


def test_versions_that_the_run_does_not_use_are_not_looked_at(alone: Any, good: str) -> None:
    alone.install("minillm-core", {}, version="0.2.0")
    alone.install("minillm-track", {}, version="0.1.0")
    muon(alone, "0.2.0", good)
    alone.trick("other")  # dist-other 1.0
    assert [one.name for one in load(["muon", "other"])] == ["muon", "other"]


def test_without_the_cores_metadata_nothing_is_compared(alone: Any, good: str) -> None:
    muon(alone, "0.2.0", good)
    assert [one.name for one in load(["muon"])] == ["muon"]
