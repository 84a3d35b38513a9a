"""Descriptions of a result's environment: hardware, versions, commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["machine", "unique"]


def machine(document: Mapping[str, Any]) -> str:
    """Format hardware, versions and commit of a result file."""
    environment = document["environment"]
    hardware, versions = environment["hardware"], environment["versions"]
    gpus = unique(gpu["name"] for gpu in hardware["gpus"])
    named = ", ".join(
        f"{label} {versions[name]}"
        for label, name in (("Python", "python"), ("PyTorch", "torch"), ("MLX", "mlx"))
        if versions[name]
    )
    full, changed, _ = environment["commit"].partition("-dirty")
    commit = full[:7] + changed
    where = f"one {gpus}" if gpus else f"{hardware['cores']} cores ({hardware['processor']})"
    return f"{where}, {hardware['system'].split()[0]}; {named}; commit {commit}"


def unique(values: Iterable[str | None]) -> str:
    """Return the distinct values, in order."""
    return " and ".join(dict.fromkeys(value for value in values if value))
