"""Every pair of the repository's plugins is planned or refused by name; docs/compose.md says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minillm_core.config.load import load as load_config
from minillm_core.errors import BackendError
from minillm_core.plan import build_plan
from minillm_core.plugins.discover import installed_plugins
from minillm_core.plugins.find import find
from minillm_core.plugins.manager import load
from minillm_core.plugins.needs import unmet
from tools.compose_page import OPTIONS, PAGE, made, outcomes
from tools.repository import ours

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def all_installed() -> None:
    if missing := sorted(set(ours()) - {entry.name for entry in installed_plugins()}):
        pytest.skip(f"not installed: {', '.join(missing)}")


def test_the_page_is_what_planning_says() -> None:
    page = PAGE.read_text()
    assert made(page) == page, "python -m tools.compose_page --write"


def test_every_refusal_names_both_and_the_way_out() -> None:
    for pair, refusal in outcomes().refused.items():
        told = str(refusal)
        named = [name for name in pair if name in told]
        assert named == list(pair) or (named and isinstance(refusal, BackendError)), told
        assert refusal.fix, told
        assert len(told.splitlines()) <= 12, told


def test_what_composes_by_pairs_composes_together(tmp_path: Path) -> None:
    names = together()
    assert len(names) >= 20
    config = load_config(preset="tiny", default_preset=lambda: ("tiny", "test")).config
    plan = build_plan(config, load(names, OPTIONS))
    turned = build_plan(config, load(names, OPTIONS)[::-1])
    assert plan.hash == turned.hash
    assert {plugin.name for plugin in plan.plugins} == set(names)


def test_planning_them_all_imports_no_framework() -> None:
    found = {name: find(name).cls.manifest for name in together()}
    names = [
        name
        for name, its in found.items()
        if "cpu" in (its.devices or ("cpu",)) and not unmet(its.requires)
    ]
    assert len(names) >= 20
    options = [f"{name}.{key}={value}" for name in OPTIONS for key, value in OPTIONS[name].items()]
    arguments = ["plan", "--preset", "tiny", "--plugins", ",".join(names), *options]
    code = f"""
import sys
from minillm_core.cli.main import main
assert main({arguments}) == 0
assert not {{"torch", "mlx"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def together() -> list[str]:
    """All plugins, one of each refused pair apart."""
    out: set[str] = set()
    for pair in outcomes().refused:
        if not out & set(pair):
            out.add(max(pair, key=lambda name: sum(name in other for other in outcomes().refused)))
    return [name for name in ours() if name not in out]
