"""Asks :mod:`minillm_core.testing.probe` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from minillm_core.testing.check import Failed
from minillm_core.text import plain

__all__ = ["ask"]

PATIENCE = 180
"""Seconds after which an import, a plan or a few steps hang: a busy machine is no fault."""


def ask(*question: str, environment: Mapping[str, str], hash_seed: int = 1) -> dict[str, Any]:
    """The probe's answer.

    Raises:
        Failed: the process ended with an error, or did not end.
    """
    command = [sys.executable, "-B", "-m", "minillm_core.testing.probe", *question]
    try:
        ended = subprocess.run(
            command,
            env={**environment, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(
            f"not done after {PATIENCE} seconds", cause="work at import: leave it to a hook"
        ) from None
    if ended.returncode:
        last = plain((ended.stderr.strip().splitlines() or ["no output"])[-1])
        raise Failed(f"exit {ended.returncode}: {last}", cause="it raised in a fresh process")
    return json.loads(ended.stdout.splitlines()[-1])
