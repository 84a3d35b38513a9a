"""How an ablation ends that found nothing: which runs failed, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minillm_core.errors import MinillmError
from minillm_core.measure.ablation import RUNS
from minillm_core.text import counted, plain

__all__ = ["refuse_nothing"]

SHOWN = 5
"""Sets of plugins that are named: an explanation is at most twelve lines."""


def refuse_nothing(result: Mapping[str, Any], out: Path) -> None:
    """Let an ablation end well where one plugin has a pair of runs at least.

    Args:
        result: as in ablation.json, finished.
        out: its folder.

    Raises:
        MinillmError: no plugin has one; it names the sets whose runs failed, and why.
    """
    if any(one["effect"] is not None for one in result["plugins"].values()):
        return
    lines = list(_lines(result))
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and of {len(lines) - SHOWN} more sets of plugins"]
    raise MinillmError(
        "the ablation found nothing: no pair of runs finished\n  " + "\n  ".join(lines),
        where=str(out / RUNS),
        fix="a lower learning rate, or less memory a step; failed runs are kept as the others are, "
        "so with another --out",
    )


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    """A line a set of plugins: how many of its runs failed, and what the first of them says."""
    errors: dict[str, list[str]] = {}
    for run in result["runs"]:
        if "error" in run:
            errors.setdefault(run["variant"], []).append(run["error"])
    for name, said in errors.items():
        yield f"{plain(name)}, {counted(len(said), 'run')} failed: {plain(said[0], 160)}"
