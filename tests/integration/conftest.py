"""A fresh environment with the wheels of this working tree, made without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Environment:
    """A virtual environment; commands in it see neither the working tree nor this process's settings."""

    folder: Path
    variables: dict[str, str]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def run(self, *arguments: str | Path, cwd: Path) -> str:
        """What ``python -m arguments`` prints; it has to end well."""
        done = subprocess.run(
            [self.python, "-m", *arguments],
            cwd=cwd,
            env=self.variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *wheels: Path) -> None:
        """Install wheels as they are: what they need is there."""
        options = ("--quiet", "--no-index", "--no-deps", "--force-reinstall")
        self.run("pip", "install", *options, *wheels, cwd=self.folder)


@pytest.fixture
def environment(wheels: dict[str, Path], tmp_path: Path) -> Environment:
    """One that has the core's wheel, and the libraries of this environment."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "MINILLM"))
    }
    kept["PATH"] = f"{venv / 'bin'}{os.pathsep}{kept['PATH']}"
    made = Environment(
        venv,
        {key: value for key, value in kept.items() if key != "VIRTUAL_ENV"}
        | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
    )
    (own,) = venv.glob("lib/python*/site-packages")
    # Editable installs are .pth files there, which Python reads in its own folders alone.
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    made.install(wheels["minillm-core"])
    return made
