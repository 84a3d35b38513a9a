"""Tests that everything mentioned in the README and other pages exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.core import TyperGroup

from minillm_core.cli.commands import LazyCommand
from minillm_core.cli.main import program

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/internals.md",
    "docs/experiments.md",
    "docs/guide.md",
    "docs/chat.md",
    "docs/python.md",
    "docs/releasing.md",
    "docs/authoring.md",
    "docs/hooks.md",
    "docs/kernels.md",
    "docs/reliability.md",
    "docs/scale.md",
    "SECURITY.md",
    "benchmarks/results/README.md",
    "plugins/minillm_chat/README.md",
    "plugins/minillm_cute/README.md",
    "plugins/minillm_eval/README.md",
    "plugins/minillm_hf/README.md",
    "plugins/minillm_kit/README.md",
    "plugins/minillm_lab/README.md",
    "plugins/minillm_liger/README.md",
    "plugins/minillm_mesh/README.md",
    "plugins/minillm_metal/README.md",
    "plugins/minillm_mix/README.md",
    "plugins/minillm_muon/README.md",
    "plugins/minillm_modded/README.md",
    "plugins/minillm_optim/README.md",
    "plugins/minillm_track/README.md",
    "plugins/minillm_triton/README.md",
    "examples/minillm_hello/README.md",
    "examples/minillm_losses/README.md",
    "examples/minillm_sweep/README.md",
)


def targets(makefile: str) -> set[str]:
    """List the targets of the Makefile."""
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    return set(phony.split())


def plugin_table(page: str) -> dict[str, str]:
    """Return plugin -> distribution, from the README's table."""
    return dict(re.findall(r"^\| `(\w+)` \| `([\w-]+)` \|", page, re.MULTILINE))


def test_the_two_commands_are_one_line_each(repository: Path) -> None:
    block = re.search(r"```sh\n(.+?)```", (repository / "README.md").read_text(), re.DOTALL)
    assert block is not None
    commands = [line.partition("#")[0].strip() for line in block[1].splitlines()]
    assert commands == ["make run", "make test"]


def test_minillm_knows_every_command_and_flag_of_the_readme(repository: Path) -> None:
    page = (repository / "README.md").read_text()
    lines = re.findall(r"^minillm .+$", page, re.MULTILINE)
    assert len(lines) >= 15
    for line in lines:
        command, words = program(), shlex.split(line, comments=True)[1:]
        while isinstance(command, TyperGroup):
            command = command.get_command(None, words.pop(0))
            command = command.load() if isinstance(command, LazyCommand) else command
        command.make_context(line, words)  # parses without running


@pytest.mark.parametrize("page", PAGES)
def test_make_knows_every_target_that_a_page_names(repository: Path, page: str) -> None:
    named = re.findall(
        r"^\s*(?:`|\$ )?make ([a-z-]+)|`make ([a-z-]+)",
        (repository / page).read_text(),
        re.MULTILINE,
    )
    known = targets((repository / "Makefile").read_text())
    assert {first or second for first, second in named} <= known


def test_make_accepts_every_target(repository: Path, tmp_path: Path) -> None:
    for target in sorted(targets((repository / "Makefile").read_text())):
        command = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}"]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(repository: Path, page: str) -> None:
    text = (repository / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    for link in links:
        assert ((repository / page).parent / link).exists(), link


def test_the_plugin_table_is_what_the_distributions_offer(repository: Path) -> None:
    offered = {}
    for file in repository.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        plugins = project["entry-points"].get("minillm.plugins", {})
        offered |= dict.fromkeys(plugins, project["name"])
        for name in plugins:
            assert f"| `{name}` |" in (file.parent / "README.md").read_text()
    assert plugin_table((repository / "README.md").read_text()) == offered


def test_a_plugins_page_lists_its_options(repository: Path) -> None:
    for file in repository.glob("plugins/*/pyproject.toml"):
        points = tomllib.loads(file.read_text())["project"]["entry-points"]
        offered = points.get("minillm.plugins", {})
        page = (file.parent / "README.md").read_text()
        listed = re.findall(r"^\| `(\w+\.\w+)` \| (.+?) \|", page, re.MULTILINE)
        told = {name: default.replace("\\|", "|") for name, default in listed}
        found = {
            f"{name}.{option}": "to be given"
            if field.is_required()
            else "none"
            if field.default is None
            else f"`{json.dumps(field.default)}`"
            for name, target in offered.items()
            for option, field in EntryPoint(name, target, "").load().__pydantic_fields__.items()
        }
        assert told == found, file.parent


def test_an_old_python_is_told_what_to_do(repository: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3"
    # A replacement of an old interpreter: the real one, reporting version 3.9.
    old.write_text(
        '#!/bin/sh\nexec python3 -c "import sys; sys.version_info = (3, 9); '
        'sys.version = \'3.9.6 (default)\'; exec(sys.argv[1])" "$2"\n'
    )
    old.chmod(0o755)
    command = ["make", "setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "minillm needs Python 3.11 or newer" in done.stderr
    assert "3.9.6: make PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()
