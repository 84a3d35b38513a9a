"""Tests that docs/settings.md matches the schema and the presets, and that pages link to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minillm_core.config.presets import plugins_of, recipe_names
from minillm_core.config.schema import SECTIONS, TOP
from tools.settings_page import PAGE


def test_the_page_is_what_the_source_says() -> None:
    assert PAGE.generated() == PAGE.text(), "python -m tools.settings_page --write"


def test_every_setting_has_a_meaning_and_a_row() -> None:
    settings = PAGE.generated().partition("## Settings that follow another one")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", settings, re.MULTILINE))
    inside = {f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields}
    assert set(rows) == {*TOP, *inside}
    assert all(re.search(r"[a-z]{3}", row.split(" | ")[2]) for row in rows.values())
    assert "| `65536` | `262144` | `1048576` | `1048576` | `2097152` |" in rows["eval.tokens"]
    assert rows["train.clip"].startswith("number, >= 0 | `1.0` |")


def test_settings_that_follow_another_one_are_settings_with_a_meaning() -> None:
    rows = (
        PAGE.generated().partition("## Settings that follow another one")[2].partition("\n## ")[0]
    )
    followed = re.findall(
        r"^\| `(\w+)` \| `([\w.]+)` \| `([\w.]+)` \| `(\[.+\])` \|$", rows, re.MULTILINE
    )
    assert ("depth", "train.lr", "model.layers") in {row[:3] for row in followed}
    for _, key, dial, _ in followed:
        section, _, name = key.partition(".")
        assert name in SECTIONS[section].model_fields
        section, _, name = dial.partition(".")
        assert name in SECTIONS[section].model_fields


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_shows_its_plugins_with_their_options(name: str) -> None:
    shown = PAGE.generated().partition(f"plugins of `{name}`")[2].partition("plugins of `")[0]
    for plugin, options in plugins_of(name).items():
        (row,) = re.findall(rf"^\| `{plugin}` \| (.+)\|$", shown, re.MULTILINE)
        assert "minillm-" in row
        assert all(f"`{plugin}.{key}=" in row for key in options)


@pytest.mark.parametrize("page", ["README.md", "docs/authoring.md", "minillm_core/cli/options.py"])
def test_pages_lead_there(repository: Path, page: str) -> None:
    assert "settings.md" in (repository / page).read_text("utf-8")
