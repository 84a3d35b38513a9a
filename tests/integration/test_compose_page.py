"""Tests that every pair of the repository's plugins is planned or refused as documented in docs/compose.md.

The full tier plans every pair that the page lists as refused, and a seeded sample of the others;
the nightly tests plan every pair, in every form.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from minillm_core.backends.bind import kernel_preflight
from minillm_core.cli.main import main
from minillm_core.config.load import load as load_config
from minillm_core.config.schema import Config
from minillm_core.errors import BackendError, Refusal
from minillm_core.install import unmet
from minillm_core.plan import build_plan
from minillm_core.plugins.discover import installed_plugins
from minillm_core.plugins.manager import LoadedPlugin, find, load
from tools.compose_page import OPTIONS, SEED, listed, outcomes, page
from tools.every_plugin import READING, Form, forms
from tools.repository import ours

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def all_installed() -> None:
    if missing := sorted(set(ours()) - {entry.name for entry in installed_plugins()}):
        pytest.skip(f"not installed: {', '.join(missing)}")


@cache
def tiny() -> Config:
    return load_config(preset="tiny", default_preset=lambda: ("tiny", "test")).config


@pytest.fixture(
    params=[
        pytest.param(400, id="sample"),
        pytest.param(None, id="all", marks=pytest.mark.nightly),
    ]
)
def sampled(request: pytest.FixtureRequest) -> int | None:
    """Return the number of sampled pairs; None: all."""
    return request.param


def test_the_page_is_what_planning_says(sampled: int | None) -> None:
    made = page(sampled)
    assert made.generated() == made.text(), "python -m tools.compose_page --write"


def test_every_refusal_names_both_and_the_way_out(sampled: int | None) -> None:
    needs, refused = outcomes(sampled).needs, outcomes(sampled).refused
    assert len(refused) > 200
    for pair, refusal in refused.items():
        told = str(refusal)  # of the plugin, or one of its requirements
        named = [name for name in pair if any(one in told for one in (name, *needs.get(name, ())))]
        assert named == list(pair) or (named and isinstance(refusal, BackendError)), told
        assert refusal.fix, told
        assert len(told.splitlines()) <= 12, told


OPTION = re.compile(rf"\b({'|'.join(ours())})\.(\w+)(?:=(\[[^]]*\]|[^\s,;]+))?")
"""Plugin, option, and the value if there is one."""


def usual(a: Form, b: Form) -> bool:
    """Return whether both have the options used for the page."""
    return all(one.options == OPTIONS.get(one.name, {}) for one in (a, b))


def apart(a: Form, b: Form) -> Refusal | None:
    """Return the error of planning the two with their requirements; None where planning succeeds."""
    if usual(a, b) and {(a.name, b.name), (b.name, a.name)}.isdisjoint(listed_pairs()):
        return None  # as on the page, which is tested
    options = {**OPTIONS, a.name: a.options, b.name: b.options}
    try:
        planned({*a.names, *b.names}, options)
    except Refusal as refusal:
        return refusal
    return None


@cache
def listed_pairs() -> set[tuple[str, str]]:
    return listed()


@cache
def loaded(name: str, options: str) -> LoadedPlugin:
    """Load a plugin with its options, JSON; cached, since finding it takes as long as a plan."""
    (one,) = load([name], {name: json.loads(options)})
    return one


def planned(names: Iterable[str], options: Mapping[str, Mapping[str, Any]]) -> None:
    plugins = [loaded(name, json.dumps(options.get(name, {}))) for name in sorted(names)]
    kernel_preflight(build_plan(tiny(), plugins))


def test_options_that_a_way_out_names_are_there_and_lead_out(sampled: int | None) -> None:
    """For every two plugins, in each form: also those whose conflict depends on an option."""
    clashes, pairs = 0, [(a, b) for a, b in combinations(forms(), 2) if a.name != b.name]
    if sampled is not None:
        others = [pair for pair in pairs if not usual(*pair)]
        pairs = [*filter(lambda pair: usual(*pair), pairs), *Random(SEED).sample(others, sampled)]
    for a, b in pairs:
        if not (refusal := apart(a, b)):
            continue
        clashes += 1
        if {*getattr(refusal, "plugins", ())} - {a.name, b.name}:
            continue  # a conflict with a requirement is a pair of its own, with its own fix
        options: dict[str, dict[str, Any]] = {
            one.name: {**OPTIONS.get(one.name, {}), **one.options} for one in (a, b)
        }
        typed = [found.groups() for found in OPTION.finditer(str(refusal.fix))]
        for plugin, option, value in typed:
            assert option in find(plugin).cls.model_fields, f"{a}, {b}: {refusal}"
            if value is not None:
                options[plugin][option] = json.loads(value)
        if any(value is not None for _, _, value in typed):
            planned({*a.names, *b.names}, options)
    known = {form.name for form in forms() if form.options == OPTIONS.get(form.name, {})}
    assert clashes >= sum(known.issuperset(pair) for pair in listed_pairs())


def test_who_has_no_layers_to_choose_is_not_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("windows.yarn=true", "windows.start=128", "--preset", "tiny")
    assert main(["plan", "--plugins", "attn_scale,windows", *asked]) == 2
    said = capsys.readouterr().err
    assert "leave out 'attn_scale' or 'windows'" in said
    assert "layers=" not in said


def test_what_composes_by_pairs_composes_together(tmp_path: Path) -> None:
    names = together()
    assert len(names) >= 20
    plan = build_plan(tiny(), load(names, OPTIONS))
    turned = build_plan(tiny(), load(names, OPTIONS)[::-1])
    assert plan.hash == turned.hash
    assert {plugin.name for plugin in plan.plugins} == set(names)


def test_planning_them_all_imports_no_framework() -> None:
    found = {name: find(name).cls.manifest for name in together()}
    names = [
        name
        for name, its in found.items()
        if "cpu" in (its.devices or ("cpu",)) and not unmet(its.requires)
        if name not in READING  # their plans include the run that they name
    ]
    assert len(names) >= 20
    options = [
        f"{name}.{key}={value}"
        for name in OPTIONS.keys() & names
        for key, value in OPTIONS[name].items()
    ]
    arguments = ["plan", "--preset", "tiny", "--plugins", ",".join(names), *options]
    code = f"""
import sys
from minillm_core.cli.main import main
assert main({arguments}) == 0
assert not {{"torch", "mlx"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def together() -> list[str]:
    """Return all plugins but one of each refused pair."""
    out: set[str] = set()
    for pair in sorted(listed_pairs(), key=lambda pair: [*map(ours().index, pair)]):
        if not out & set(pair):
            out.add(max(pair, key=lambda name: sum(name in other for other in listed_pairs())))
    return [name for name in ours() if name not in out]
