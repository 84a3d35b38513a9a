"""A framework tried in a process of its own, for a limited time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import minillm_core

__all__ = ["LIMIT", "Examined", "examine"]

LIMIT = 120.0
"""Seconds. The first import of a framework after a start of the machine reads gigabytes."""

_BACKENDS = Path(minillm_core.__file__).parent / "backends"


@dataclass(frozen=True)
class Examined:
    """What a framework said of itself."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    failed: str | None = None  # why it says nothing


def examine(framework: str, limit: float = LIMIT, command: Sequence[str] | None = None) -> Examined:
    """Import a framework and try it; whatever happens, this process goes on.

    Args:
        framework: ``torch`` or ``mlx``.
        limit: seconds until it is ended.
        command: what to run instead of ``backends/<framework>/examine.py``.
    """
    script = str(_BACKENDS / framework / "examine.py")
    # -P: the script's own folder, whose modules have names of Python's, is not on the path
    command = command or [sys.executable, "-P", script]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return Examined(failed=f"it did not answer within {limit:g} s")
    except OSError as error:
        return Examined(failed=str(error))
    if done.returncode < 0:
        return Examined(failed=f"it crashed: {_signal(-done.returncode)}")
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        return Examined(failed=said[-1])
    try:
        facts = json.loads(done.stdout[done.stdout.index("{") :])  # a framework may greet
    except ValueError:
        return Examined(failed="what it said cannot be read")
    return Examined(facts)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
