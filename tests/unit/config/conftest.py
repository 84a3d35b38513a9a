from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm_core.config.load import Loaded, load


@pytest.fixture(scope="session")
def loaded() -> Callable[..., Loaded]:
    """Load settings on a machine whose preset is tiny."""

    def call(*assignments: str, **given: Any) -> Loaded:
        given.setdefault("default_preset", lambda: ("tiny", "a test"))
        return load(assignments=assignments, **given)

    return call


@pytest.fixture(scope="session")
def settings_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | bytes], Path]:
    """Write a file of settings."""
    folder = tmp_path_factory.mktemp("settings")

    def write(content: str | bytes) -> Path:
        path = folder / "run.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
