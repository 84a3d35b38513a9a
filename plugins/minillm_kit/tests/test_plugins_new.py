"""Tests of `minillm plugins new`: its output, its use of git, its imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm_kit import plugins_new
from minillm_kit.scaffold import KINDS

Program = Callable[..., tuple[int, str, str]]


@pytest.fixture
def git(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return ``git("A. Person")``, which sets git's user name; an exception is raised, None: no git."""

    def knows(name: Any) -> None:
        def run(command: list[str], **options: Any) -> Any:
            assert command[1:] == ["config", "user.name"]
            if isinstance(name, Exception):
                raise name
            return SimpleNamespace(stdout=name)

        monkeypatch.setattr(shutil, "which", lambda program: name and "/bin/git")
        monkeypatch.setattr(subprocess, "run", run)

    return knows


def test_the_package_is_written_and_what_comes_next_is_said(
    program: Program, git: Callable[[Any], None], tmp_path: Path
) -> None:
    git("A. Person\n")
    place = tmp_path / "my plugins"
    code, out, err = program("plugins", "new", "head-gate", "--kind", "loss", "--dir", str(place))
    folder = place / "minillm-head-gate"
    assert (code, err) == (0, "")
    first, *listed = out.splitlines()
    assert first == f"{folder}: a loss plugin that works; make it yours"
    assert listed[-4:] == [
        "next:",
        f"  pip install -e '{folder}'",
        "  minillm plugins check head_gate",
        "  minillm train --plugins head_gate",
    ]
    assert listed[-5] == "by A. Person, as LICENSE and pyproject.toml say"
    named = [line.split()[0] for line in listed[:-5]]
    assert any(line.endswith(" 1 line") for line in listed[:-5])
    assert not any(line.endswith(" 1 lines") for line in listed[:-5])
    assert sorted(folder / name for name in named) == sorted(
        path for path in folder.rglob("*") if path.is_file()
    )
    assert "A. Person" in (folder / "LICENSE").read_text()


def test_here_and_attention_are_the_defaults(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = program("plugins", "new", "head_gate")
    assert code == 0
    assert out.startswith("minillm-head_gate: an attention plugin")
    assert "  pip install -e ./minillm-head_gate\n" in out  # pip would look up a bare name
    assert (tmp_path / "minillm-head_gate" / "minillm_head_gate" / "head_gate.py").is_file()


def test_help_names_every_kind(program: Program) -> None:
    shown = program("plugins", "new", "--help")[1]
    assert all(kind in shown for kind in KINDS)


@pytest.mark.parametrize(
    "arguments", [("lambda",), ("muon",), ("head_gate", "--kind", "optimiser")]
)
def test_a_refusal_writes_nothing(
    program: Program, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    code, out, err = program("plugins", "new", *arguments, "--dir", str(tmp_path))
    assert (code, out) == (2, "")
    assert "fix:" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("known", [None, "", OSError("no"), subprocess.TimeoutExpired("git", 10)])
def test_without_a_name_from_git_it_is_the_authors(git: Callable[[Any], None], known: Any) -> None:
    git(known)
    assert plugins_new.author() == "The authors"


def test_it_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys; from minillm_core.cli.main import main\n"
        f"code = main(['plugins', 'new', 'head_gate', '--dir', {str(tmp_path)!r}])\n"
        "print(code, sorted({'torch', 'mlx', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stderr.strip() == "0 []"
