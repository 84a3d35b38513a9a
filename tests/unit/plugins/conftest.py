"""Fixtures: plugins of distributions with fake installed metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def make_plugin(site: Any, good: str) -> Callable[..., str]:
    """Return a function that installs the correct plugin with one text replaced; it returns the name."""

    def make(old: str = "", new: str = "", name: str = "trick", prelude: str = "") -> str:
        assert old in good
        site.trick(name, prelude + good.replace(old, new) if old else prelude + good)
        return name

    return make
