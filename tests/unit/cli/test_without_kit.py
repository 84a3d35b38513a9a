"""Tests of the core without the contract kit: its commands and its first import print what to install."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distributions

import pytest

import minillm_core.testing
import minillm_kit
from minillm_core.install import installed_version
from minillm_core.plugins import discover, first_party

Program = Callable[..., tuple[int, str, str]]


@pytest.fixture
def without_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the distribution and its package."""

    def others() -> Iterator[Distribution]:
        return (one for one in distributions() if one.metadata["Name"] != "minillm-kit")

    def version(name: str) -> str | None:
        return None if name == "minillm-kit" else installed_version(name)

    monkeypatch.setattr(discover, "distributions", others)
    monkeypatch.setattr(first_party, "installed_version", version)
    monkeypatch.setitem(sys.modules, "minillm_kit", None)


@pytest.mark.parametrize("words", [("new", "my_trick"), ("check", "muon", "--only", "api")])
@pytest.mark.usefixtures("without_kit")
def test_its_commands_say_what_to_install(program: Program, words: tuple[str, ...]) -> None:
    code, out, err = program("plugins", *words)
    assert (code, out) == (2, "")
    assert f"no installed distribution has the command minillm plugins {words[0]}" in err
    assert "fix:   pip install minillm-kit" in err


@pytest.mark.usefixtures("without_kit")
def test_help_lists_the_commands_that_are_there(program: Program) -> None:
    code, out, err = program("plugins", "--help")
    assert (code, err) == (0, "")
    listed = {line.split()[1] for line in out.splitlines() if line.startswith("│ ")}
    assert {"list", "info", "why"} <= listed
    assert not {"new", "check"} & listed


@pytest.mark.usefixtures("without_kit")
def test_the_first_import_path_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install minillm-kit") as refused:
        _ = minillm_core.testing.conformance
    assert refused.value.name == "minillm_kit"


def test_the_first_import_path_leads_to_the_kit() -> None:
    for name in ("conformance", "run_module", "one_step", "numpy_ops", "GEOMETRY"):
        assert getattr(minillm_core.testing, name) is getattr(minillm_kit, name)
    with pytest.raises(AttributeError, match="no attribute 'conformence'"):
        _ = minillm_core.testing.conformence


def test_another_missing_module_is_not_taken_for_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'pytest'", name="pytest")

    monkeypatch.setattr(minillm_core.testing, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="No module named 'pytest'"):
        _ = minillm_core.testing.conformance
