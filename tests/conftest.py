"""What several tests of the core share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def wheels(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution name -> its wheel, built here from the working tree."""
    built = {}
    plugins = sorted(path.parent for path in repository.glob("plugins/*/pyproject.toml"))
    for folder in (repository, *plugins):
        out = tmp_path_factory.mktemp("wheel")
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, folder],
            check=True,
            capture_output=True,
        )
        (wheel,) = out.glob("*.whl")
        built[wheel.name.partition("-")[0].replace("_", "-")] = wheel
    return built
