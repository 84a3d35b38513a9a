"""What a framework has once a process: defaults, generators, flags. No plugin may change it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["process_state"]


def process_state(backend: str) -> dict[str, Any]:
    """Name -> value; generators are those whose names say so. Imports ``torch`` or ``mlx``."""
    return importlib.import_module(f"minillm_core.backends.{backend}.process").process_state()
